"""The end of a process whose CPU devices wait for each other forever."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from maxbatch.system.errors import EXIT_FAILED
from maxbatch.system.hardware.cpu_devices import MOST_THREADS

_LIMIT_S = 60.0  # seconds without any computation after which the process ends
_LIMIT_OF_HOSTS_S = 600.0  # with several hosts: another host may be the one that computes
_POLL_S = 2.0
_IDLE = 0.02  # share of a core; below it nothing computes


def watch_cpu_devices() -> None:
    """Starts the thread that ends this process, with one line and exit code 1, once its CPU devices
    hang.

    They hang if a thread of Python waits in JAX while the process computes nothing for 60 s (10
    minutes if there are several hosts), and other processes are not the reason. A single device
    cannot hang. The files on disk are the same as after a kill.
    """
    threading.Thread(target=_watch, name="maxbatch-cpu-devices", daemon=True).start()


def _watch() -> None:
    idle, starved, computed = 0.0, 0.0, time.process_time()
    while True:
        time.sleep(_POLL_S)
        before, computed = computed, time.process_time()
        is_idle = computed - before < _IDLE * _POLL_S and _waits_in_jax()
        idle, starved = (
            (idle + _POLL_S, starved + _POLL_S * _waits_for_core()) if is_idle else (0.0, 0.0)
        )
        if starved > _LIMIT_S / 2:
            idle = starved = 0.0
        if idle >= _LIMIT_S and _hangs(idle):
            _end(idle)


def _waits_for_core() -> bool:
    """Returns whether another thread of the process is ready to compute; False if the system cannot
    say.
    """
    own_id = str(threading.get_native_id())
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (
                thread.name != own_id
                and (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R"
            ):
                return True
    return False


def _waits_in_jax() -> bool:
    """Returns whether a thread of Python waits in JAX, but not for other hosts to join."""
    jax = sys.modules.get("jax")
    if jax is None or jax.__file__ is None:
        return False
    folder = f"{Path(jax.__file__).parent}{os.sep}"
    files = [frame.f_code.co_filename for frame in sys._current_frames().values()]
    return any(file.startswith(folder) and not file.endswith("distributed.py") for file in files)


def _hangs(idle: float) -> bool:
    import jax

    limit = _LIMIT_OF_HOSTS_S if jax.distributed.is_initialized() else _LIMIT_S
    return idle >= limit and jax.default_backend() == "cpu" and jax.device_count() > 1


def _end(idle: float) -> None:
    threads = os.environ.get("PJRT_NPROC", "")
    works = (
        f"PJRT_NPROC={min(MOST_THREADS, 2 * int(threads))}"
        if threads.isdecimal()
        else "PJRT_NPROC=256"
    )
    line = (
        f"maxbatch: error: the CPU devices have waited {idle:.0f} s for each other in a "
        "collective and nothing computes: XLA's threads are used up; run the same command again, "
        f"with more threads: {works}\n"
    )
    try:
        os.write(2, line.encode())
    finally:
        os._exit(EXIT_FAILED)
