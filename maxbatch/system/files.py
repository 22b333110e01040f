"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from maxbatch.system.errors import ConfigError


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
      ConfigError: it cannot be written there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); give another place") from None
