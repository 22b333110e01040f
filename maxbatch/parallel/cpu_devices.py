"""CPU devices of one process: enough threads for their collectives, and an end for a process whose devices hang.

XLA runs all CPU devices of a process on one pool of threads, by default one for each core or device. A collective keeps
its thread until the whole group has arrived. XLA orders the collectives of a device only by when they begin: one that
follows a loop begins while the collectives inside the loop run. So a device may keep several threads: one for each of
its loops with collectives under way, and one more. Once every thread waits, the devices still to arrive find none, and
the program waits forever. More threads than all devices together can keep exclude this.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from maxbatch.system.errors import EXIT_FAILED

_THREADS_PER_DEVICE = 4  # nested loops of a step; idle threads cost time
_MOST_THREADS = 256  # XLA's own limit for the pool
_COUNT = "--xla_force_host_platform_device_count"
_FLAGS = {
    # A schedule that runs fewer collectives at once: hundreds of devices do not get a thread each.
    "--xla_cpu_enable_concurrency_optimized_scheduler": "false",
    # Many devices on few cores meet late; XLA takes a wait of 40 s for a deadlock and aborts.
    "--xla_cpu_collective_call_terminate_timeout_seconds": 1200,
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
}

_LIMIT_S = 60.0  # seconds without any computation after which the process ends
_LIMIT_OF_HOSTS_S = 600.0  # with several hosts: another host may be the one that computes
_POLL_S = 2.0
_IDLE = 0.02  # share of a core; below it nothing computes


def make_cpu_devices(num_devices: int) -> None:
    """Makes JAX use that many CPU devices and nothing else, before its backends start."""
    others = [word for word in os.environ.get("XLA_FLAGS", "").split() if word.split("=")[0] != _COUNT]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{_COUNT}={num_devices}"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    give_cpu_devices_threads()


def give_cpu_devices_threads() -> None:
    """Sets the threads of the CPU devices that the environment requests (`XLA_FLAGS`, `JAX_NUM_CPU_DEVICES`).

    Must come before JAX starts its backends. A single device needs no setting. The user's settings stay: a larger
    number of threads (`PJRT_NPROC`), other values of the flags.
    """
    words = os.environ.get("XLA_FLAGS", "").split()
    flags = dict(word.partition("=")[::2] for word in words)
    counts = [text for text in (flags.get(_COUNT, ""), os.environ.get("JAX_NUM_CPU_DEVICES", "")) if text.isdecimal()]
    num_devices = max(map(int, counts), default=1)
    if num_devices == 1 and not os.environ.get("JAX_NUM_PROCESSES"):
        return
    own = os.environ.get("PJRT_NPROC", "")
    threads = min(_MOST_THREADS, _THREADS_PER_DEVICE * num_devices)
    os.environ["PJRT_NPROC"] = str(max(threads, int(own) if own.isdecimal() else 0))
    words += [f"{name}={value}" for name, value in _FLAGS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join(words)


def watch_cpu_devices() -> None:
    """Starts the thread that ends this process, with one line and exit code 1, once its CPU devices hang.

    They hang if a thread of Python waits in JAX while the process computes nothing for 60 s (10 minutes if there are
    several hosts), and other processes are not the reason. A single device cannot hang. The files
    on disk are the same as after a kill.
    """
    threading.Thread(target=_watch, name="maxbatch-cpu-devices", daemon=True).start()


def _watch() -> None:
    idle, starved, computed = 0.0, 0.0, time.process_time()
    while True:
        time.sleep(_POLL_S)
        before, computed = computed, time.process_time()
        is_idle = computed - before < _IDLE * _POLL_S and _waits_in_jax()
        idle, starved = (idle + _POLL_S, starved + _POLL_S * _waits_for_core()) if is_idle else (0.0, 0.0)
        if starved > _LIMIT_S / 2:
            idle = starved = 0.0
        if idle >= _LIMIT_S and _hangs(idle):
            _end(idle)


def _waits_for_core() -> bool:
    """Returns whether another thread of the process is ready to compute; False if the system cannot say."""
    own = str(threading.get_native_id())
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if thread.name != own and (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R":
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
    works = f"PJRT_NPROC={min(_MOST_THREADS, 2 * int(threads))}" if threads.isdecimal() else "PJRT_NPROC=256"
    line = (
        f"maxbatch: error: the CPU devices have waited {idle:.0f} s for each other in a collective and nothing "
        f"computes: XLA's threads are used up; run the same command again, with more threads: {works}\n"
    )
    try:
        os.write(2, line.encode())
    finally:
        os._exit(EXIT_FAILED)
