"""`python -m maxbatch.rl.reward_worker REQUESTS ANSWERS`: a process that scores responses with the user's functions.

REQUESTS and ANSWERS are file descriptors of pipes, on which messages go as pickles after their length. The first
request is the list of the functions, answered by "" or by what is wrong with them; each further one is a list of
responses, answered one by one as soon as each is scored. Standard output goes where standard error goes, so that a
function may print, and standard input is the pipe of `maxbatch.system.child_process`, whose other end the parent holds.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from maxbatch.config.values import nearest_name
from maxbatch.system.child_process import end_with_parent

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 16
_LONGEST_PROBLEM = 400
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

RewardFunction = Callable[[str, str, dict[str, Any]], Any]


# (prompt, response, record)
Request = tuple[str, str, dict[str, Any]]
# What the functions gave, one number each; None, and what was wrong, where one of them failed.
Answer = tuple[tuple[float, ...] | None, str]


class Messages:
    """Cuts the bytes of a pipe into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, more: bytes) -> Iterator[Any]:
        """Yields the messages that are whole with these bytes."""
        self._bytes += more
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            body = bytes(memoryview(self._bytes)[_LENGTH.size : end])
            del self._bytes[:end]
            yield pickle.loads(body)


def packed(message: Any) -> bytes:
    """Returns a message as it goes through a pipe."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def _send(descriptor: int, message: Any) -> None:
    rest = memoryview(packed(message))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def score(functions: list[RewardFunction], request: Request) -> Answer:
    """Calls the functions one after the other, each with a record of its own; the first that fails ends it.

    Fails: an exception, `sys.exit`, a value that is no number. Whether numbers are finite is not looked at.
    """
    prompt, response, record = request
    values = []
    for function in functions:
        try:
            value = function(prompt, response, copy.deepcopy(record))
            if not hasattr(value, "__float__"):
                return None, _in_one_line(f"{_name(function)} returned {value!r:.80}, which is no number")
            values.append(float(value))
        except BaseException as error:
            return None, _in_one_line(f"{_name(function)} raised {type(error).__name__}: {error}")
    return tuple(values), ""


def import_function(spec: str) -> RewardFunction:
    """Returns the function that "module:function" or "path/FILE.py:function" names.

    Raises:
      ImportError: it cannot be had; the message says why, in one line.
    """
    place, _, name = spec.rpartition(":")
    try:
        module = _file_module(place) if place.endswith(".py") else importlib.import_module(place)
    except BaseException as error:
        raise ImportError(f"cannot import {place} ({type(error).__name__}: {error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        what = f"{name} is no function" if hasattr(module, name) else f"{place} has no {name}"
        names = [known for known, value in vars(module).items() if inspect.isfunction(value)]
        nearest = nearest_name(name, names)
        raise ImportError(what + (f"; works: {place}:{nearest}" if nearest else ""))
    try:
        inspect.signature(function).bind("prompt", "response", {})
    except TypeError as error:
        raise ImportError(f"{name} must take (prompt, response, record) ({error})") from error
    except ValueError:  # a function written in C may not say what it takes
        return function
    return function


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _in_one_line(what: object) -> str:
    return " ".join(str(what).split())[:_LONGEST_PROBLEM]


def _file_module(path: str) -> ModuleType:
    """Imports a file as `python FILE` would see it: modules beside it can be imported."""
    path = os.path.abspath(os.path.expanduser(path))
    folder, file = os.path.split(path)
    name = f"maxbatch_reward_{file.removesuffix('.py')}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == path:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "files that end in .py have a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module


def _requests(descriptor: int) -> Iterator[Any]:
    messages = Messages()
    while more := os.read(descriptor, _READ_BYTES):
        yield from messages.feed(more)


def main() -> None:
    """Serves until the requests end."""
    # Ctrl-C and SIGTERM reach the whole process group: the parent decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    if sys.platform == "linux":
        # A function that never lets go of the interpreter would keep `end_with_parent` from running.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    incoming, outgoing = map(int, sys.argv[1:])
    for descriptor in (incoming, outgoing):
        os.set_inheritable(descriptor, False)
    requests = _requests(incoming)
    try:
        functions = [import_function(spec) for spec in next(requests)]
    except ImportError as error:
        _send(outgoing, _in_one_line(error))
        return
    _send(outgoing, "")
    for batch in requests:
        for request in batch:
            _send(outgoing, score(functions, request))


if __name__ == "__main__":
    main()
