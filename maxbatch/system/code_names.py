"""Names of a user's own code, for messages."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path


def code_name(part: object) -> str:
    """Returns the module and the name of a class or a function, or of an object's class:
    `mine.Rows`.
    """
    code = getattr(part, "func", part)  # of a functools.partial
    code = code if inspect.isclass(code) or inspect.isroutine(code) else type(code)
    module, name = (
        str(getattr(code, "__module__", None) or ""),
        str(getattr(code, "__qualname__", code)),
    )
    if module == "__main__":  # a script, or a notebook, which has no file
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
    return name if module in ("", "builtins") else f"{module}.{name}"
