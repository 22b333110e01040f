"""The hosts of a pod as seen by the testing process: its child processes, each with CPU devices.

A host leads a process group. The whole group ends when the pod is closed, and when this process
ends for any reason.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import numbers
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from maxbatch.system.processes.child_process import is_stopped
from maxbatch.system.processes.ports import free_port
from maxbatch.testing.channel import Channel
from maxbatch.testing.messages import (
    Answer,
    Call,
    Close,
    Exchange,
    Exchanged,
    Phase,
    Raised,
    Refused,
    Reported,
    SessionOptions,
    Signal,
    Start,
    Started,
)
from maxbatch.testing.pod import named
from maxbatch.testing.stacks import stack_of

_START_S = 300.0  # for imports and for the hosts to join
_GRACE_S = 3.0  # for the other hosts to end a test after one has failed
_CLOSE_S = 5.0  # to tear down a session's fixtures
_DUMP_S = 2.0
_POLL_S = 0.1
_MOST_HOSTS = 16  # that are kept for later tests
_MOST_OUTPUT = 20_000  # characters of a host's output that are shown
_DUMP = signal.SIGQUIT


class Shape(NamedTuple):
    """The shape of a pod."""

    devices: int
    hosts: int

    @classmethod
    def of(cls, devices: int, hosts: int) -> Shape:
        """Returns a shape; raises ValueError unless both are whole numbers and the hosts divide the
        devices.
        """
        for name, value in (("devices", devices), ("hosts", hosts)):
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                works = (
                    int(value)
                    if isinstance(value, float) and value >= 1 and math.isfinite(value)
                    else 2
                )
                raise ValueError(f"{name}={value!r}: must be a whole number; works: {name}={works}")
        devices, hosts = int(devices), int(hosts)
        if devices < 1 or hosts < 1 or devices % hosts:
            works = max(
                (n for n in range(1, max(1, devices) + 1) if devices % n == 0 and n <= hosts),
                default=1,
            )
            raise ValueError(
                f"devices={devices}, hosts={hosts}: the hosts must divide the devices; works: "
                f"hosts={works}"
            )
        return cls(devices, hosts)


def checked_timeout(timeout: object) -> float:
    """Returns the seconds that a test may take; raises ValueError for anything but a number above
    0.
    """
    if not isinstance(timeout, numbers.Real) or isinstance(timeout, bool) or not float(timeout) > 0:
        raise ValueError(
            f"timeout={timeout!r}: must be a number of seconds above 0; works: timeout=60"
        )
    return float(timeout)


@dataclass(frozen=True)
class Failure:
    """The failure of a host: an exception, or its end without an answer."""

    host: int
    what: str  # such as `was killed by SIGKILL`; "" for an exception
    text: str = ""  # the traceback, or the stack of a host that was still running
    report: Reported | None = None


@dataclass
class Round:
    """The answers of the hosts to one request, and their failures in order of arrival."""

    answers: dict[int, Answer] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


class Hosts:
    """The hosts of one pod.

    Args:
      session: options of the pytest session of each host; None: hosts call functions.
      shows_output: hosts print to this process's output; else `output` returns their text.
    """

    def __init__(
        self,
        shape: Shape,
        session: Callable[[int], SessionOptions] | None,
        folder: Path,
        shows_output: bool = False,
    ) -> None:
        self.shape = shape
        self.has_failed = False  # a host failed or died
        self.is_in_test = False  # its phases are under way
        self._killed: set[int] = set()
        self._stopped_until: dict[int, float] = {}
        self._processes: list[_Process] = []
        self._alive: set[int] = set()
        port = free_port()
        try:
            for host in range(shape.hosts):
                self._processes.append(_Process(folder, shows_output))
                self._alive.add(host)
            starts = {
                host: Start(
                    host,
                    shape.hosts,
                    shape.devices // shape.hosts,
                    port,
                    session(host) if session else None,
                )
                for host in self._alive
            }
            self.started = self.perform(
                starts, time.monotonic() + _START_S, f"after {_START_S:g} s, the limit of its start"
            )
        except BaseException:
            self.kill()
            raise
        if self.started.failures:
            self.kill()
        else:
            self.output()  # not of a test

    def perform(
        self, messages: Phase | Call | Close | Mapping[int, Start], until: float, too_late: str
    ) -> Round:
        """Sends a request to all hosts and returns their answers; kills them all if one does not
        answer.

        Args:
          messages: the request, or one for each host.
          until: `time.monotonic()` at which the hosts must have answered.
          too_late: the failure of a host that has not.
        """
        outcome = Round()
        running = set(self._alive)
        waiting: dict[int, Exchange] = {}
        try:
            for host in running:
                self._send(host, messages[host] if isinstance(messages, Mapping) else messages)
            while running:
                for host, message in self._received(running, until):
                    if isinstance(message, Exchange):
                        waiting[host] = message
                    elif isinstance(message, Signal):
                        self._signal(host, message)
                        running -= self._killed
                    elif isinstance(message, Answer):
                        running.discard(host)
                        outcome.answers[host] = message
                        if isinstance(message, Started):
                            self._processes[host].main_thread = message.main_thread
                        if failure := _failure_of(host, message):
                            outcome.failures.append(failure)
                            until = min(until, time.monotonic() + _GRACE_S)
                            too_late = f"{_GRACE_S:g} s after {named([host])} had failed"
                dead = [
                    Failure(host, self._end_of(host))
                    for host in sorted(running)
                    if self._processes[host].is_dead()
                ]
                if dead:
                    outcome.failures += dead
                    self._end(running - {failure.host for failure in dead}, outcome, "ran")
                    return outcome
                self._continue_stopped()
                if time.monotonic() >= until:
                    self._end(running, outcome, f"still ran {too_late}")
                    return outcome
                self._meet(waiting, running)
        except BaseException:
            self.kill()
            raise
        self.has_failed = self.has_failed or bool(self._killed) or not _ended_alike(outcome)
        return outcome

    @property
    def is_usable(self) -> bool:
        """Whether another test may run on these hosts."""
        run = all(process.process.poll() is None for process in self._processes)
        return run and not self.has_failed and not self.is_in_test

    @property
    def are_alive(self) -> bool:
        """Whether a host can take a request."""
        return bool(self._alive)

    def output(self) -> dict[int, str]:
        """Returns the output of each host since the last call."""
        return {
            host: text
            for host, process in enumerate(self._processes)
            if (text := process.new_output())
        }

    def close(self) -> list[Failure]:
        """Ends the hosts after closing their sessions; returns the sessions that failed to
        close.
        """
        if self.is_in_test:
            self.kill()
        outcome = self.perform(Close(), time.monotonic() + _CLOSE_S, f"after {_CLOSE_S:g} s")
        self.kill()
        return outcome.failures

    def kill(self) -> None:
        """Kills the hosts at once, with their child processes."""
        self.has_failed = True
        # the first one last: on its death JAX prints much in the others
        for process in reversed(self._processes):
            process.kill()
        self._alive.clear()

    def _send(self, host: int, message: object) -> None:
        with contextlib.suppress(ConnectionError):  # it has died, which `perform` notices
            self._processes[host].channel.send(message)

    def _received(self, running: set[int], until: float) -> list[tuple[int, object]]:
        wait_s = max(0.0, min(_POLL_S, until - time.monotonic()))
        received: list[tuple[int, object]] = []
        with selectors.DefaultSelector() as selector:
            for host in self._alive:
                channel = self._processes[host].channel
                events = (
                    selectors.EVENT_READ * (host in running)
                    | selectors.EVENT_WRITE * channel.has_unsent
                )
                if events:
                    selector.register(channel, events, host)
            for key, events in selector.select(wait_s):
                process = self._processes[key.data]
                if events & selectors.EVENT_WRITE:
                    process.channel.flush()
                if events & selectors.EVENT_READ:
                    received += [(key.data, message) for message in process.channel.receive()]
                    if process.channel.is_closed:
                        process.wait_after_last_message()
        return received

    def _meet(self, waiting: dict[int, Exchange], running: set[int]) -> None:
        """Answers the hosts that wait at a common point once all have arrived, or some no longer
        can.
        """
        here = {host for host in waiting if host in running}
        if not here:
            waiting.clear()
            return
        points = {waiting[host].point for host in here}
        if here == running == self._alive and len(points) == 1:
            reply: object = Exchanged({host: waiting[host].value for host in sorted(here)})
        elif len(points) > 1:
            at = "; ".join(f"{named([host])} in pod.{waiting[host].point}" for host in sorted(here))
            reply = Refused(f"the hosts wait at different points: {at}")
        elif gone := sorted(self._alive - running):
            reply = Refused(
                f"{named(gone)} ended the test without coming to this pod.{points.pop()}"
            )
        else:
            return
        waiting.clear()
        for host in here:
            self._send(host, reply)

    def _signal(self, asking: int, message: Signal) -> None:
        process = self._processes[message.host]
        if message.host not in self._alive:
            self._send(asking, Refused(f"host {message.host} is dead"))
        elif message.stopped_s is None:
            self._killed.add(message.host)
            self._alive.discard(message.host)
            process.kill()
            if asking in self._alive:
                self._send(asking, None)
        else:
            self._stopped_until[message.host] = time.monotonic() + message.stopped_s
            self._send(asking, None)
            process.process.send_signal(signal.SIGSTOP)

    def _continue_stopped(self) -> None:
        for host, until in list(self._stopped_until.items()):
            if time.monotonic() >= until:
                del self._stopped_until[host]
                self._processes[host].process.send_signal(signal.SIGCONT)

    def _end_of(self, host: int) -> str:
        code = self._processes[host].wait(0)
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        if code == -signal.SIGABRT and 0 in self._killed:
            how += ", by JAX: host 0, which keeps its coordination service, is dead"
        return how

    def _end(self, running: set[int], outcome: Round, how: str) -> None:
        """Adds the stacks of the hosts that are still running, and kills all."""
        for host in sorted(running):
            what, stack = self._processes[host].stack()
            outcome.failures.append(Failure(host, what or how, stack))
        self.kill()


def _ended_alike(outcome: Round) -> bool:
    """Returns whether no host failed, or all at the same place, so that none waits for a collective
    of another.
    """
    places = [
        failure.report.place if failure.report else failure.text for failure in outcome.failures
    ]
    return not places or (len(places) == len(outcome.answers) and len(set(places)) == 1)


def _failure_of(host: int, answer: Answer) -> Failure | None:
    if isinstance(answer, Raised):
        return Failure(host, "", answer.text)
    return (
        Failure(host, "", report=answer)
        if isinstance(answer, Reported) and answer.has_raised
        else None
    )


class _Process:
    """The process of one host."""

    def __init__(self, folder: Path, shows_output: bool) -> None:
        self._output: IO[bytes] | None = None if shows_output else tempfile.TemporaryFile()  # noqa: SIM115
        self._dump: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._num_read, self._text = 0, ""  # of its output
        self._is_killed = False
        self._is_read = False
        self.main_thread = 0
        connection, theirs = multiprocessing.Pipe()
        self.channel = Channel(connection)
        descriptors = (theirs.fileno(), self._dump.fileno())
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from maxbatch.testing.host import main; "
            f"main{descriptors}"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                pass_fds=descriptors,
                env={**os.environ, **_coverage()},
                cwd=folder,
                process_group=0,
            )

    def is_dead(self) -> bool:
        """Whether the process has ended and all its messages have been read."""
        return self.process.poll() is not None and (self._is_read or not self.channel.poll())

    def wait_after_last_message(self) -> None:
        """Waits for a process that has closed its connection, and so is about to end."""
        self._is_read = True
        self.wait(_CLOSE_S)

    def wait(self, seconds: float) -> int:
        """Returns the exit code; kills the process if it does not end."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.returncode

    def stack(self) -> tuple[str, str]:
        """Returns the reason for a missing stack, and the stack of the main thread."""
        if is_stopped(self.process.pid):
            return "was stopped", ""
        before = self._dump.seek(0, os.SEEK_END)
        self.process.send_signal(_DUMP)
        end, size = time.monotonic() + _DUMP_S, before
        while time.monotonic() < end:
            time.sleep(0.05)
            size, last = self._dump.seek(0, os.SEEK_END), size
            if size == last > before:
                break
        self._dump.seek(before)
        dump = self._dump.read().decode(errors="replace")
        return "", stack_of(dump, self.main_thread) or dump

    def read_output(self) -> None:
        """Reads the output of the process so far."""
        if self._output is not None and not self._is_killed:
            self._output.seek(self._num_read)
            data = self._output.read()
            self._num_read += len(data)
            lines = data.decode(errors="replace").splitlines(keepends=True)
            # gloo, which connects the hosts, prints every peer.
            self._text += "".join(line for line in lines if not line.startswith("[Gloo] Rank "))

    def new_output(self) -> str:
        """Returns the output of the process since the last call."""
        self.read_output()
        text, self._text = self._text, ""
        return text if len(text) <= _MOST_OUTPUT else f"...\n{text[-_MOST_OUTPUT:]}"

    def kill(self) -> None:
        """Kills the process with its group, and waits for it."""
        if self._is_killed:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.read_output()
        self._is_killed = True
        self.channel.close()
        for file in (self.process.stdin, self._output, self._dump):
            if file is not None:
                file.close()


