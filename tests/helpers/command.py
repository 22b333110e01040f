"""The command line as a user meets it: a process of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from tests.helpers.forks import Fork, Forks

# They take a third of the usual time to compile; what is computed is the same up to rounding. XLA's
# older emitters of fusions are there until JAX 0.10. By default parts of a program compile side by
# side, for a fifth more of CPU time.
_HAS_OLDER_EMITTERS = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * _HAS_OLDER_EMITTERS
)
_READ_AT_IMPORT = ("JAX_", "PYTHON", "TF_")
# But of these each fork reads its own.
_READ_LATER = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_PORT",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "PYTHONPATH",
)
_STARTING = threading.Lock()  # of two threads that need a parent, one starts it


def environment() -> dict[str, str]:
    """The test's environment without a command's own settings: fake devices, their threads, a TPU's
    flags.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PJRT_NPROC", "LIBTPU_INIT_ARGS")
    }
    return inherited | {"XLA_FLAGS": QUICK_TO_COMPILE, "COLUMNS": "100"}


def maxbatch(*arguments: str | Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, as a fork."""
    stated = environment()
    return _parent_of(stated).run([str(argument) for argument in arguments], stated, timeout)


def start(*arguments: str | Path, own_group: bool = False, **variables: str) -> Fork:
    """Starts a command as a fork, for a test that signals it; in a process group of its own where
    the test kills it with its children.
    """
    stated = environment() | variables
    return _parent_of(stated).start([str(argument) for argument in arguments], stated, own_group)


def _parent_of(stated: Mapping[str, str]) -> Forks:
    read = {
        name: value
        for name, value in stated.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }
    with _STARTING:
        return _parent(frozenset(read.items()))


@functools.cache
def _parent(read_at_import: frozenset[tuple[str, str]]) -> Forks:
    return Forks(environment() | dict(read_at_import))


def start_anew(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    """Starts a command as a user does, in a new Python process, for a test of its first seconds."""
    return subprocess.Popen(
        [sys.executable, "-m", "maxbatch", *map(str, arguments)],
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )


class Hold:
    """Holds a run after one of its updates until it is released, so that it cannot end before a
    signal reaches it.
    """

    def __init__(self, step: int, folder: Path) -> None:
        self._file = folder / f"held-after-{step}"
        self._file.touch()
        path = os.pathsep.join(
            [str(Path(__file__).parent / "hold"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self.variables = {"PYTHONPATH": path, "HOLD_AFTER": str(step), "HOLD": str(self._file)}

    def release(self) -> None:
        self._file.unlink()


def recorded(run_dir: Path) -> int:
    """Returns the number of updates that a run has recorded."""
    log = run_dir / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0
