"""Simulated machines: CPU devices in one process, and several hosts as processes over loopback.

The hosts use the collectives of a real cluster. `maxbatch train --simulate-hosts H` starts them and is their parent;
none outlives it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from maxbatch.system.child_process import last_line, start_child
from maxbatch.system.errors import EXIT_STOPPED, ConfigError

_MOST_DEVICES = 2048  # JAX fails to make about 4,000 CPU devices in one process
_MOST_HOSTS = 64  # processes, each with JAX of its own
_GRACE_S = 10  # for the other hosts to end by themselves after one ended
_POLL_S = 0.05


def simulate_devices(num_devices: int) -> None:
    """Makes JAX, which must not be loaded yet, see that many CPU devices and nothing else.

    Raises:
      ConfigError: they are more than one process can run.
    """
    _check_most("--simulate-devices", num_devices, _MOST_DEVICES)
    flags = {
        "--xla_force_host_platform_device_count": num_devices,
        # Many devices on few cores meet late; XLA takes a wait of 40 s for a deadlock and aborts.
        "--xla_cpu_collective_call_terminate_timeout_seconds": 1200,
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    }
    others = [word for word in os.environ.get("XLA_FLAGS", "").split() if word.split("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*others, *(f"{flag}={value}" for flag, value in flags.items())])
    os.environ["JAX_PLATFORMS"] = "cpu"


def check_hosts(num_devices: int, num_hosts: int) -> None:
    """Raises ConfigError if the hosts are too many, or do not divide the devices."""
    _check_most("--simulate-devices", num_devices, _MOST_DEVICES)
    _check_most("--simulate-hosts", num_hosts, _MOST_HOSTS)
    if num_devices % num_hosts:
        nearest = max(h for h in range(1, min(num_hosts, num_devices) + 1) if num_devices % h == 0)
        raise ConfigError(
            f"--simulate-hosts {num_hosts}: must divide the {num_devices} devices of --simulate-devices; "
            f"works: --simulate-hosts {nearest}"
        )


def _check_most(flag: str, number: int, most: int) -> None:
    if number > most:
        raise ConfigError(f"{flag} {number}: must be at most {most}; works: {flag} {most}")


def run_hosts(arguments: Sequence[str], num_hosts: int) -> int:
    """Runs `maxbatch ARGUMENTS` in H processes that form one run, until all have ended.

    The output of the first is the command's. If one fails, the others are ended. SIGTERM and SIGINT are passed on; the
    hosts agree on the update after which they stop.

    Args:
      arguments: the command line of every host.
      num_hosts: H.

    Returns:
      The exit code of the run.
    """
    hosts = _Hosts(arguments, num_hosts)
    previous = {number: signal.signal(number, hosts.stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return hosts.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        hosts.close()


class _Hosts:
    def __init__(self, arguments: Sequence[str], num_hosts: int) -> None:
        port = _free_port()
        self._logs: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for index in range(num_hosts):
            variables = {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(num_hosts),
                "JAX_PROCESS_ID": str(index),
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
                "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
            }
            output = None
            if index:
                self._logs.append(tempfile.TemporaryFile())  # noqa: SIM115  closed by close()
                output = self._logs[-1]
            self._processes.append(start_child(arguments, output, variables=variables))

    def stop(self, number: int, frame: FrameType | None) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Waits for all hosts; returns the exit code of the first to fail, or 0 or 75 if none failed."""
        while (failed := self._first_failed()) is None:
            codes = [process.poll() for process in self._processes]
            if None not in codes:
                return max(code or 0 for code in codes)
            time.sleep(_POLL_S)
        code = self._processes[failed].returncode
        first = self._processes[0]
        if code > 0:  # it told the others, and the first host prints why
            with contextlib.suppress(subprocess.TimeoutExpired):
                first.wait(_GRACE_S)
        self.end()
        if code < 0 or first.returncode <= 0:
            how = (
                f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
            )
            said = self._last_line(failed)
            print(
                f"maxbatch: error: host {failed} of {len(self._processes)} {how}{said}; all hosts were ended",
                file=sys.stderr,
            )
        return code if code > 0 else 1

    def _first_failed(self) -> int | None:
        for index, process in enumerate(self._processes):
            if process.poll() not in (None, 0, EXIT_STOPPED):
                return index
        return None

    def _last_line(self, index: int) -> str:
        line = last_line(self._logs[index - 1]) if index else ""
        return f" ({line})" if line else ""

    def end(self) -> None:
        """Kills the hosts that still run."""
        for process in self._processes:
            process.kill()
            process.wait()

    def close(self) -> None:
        self.end()
        for process in self._processes:
            if process.stdin:
                process.stdin.close()
        for log in self._logs:
            log.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
