"""Functions of users, named as "module:function" or "path/FILE.py:function"."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maxbatch.config.values import nearest_name


def import_function(spec: str) -> Callable[..., Any]:
    """Returns the function that `spec` names.

    Raises:
      ImportError: there is no such function, or its module raises; the message may have several lines.
    """
    place, _, name = spec.rpartition(":")
    try:
        module = _file_module(place) if place.endswith(".py") else importlib.import_module(place)
    except BaseException as error:
        raise ImportError(f"cannot import {place} ({type(error).__name__}: {error})") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        problem = f"{name} is no function" if hasattr(module, name) else f"{place} has no {name}"
        names = [known for known, value in vars(module).items() if inspect.isfunction(value)]
        nearest = nearest_name(name, names)
        raise ImportError(problem + (f"; works: {place}:{nearest}" if nearest else ""))
    return function


def _file_module(path: str) -> ModuleType:
    """Imports a file as `python FILE` would see it: modules beside it can be imported."""
    path = os.path.abspath(os.path.expanduser(path))
    folder, file = os.path.split(path)
    name = f"maxbatch_user_{file.removesuffix('.py')}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == path:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "files that end in .py have a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
