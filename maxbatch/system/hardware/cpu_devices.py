"""Simulated machines: CPU devices of a process, with enough threads for their collectives, and
hosts on loopback.

XLA runs all CPU devices of a process on one pool of threads, by default one for each core or
device. A collective keeps its thread until the whole group has arrived. XLA orders the collectives
of a device only by when they begin: one that follows a loop begins while the collectives inside the
loop run. So a device may keep several threads: one for each of its loops with collectives under
way, and one more. Once every thread waits, the devices still to arrive find none, and the program
waits forever. More threads than all devices together can keep exclude this.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

_THREADS_PER_DEVICE = 4  # nested loops of a step; idle threads cost time
MOST_THREADS = 256  # XLA's own limit for the pool
_COUNT = "--xla_force_host_platform_device_count"
_FLAGS = {
    # A schedule that runs fewer collectives at once: hundreds of devices do not get a thread each.
    "--xla_cpu_enable_concurrency_optimized_scheduler": "false",
    # Many devices on few cores meet late; XLA takes a wait of 40 s for a deadlock and aborts.
    "--xla_cpu_collective_call_terminate_timeout_seconds": 1200,
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
}


def make_cpu_devices(num_devices: int) -> None:
    """Makes JAX use that many CPU devices and nothing else, before its backends start."""
    others = [
        word for word in os.environ.get("XLA_FLAGS", "").split() if word.split("=")[0] != _COUNT
    ]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{_COUNT}={num_devices}"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    give_cpu_devices_threads()


def give_cpu_devices_threads() -> None:
    """Sets the threads of the CPU devices that the environment requests (`XLA_FLAGS`,
    `JAX_NUM_CPU_DEVICES`).

    Must come before JAX starts its backends. A single device needs no setting. The user's settings
    stay: a larger number of threads (`PJRT_NPROC`), other values of the flags.
    """
    words = os.environ.get("XLA_FLAGS", "").split()
    flags = dict(word.partition("=")[::2] for word in words)
    counts = [
        text
        for text in (flags.get(_COUNT, ""), os.environ.get("JAX_NUM_CPU_DEVICES", ""))
        if text.isdecimal()
    ]
    num_devices = max(map(int, counts), default=1)
    if num_devices == 1 and not os.environ.get("JAX_NUM_PROCESSES"):
        return
    current = os.environ.get("PJRT_NPROC", "")
    threads = min(MOST_THREADS, _THREADS_PER_DEVICE * num_devices)
    os.environ["PJRT_NPROC"] = str(max(threads, int(current) if current.isdecimal() else 0))
    words += [f"{name}={value}" for name, value in _FLAGS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join(words)


@functools.cache
def cpu_features() -> str:
    """Returns the features of this machine's CPUs; a program for another CPU may use missing
    instructions.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


def variables_of_host(port: int, num_hosts: int, index: int) -> dict[str, str]:
    """Returns the environment variables of one of several simulated hosts, whose first listens on a
    loopback port.
    """
    return {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(num_hosts),
        "JAX_PROCESS_ID": str(index),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
