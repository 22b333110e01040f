"""Commands as forks of a process that has imported what they need: each saves the seconds of its
imports.

A fork is a process like any other, with its own environment, folder, streams and exit code. It
shares with the other forks of its parent the hash seed and what JAX read of the environment when it
was imported. The children of a command (trials, branches, simulated hosts) are its forks.
"""

from __future__ import annotations

import atexit
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
import traceback
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

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
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
        }
        status, writing = os.pipe()
        with (
            open(status, "rb", buffering=0) as told,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            with open(writing, "wb"):
                fds = [out.fileno(), err.fileno(), writing]
                socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            pid = _told(told.read(_BYTES))
            if not select.select([told], [], [], timeout)[0]:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(arguments, timeout)
            code = _told(told.read(_BYTES))
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


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
            if pid := os.fork():
                os.write(told, pid.to_bytes(_BYTES, signed=True))
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, told))
                os.close(out)
                os.close(err)
                continue
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            selector.close()
            requests.close()
            os.closerange(3, 1024)
            _become(**json.loads(message))
            return


def _become(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["maxbatch", *arguments]
    sys.path[0] = folder  # as `python -m` has it
    subprocess.Popen = _Child  # type: ignore[misc]


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
