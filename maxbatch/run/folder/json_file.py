"""JSON files that a command or a run leaves for the next one."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from maxbatch.system.errors import ConfigError, TrainingError, reason
from maxbatch.system.storage import bounded
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.storage import AnyPath

T = TypeVar("T")


def finite(number: float | None) -> float | None:
    """Returns a number that JSON has; None for one that is not finite."""
    return number if number is not None and math.isfinite(number) else None


def read_json(path: AnyPath, remedy: str, parse: Callable[[Any], T]) -> T | None:
    """Returns the result of `parse` on a JSON file; None if there is no file, or it holds null.

    Raises:
      ConfigError: the file cannot be read, is beyond the bounds of `bounded.read_json`, or `parse`
        refuses its content; the message ends with the remedy.
    """
    try:
        value = bounded.read_json(path, str(path), finite=False)
        return None if value is None else parse(value)
    except FileNotFoundError:
        return None
    except bounded.RefusedContent as error:
        why = str(error).removeprefix(f"{path}: ")
        raise ConfigError(f"{path}: cannot be read ({why}); {remedy}") from None
    except (ConfigError, TrainingError):
        raise
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({reason(error)}); {remedy}") from None
    except KeyError as error:
        raise ConfigError(f"{path}: cannot be read (no field {error}); {remedy}") from None


def checked(value: object, shape: object, name: str = "content") -> Any:
    """Returns a value of JSON if it has a shape.

    Args:
      shape: a type or several (`int | None`; `float` allows whole numbers, `object` anything),
        `[shape]` for a list, `{str: shape}` for an object of any names, `{"name": shape}` for one
        with at least these fields.
      name: names the value in messages.

    Raises:
      TypeError: it has another shape.
    """
    if isinstance(shape, list) and isinstance(value, list):
        for item in value:
            checked(item, shape[0], f"an item of {name}")
    elif isinstance(shape, dict) and isinstance(value, dict):
        for field in value if str in shape else shape:
            if field not in value:
                raise TypeError(f"{name} has no field {field}")
            checked(value[field], shape.get(field, shape.get(str)), field[:80])
    elif isinstance(shape, list | dict) or not _is_one(value, typing.get_args(shape) or (shape,)):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


def _is_one(value: object, types: tuple[type, ...]) -> bool:
    return object in types or type(value) in types or (type(value) is int and float in types)


def write_json(path: AnyPath, value: object) -> None:
    """Writes a JSON file, one line for each item.

    Raises:
      ConfigError: the file cannot be written.
      TrainingError: the disk is full.
    """
    write_atomically(path, json.dumps(value, indent=1) + "\n")
