"""User functions, named by "module:function" or "path/FILE.py:function"."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

from maxbatch.config.values import nearest_name


def import_function(spec: str) -> Callable[..., object]:
    """Imports and returns the function named by `spec`.

    Raises:
      ImportError: the function does not exist, or its module raises; the message may have several
        lines.
    """
    place, _, name = spec.rpartition(":")
    try:
        module = _file_module(place) if place.endswith(".py") else importlib.import_module(place)
    except BaseException as error:
        raise ImportError(f"cannot import {place} ({type(error).__name__}: {error})") from error
    function: Callable[..., object] | None = getattr(module, name, None)
    if not callable(function):
        problem = f"{name} is not a function" if hasattr(module, name) else f"{place} has no {name}"
        names = [known for known, value in vars(module).items() if inspect.isfunction(value)]
        nearest = nearest_name(name, names)
        raise ImportError(problem + (f"; works: {place}:{nearest}" if nearest else ""))
    return function


def source_hash(spec: str) -> str:
    """Returns a hash of a function's file and of the user's files that it imports, without running
    them.

    The user's files are those in the folder of FILE.py, or in the package of the module.
    """
    place, _, _ = spec.rpartition(":")
    if place.endswith(".py"):
        path = os.path.abspath(os.path.expanduser(place))
        root, package = os.path.dirname(path), ""
    else:
        spec_of_module = _spec_as_for_workers(place)
        path, package = (spec_of_module and spec_of_module.origin) or "", place.partition(".")[0]
        root = os.path.abspath(path)
        for _ in range(place.count(".") + 1 + (os.path.basename(path) == "__init__.py")):
            root = os.path.dirname(root)
    total, contents, left = hashlib.sha256(), dict[str, bytes](), [path]
    while left:
        path_of_file = left.pop()
        if path_of_file in contents or not os.path.isfile(path_of_file):
            continue
        with open(path_of_file, "rb") as file:
            contents[path_of_file] = file.read()
        left += _imported(contents[path_of_file], os.path.dirname(path_of_file), root, package)
    for path_of_file in sorted(contents):
        total.update(hashlib.sha256(os.path.relpath(path_of_file, root).encode()).digest())
        total.update(hashlib.sha256(contents[path_of_file]).digest())
    return total.hexdigest()[:16]


def _spec_as_for_workers(module: str) -> ModuleSpec | None:
    """Finds a module as worker processes do, which look into the working folder first, as `python
    -m` does.
    """
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        return importlib.util.find_spec(module)
    finally:
        sys.path.remove(folder)


def _imported(source: bytes, folder: str, root: str, package: str) -> Iterator[str]:
    """Yields possible paths, below `root`, of the modules that a source imports."""
    try:
        statements = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return
    for statement in statements:
        names, base = [], root
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            module = statement.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in statement.names)]
            base = folder if statement.level else root
            for _ in range(statement.level - 1):
                base = os.path.dirname(base)
        for name in names:
            if base == root and package and name.partition(".")[0] != package:
                continue
            place = base
            for part in name.split("."):  # importing runs the parent packages too
                place = os.path.join(place, part)
                yield from (f"{place}.py", os.path.join(place, "__init__.py"))


def _file_module(path: str) -> ModuleType:
    """Imports a file as `python FILE` does, so that it can import modules beside it."""
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
