"""Imports that leave out a library's costly optional dependencies."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def hidden(*modules: str) -> Iterator[None]:
    """Makes imports of modules fail, unless loaded, as if they were not installed."""
    names = [name for name in modules if name not in sys.modules]
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