class Pool:
    """Hosts by shape, reused unless a test ended badly."""

    def __init__(self, start: Callable[[Shape], Hosts]) -> None:
        self._start, self._process = start, os.getpid()
        self._hosts: OrderedDict[Shape, Hosts] = OrderedDict()  # the most recently used last

    def get(self, shape: Shape) -> Hosts:
        """Returns hosts of a shape, and starts them if there are none."""
        hosts = self._hosts.pop(shape, None)
        if hosts is not None and not hosts.is_usable:
            hosts.close()
            hosts = None
        if hosts is None:
            while (
                self._hosts and sum(kept.hosts for kept in self._hosts) + shape.hosts > _MOST_HOSTS
            ):
                self._hosts.popitem(last=False)[1].close()
            hosts = self._start(shape)
        self._hosts[shape] = hosts
        return hosts

    def close(self) -> list[Failure]:
        """Ends all hosts; returns the failures of their sessions."""
        by_shape, self._hosts = self._hosts, OrderedDict()
        if os.getpid() != self._process:  # a fork of it
            return []
        return [failure for hosts in by_shape.values() for failure in hosts.close()]


def _coverage() -> Mapping[str, str]:
    """Returns the environment variable with which coverage.py (7.10) measures a child like this
    process.
    """
    module = sys.modules.get("coverage")
    active = module.Coverage.current() if module is not None else None
    if active is None or not hasattr(active.config, "serialize"):
        return {}
    config = active.config.copy()
    config.parallel, config.data_file = True, os.path.abspath(config.data_file)
    return {"COVERAGE_PROCESS_CONFIG": config.serialize()}
