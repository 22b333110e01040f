"""Simulated hosts: processes over loopback.

They use the collectives of a real cluster. `maxbatch train --simulate-hosts H` starts them as
children; none outlives it.
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence

from maxbatch.commands.arguments import check_at_most, check_simulated_devices
from maxbatch.parallel.deaths import LastSaved, death_of, silence_of
from maxbatch.plan.mesh_shape import check_divides
from maxbatch.system.errors import EXIT_DONE, EXIT_STOPPED, TrainingError, report
from maxbatch.system.hardware.cpu_devices import variables_of_host
from maxbatch.system.processes.child_process import is_stopped, last_line, start_child
from maxbatch.system.processes.ports import free_port
from maxbatch.system.processes.stopping import Stopping

_MOST_HOSTS = 64  # processes, each with JAX of its own
_GRACE_S = 10  # time for the other hosts to end by themselves after one ended
_STOPPED_S = 2  # time that a host may be stopped while others end early
_LINGER_S = 30  # time for the other hosts to end after the first one
_POLL_S = 0.05
_GAP_S = 2  # time between two polls that means this process was stopped


def check_hosts(num_devices: int, num_hosts: int) -> None:
    """Raises ConfigError if the hosts are too many, or do not divide the devices."""
    check_simulated_devices(num_devices)
    check_at_most("--simulate-hosts", num_hosts, _MOST_HOSTS)
    check_divides("--simulate-hosts ", num_hosts, num_devices)


def run_hosts(
    arguments: Sequence[str], num_hosts: int, last_saved: LastSaved, heartbeat_timeout_s: int
) -> int:
    """Runs `maxbatch ARGUMENTS` in H processes that form one run, until all have ended.

    The output of the first is the command's. If one fails, the others are ended. SIGTERM and SIGINT
    are passed on; the hosts agree on the update after which they stop. Returns the exit code of the
    run. `last_saved` returns the newest saved step, from which the same command continues after a
    host was killed. A stopped host (SIGSTOP) counts as dead, like a machine that hangs.
    """
    port = free_port()
    with (
        Stopping("after the update that the hosts agree on") as stop,
        contextlib.ExitStack() as closing,
    ):
        logs = [closing.enter_context(tempfile.TemporaryFile()) for _ in range(1, num_hosts)]
        hosts: list[subprocess.Popen[bytes]] = []
        closing.callback(_end, hosts)
        for index, output in enumerate([None, *logs]):
            hosts.append(
                start_child(arguments, output, variables=variables_of_host(port, num_hosts, index))
            )
        stopped = _Stopped(hosts, heartbeat_timeout_s)
        failed = _first_failed(hosts, stop, stopped)
        if stopped.dead is not None:
            return _end_stopped(stopped.dead, hosts, last_saved)
        if failed is None:
            return max(host.returncode for host in hosts)
        if stop.is_asked and hosts[failed].returncode == -signal.SIGTERM:
            # The request came before this host handles signals: the hosts have not met, so there
            # is nothing to save.
            return EXIT_STOPPED
        return _end_after(failed, hosts, last_line(logs[failed - 1]) if failed else "", last_saved)


class _Stopped:
    """The hosts that are stopped, and since when.

    The first host watches the others and ends with a report, and they watch it and end. So this
    process, which sees all of them, leaves them that time.
    """

    def __init__(self, hosts: Sequence[subprocess.Popen[bytes]], heartbeat_timeout_s: int) -> None:
        self._hosts = hosts
        self._limits = [silence_of(heartbeat_timeout_s), *[heartbeat_timeout_s] * (len(hosts) - 1)]
        self._since: dict[int, float] = {}
        self._looked_at = time.monotonic()
        self.dead: int | None = None  # a host that has been stopped for too long

    def look(self, is_over: bool) -> None:
        """Looks for a host stopped for too long; `is_over`: another host has ended before it was
        done.
        """
        now = time.monotonic()
        if now - self._looked_at > _GAP_S:  # this process was stopped with them
            self._since = {}
        self._looked_at = now
        stopped = [
            index
            for index, host in enumerate(self._hosts)
            if host.poll() is None and is_stopped(host.pid)
        ]
        self._since = {index: self._since.get(index, now) for index in stopped}
        for index, since in self._since.items():
            if now - since >= (_STOPPED_S if is_over else self._limits[index]):
                self.dead = index
                return


def _first_failed(
    hosts: Sequence[subprocess.Popen[bytes]], stop: Stopping, stopped: _Stopped
) -> int | None:
    """Waits until a host fails, and returns its index, or until all end without failure or one is
    dead.
    """
    is_told, first_ended = False, math.inf
    while True:
        codes = [host.poll() for host in hosts]
        stopped.look(is_over=any(code not in (None, EXIT_DONE) for code in codes))
        if stopped.dead is not None:
            return None
        failed = [i for i, code in enumerate(codes) if code not in (None, EXIT_DONE, EXIT_STOPPED)]
        if failed or None not in codes:
            return failed[0] if failed else None
        if codes[0] is not None:
            first_ended = min(first_ended, time.monotonic())
        if time.monotonic() - first_ended > _LINGER_S:  # it counted the others as dead: they hang
            _end(hosts)
        if stop.is_asked and not is_told:
            is_told = True
            for host in hosts:
                host.terminate()
        time.sleep(_POLL_S)


def _end_stopped(
    stopped: int, hosts: Sequence[subprocess.Popen[bytes]], last_saved: LastSaved
) -> int:
    """Ends all hosts after one was stopped too long; reports it unless the first did; returns the
    exit code.
    """
    if stopped:
        with contextlib.suppress(subprocess.TimeoutExpired):
            hosts[0].wait(_GRACE_S)
    _end(hosts)
    if stopped and hosts[0].returncode > 0:
        return hosts[0].returncode
    message, code = death_of(
        stopped, len(hosts), "has died: it is stopped (heartbeat_timeout_s)", last_saved
    )
    report(TrainingError(message))
    return code


def _end_after(
    failed: int, hosts: Sequence[subprocess.Popen[bytes]], said: str, last_saved: LastSaved
) -> int:
    """Ends all hosts after one has failed, reports it unless the first host did, and returns the
    exit code.
    """
    code = hosts[failed].returncode
    if code > 0:  # it notified the others, and the first host prints why
        with contextlib.suppress(subprocess.TimeoutExpired):
            hosts[0].wait(_GRACE_S)
    _end(hosts)
    said = f" ({said})" if said else ""
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}{said}"
        message, code = death_of(failed, len(hosts), how, last_saved)
        report(TrainingError(message))
    elif hosts[0].returncode <= 0:
        report(
            TrainingError(
                f"host {failed} of {len(hosts)} ended with exit code {code}{said}; all hosts were "
                "ended"
            )
        )
    return code


def _end(hosts: Sequence[subprocess.Popen[bytes]]) -> None:
    for host in hosts:
        host.kill()
        host.communicate()
