"""Commands as forks of a process that has imported what they need: each saves the seconds of its
imports.

A fork is a process like any other, with its own environment, folder, streams and exit code. It
shares with the other forks of its parent the hash seed and what JAX read of the environment when it
was imported. The children of a command (trials, branches, simulated hosts) are its forks.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import io
import itertools
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

_LARGEST_REQUEST, _BYTES = 1 << 17, 4
_CHILD = [sys.executable, "-m", "maxbatch.system.processes.child_process"]
_TOP = Path(__file__).parents[2]


class Forks:
    """A parent process of commands.

    Args:
      environment: the parent's; a fork has one of its own.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.helpers.forks"]
            path = os.pathsep.join([str(_TOP), *filter(None, [environment.get("PYTHONPATH")])])
            self._process = subprocess.Popen(
                command, env={**environment, "PYTHONPATH": path}, stdin=theirs
            )

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs `maxbatch ARGUMENTS` in the current folder."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            fork = self._fork(arguments, environment, out.fileno(), err.fileno())
            try:
                code = fork.wait(timeout)
            except subprocess.TimeoutExpired:
                fork.kill()
                fork.wait()
                raise
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], own_group: bool
    ) -> Fork:
        """Starts `maxbatch ARGUMENTS` in the current folder, with both outputs in one pipe; in a
        process group of its own if so asked.
        """
        reading, writing = os.pipe()
        with open(writing, "wb"):
            fork = self._fork(arguments, environment, writing, writing, own_group)
        fork.stdout = open(reading)  # noqa: SIM115
        return fork

    def _fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        out: int,
        err: int,
        own_group: bool = False,
    ) -> Fork:
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
            "own_group": own_group,
        }
        status, writing = os.pipe()
        with open(writing, "wb"):
            socket.send_fds(self._socket, [json.dumps(request).encode()], [out, err, writing])
        return Fork(arguments, status)


class Fork:
    """A command that has been started; the part of `subprocess.Popen` that tests use.

    Args:
      status: a pipe, from which its process id and, when it has ended, its exit code are read.
    """

    def __init__(self, arguments: Sequence[str], status: int) -> None:
        self._arguments = arguments
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115
        self.pid = _told(self._status.read(_BYTES))
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout or 0)
        return code

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            with self._status:
                self.returncode = _told(self._status.read(_BYTES))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Reads until the command and all its children have closed the pipe, and waits."""
        assert self.stdout is not None
        end = time.monotonic() + timeout if timeout is not None else None
        parts: list[bytes] = []
        while not parts or parts[-1]:
            left = max(0.0, end - time.monotonic()) if end is not None else None
            if not select.select([self.stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self._arguments, timeout or 0, b"".join(parts))
            parts.append(os.read(self.stdout.fileno(), 1 << 16))
        self.stdout.close()
        self.wait(max(0.0, end - time.monotonic()) if end is not None else None)
        return io.TextIOWrapper(io.BytesIO(b"".join(parts))).read(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _told(message: bytes) -> int:
    assert len(message) == _BYTES, "the parent of commands has ended"
    return int.from_bytes(message, signed=True)


def _serve(requests: socket.socket) -> None:
    """Forks for every request, and tells its process id and its exit code; returns in a fork, ready
    for its command.
    """
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data:  # a fork has ended
                pid, told = key.data
                os.write(
                    told,
                    os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]).to_bytes(_BYTES, signed=True),
                )
                selector.unregister(key.fd)
                os.close(told)
                os.close(key.fd)
                continue
            message, fds, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 3)
            if not message:
                sys.exit()
            out, err, told = fds
            request = json.loads(message)
            own_group = request.pop("own_group")
            if pid := os.fork():
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, told))
                os.close(out)
                os.close(err)
                continue
            if own_group:
                os.setsid()
            os.write(told, os.getpid().to_bytes(_BYTES, signed=True))
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            selector.close()
            requests.close()
            os.closerange(3, 1024)
            _become(**request)
            return


def _become(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["maxbatch", *arguments]
    sys.path[0] = folder  # as `python -m` has it
    tempfile.tempdir = None  # TMPDIR may be another
    _start_as_python_does()
    subprocess.Popen = _Child  # type: ignore[misc]


def _start_as_python_does() -> None:
    """Does with PYTHONPATH, which has a sitecustomize.py where a test holds a run, what Python does
    with it.
    """
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [path for path in paths if path not in sys.path]
    sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")


class _Child(subprocess.Popen[Any]):
    """A child process of a command; a fork where the command starts a `maxbatch` command."""

    def __init__(self, args: Any, **options: Any) -> None:
        from jax._src import xla_bridge  # a test's process sets what JAX reads when it is imported

        if args[: len(_CHILD)] == _CHILD and not xla_bridge.backends_are_initialized():
            arguments, kept = args[len(_CHILD) :], options.get("pass_fds", ())
            options["preexec_fn"] = partial(_run_child, arguments, options["env"], kept)
        super().__init__(args, **options)


def _run_child(
    arguments: list[str], environment: dict[str, str], keep_open: Sequence[int]
) -> NoReturn:
    """Runs in a fork what would be a new program, and so begins with nothing of its parent's but
    the libraries: it handles no signal, has no other open file, and loads maxbatch anew.
    """
    code: int = 1
    try:
        _leave_the_parents_behind(keep_open)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [_CHILD[-1], *arguments]
        _start_as_python_does()
        runpy.run_module(_CHILD[-1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  waits for threads, as Python does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _leave_the_parents_behind(keep_open: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
    for below, above in itertools.pairwise([2, *sorted(keep_open), 1024]):
        os.closerange(below + 1, above)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # the files of its parent stay
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    for name in [name for name in sys.modules if name.partition(".")[0] == "maxbatch"]:
        del sys.modules[name]


if __name__ == "__main__":
    import gc

    import maxbatch.run.pretraining  # noqa: F401  what most commands need

    gc.freeze()  # no fork looks through it and copies its pages
    _serve(socket.socket(fileno=os.dup(0)))
    runpy.run_module("maxbatch", run_name="__main__", alter_sys=True)
