"""JSON files that a command or a run leaves for the next one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from maxbatch.system import bounded
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.bounded import RefusedContent
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage import AnyPath


def read_json(path: AnyPath, remedy: str, parse: Callable[[Any], Any] = lambda value: value) -> Any:
    """Returns what `parse` makes of a JSON file; None if there is no file, or it holds null.

    Raises:
      ConfigError: the file cannot be read, or `parse` refuses what it holds; the message ends with the remedy.
    """
    try:
        value = bounded.read_json(path, f"{path}: cannot be read", finite=False)
        return None if value is None else parse(value)
    except FileNotFoundError:
        return None
    except RefusedContent as error:
        raise ConfigError(f"{error}; {remedy}") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); {remedy}") from None
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error!r}); {remedy}") from None


def write_json(path: AnyPath, value: Any) -> None:
    """Writes a JSON file, one line for each item.

    Raises:
      ConfigError: the file cannot be written.
      TrainingError: the disk is full.
    """
    write_atomically(path, json.dumps(value, indent=1) + "\n")
