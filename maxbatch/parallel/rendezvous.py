"""The meeting of a run's hosts, before JAX's coordination service connects them; without JAX.

The service itself connects in silence, cannot name a host that is missing, and ends a process whose
others do not come with a native stack. So the first host listens on the port of the service until
all hosts have come, and then leaves it to the service. Until then every host prints whom it waits
for.

Messages are lines of JSON. A host sends its index and the number of hosts, and then an empty line
now and then. The first host answers with the hosts that are missing, until it lets all of them go
or ends them with a message.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from maxbatch.system.errors import ConfigError, TrainingError, reason
from maxbatch.system.terminal.warning import note

# until a host prints whom it waits for, and between repetitions
_FIRST_WORD_S, _AGAIN_S = 10.0, 30.0
_POLL_S = 0.2
_PULSE_S = 1.0  # between two lines to the other side
_SILENT_S = 10.0  # without a line from a host, after which it counts as gone
_PORT_S = 3.0  # for a port that an ended process leaves
_LINGER_S = 3.0  # in which the first host tells those that come why the run ends
_SERVICE_S = 60.0  # for the service to listen once all hosts have come
_MOST_NAMED = 8
_LONGEST_LINE = 4096
_SPARE_FILES = 1024  # open files of a process beside its connections


class Address(NamedTuple):
    """A place to listen at or to connect to."""

    host: str
    port: int

    @classmethod
    def parsed(cls, text: str, variable: str) -> Address:
        """Parses HOST:PORT; raises ConfigError naming the variable that states it."""
        host, colon, port = text.rpartition(":")
        if not colon or not host:
            raise ConfigError(
                f"environment variable {variable}={text}: must be HOST:PORT; works: "
                f"{text or 'localhost'}:8476"
            )
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ConfigError(
                f"environment variable {variable}={text}: the port must be a number from 1 to "
                f"65535; works: {variable}={host}:8476"
            )
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def meet(
    address: Address,
    host: int,
    num_hosts: int,
    wait_s: float,
    bind: Address | None = None,
    is_silent: bool = False,
) -> None:
    """Waits until all hosts have come; all of them call it.

    Args:
      address: of the first host, as the others reach it.
      host: the index of this one.
      wait_s: how long the hosts may be apart.
      bind: on the first host, where to listen; None on the others.
      is_silent: whether to print nothing about the wait.

    Raises:
      ConfigError: the port is taken, or the hosts state different numbers or the same index.
      TrainingError: some host has not come.
    """
    door = None if bind is None else _Door(bind, num_hosts)
    if num_hosts == 1:
        if door is not None:
            door.close()
        return
    if door is not None:
        door.start()
    guest = _Guest(address, host, num_hosts, wait_s, door)
    guest.is_silent = is_silent
    try:
        guest.wait()
    except BaseException as error:
        if door is not None:
            problem = (
                str(error)
                if isinstance(error, ConfigError | TrainingError)
                else "was stopped while the hosts joined"
            )
            door.end_all(problem if problem.startswith("host 0") else f"host 0: {problem}")
        raise
    if door is not None:
        door.close()
    else:
        _wait_for_service(address)


class _Status(NamedTuple):
    """The first host's report to the others, or a host's own conclusion if none arrives."""

    missing: Sequence[int]
    num_missing: int
    why: str = ""  # such as `connection refused`, about the first host

    def __str__(self) -> str:
        shown = [str(number) for number in self.missing[:_MOST_NAMED]]
        more = (
            "" if self.num_missing <= len(shown) else f" and {self.num_missing - len(shown)} more"
        )
        return (
            f"host{'s' if self.num_missing > 1 else ''} "
            f"{', '.join(shown)}{more}{self.why and f' ({self.why})'}"
        )


class _Guest:
    """A host's side of the meeting."""

    def __init__(
        self, address: Address, host: int, num_hosts: int, wait_s: float, door: _Door | None
    ) -> None:
        self._address, self._host, self._num_hosts, self._door = address, host, num_hosts, door
        self._wait_s, self._started = wait_s, time.monotonic()
        self._say_at = self._started + _FIRST_WORD_S
        self.is_silent = False
        self._status = self._without_first("it has not answered")

    def wait(self) -> None:
        """Returns once all hosts have come."""
        while not self._is_let_go():
            self._check_time()
            time.sleep(_POLL_S)

    def _is_let_go(self) -> bool:
        """Talks to the first host until it lets all hosts go; returns False if it does not answer,
        or no longer.
        """
        try:
            connection = socket.create_connection(self._address, _PULSE_S)
        except OSError as error:
            self._status = self._without_first(reason(error).lower())
            return False
        with connection:
            try:
                return self._talk(connection)
            except (OSError, ValueError, KeyError, TypeError):
                self._status = self._without_first(
                    "something that is no host of maxbatch answers there"
                )
                return False

    def _talk(self, connection: socket.socket) -> bool:
        connection.settimeout(_POLL_S)
        _send(connection, {"host": self._host, "hosts": self._num_hosts})
        lines, pulse_at = _Lines(), time.monotonic() + _PULSE_S
        while True:
            self._check_time()
            if time.monotonic() >= pulse_at:
                connection.sendall(b"\n")
                pulse_at = time.monotonic() + _PULSE_S
            with contextlib.suppress(TimeoutError):
                data = connection.recv(_LONGEST_LINE)
                if not data:
                    self._status = self._without_first("it has closed the connection")
                    return False
                for message in lines.messages(data):
                    _raise_ending(message)
                    if "go" in message:
                        return True
                    missing = [int(number) for number in message["missing"]]
                    self._status = _Status(missing, int(message["num_missing"]))

    def _check_time(self) -> None:
        """Prints whom this host waits for when that is due; raises an error at the end of the
        wait.
        """
        if self._door is not None and self._door.ending is not None:
            _raise_ending(self._door.ending)
        waited_s = time.monotonic() - self._started
        if waited_s >= self._wait_s:
            raise TrainingError(
                f"host {self._host} of {self._num_hosts} has waited {waited_s:.0f} s "
                f"(host_wait_s) for {self._status}; start the same command on every host, or set "
                "JAX_NUM_PROCESSES to the hosts that are there"
            )
        if time.monotonic() >= self._say_at and not self.is_silent:
            self._say_at = time.monotonic() + _AGAIN_S
            note(
                f"host {self._host} of {self._num_hosts} waits for {self._status}: {waited_s:.0f} "
                f"s so far, at most {self._wait_s:g} s (host_wait_s)"
            )

    def _without_first(self, why: str) -> _Status:
        place = f"{self._address}: {why}"
        return _Status(
            [0], 1, f"not reached from itself at {place}" if self._host == 0 else f"at {place}"
        )


def _raise_ending(message: Mapping[str, object]) -> None:
    """Raises the error that a message of the first host states, if it states one."""
    if "refused" in message:
        raise ConfigError(str(message["refused"]))
    if "ended" in message:
        raise TrainingError(str(message["ended"]))


@dataclass
class _Visitor:
    """A connection to the first host."""

    connection: socket.socket
    lines: _Lines
    heard_at: float
    host: int | None = None  # None until it has said


class _Door(threading.Thread):
    """The first host's side of the meeting.

    Raises:
      ConfigError: the port cannot be listened on.
    """

    def __init__(self, bind: Address, num_hosts: int) -> None:
        super().__init__(name="maxbatch-rendezvous", daemon=True)
        self._num_hosts = num_hosts
        self._listener = _listening(bind, min(num_hosts + 16, 4096))
        self._selector = selectors.DefaultSelector()
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._hosts: dict[int, _Visitor] = {}
        self.ending: dict[str, object] | None = None  # the last message, where not all hosts come
        self._ends_at = math.inf
        _allow_files(num_hosts + _SPARE_FILES)

    def run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        pulse_at = 0.0
        try:
            while time.monotonic() < self._ends_at and len(self._hosts) < self._num_hosts:
                for key, _ in self._selector.select(_POLL_S):
                    assert isinstance(key.fileobj, socket.socket)
                    self._accept() if key.fileobj is self._listener else self._read(
                        self._visitors[key.fileobj]
                    )
                self._leave_silent()
                if time.monotonic() >= pulse_at:
                    pulse_at = time.monotonic() + _PULSE_S
                    self._tell(self._status())
            self._listener.close()  # before the others look for the service, which takes the port
            self._tell({"go": True} if self.ending is None else self.ending)
        finally:
            self._selector.close()
            self._listener.close()
            for visitor in self._visitors.values():
                visitor.connection.close()

    def end_all(self, message: str) -> None:
        """Tells the hosts that have come why the run ends."""
        if self.ending is None:
            self.ending, self._ends_at = {"ended": message}, 0.0
        self.close()

    def close(self) -> None:
        """Frees the port."""
        if self.is_alive():
            self.join(_SILENT_S)
        self._listener.close()

    def _status(self) -> dict[str, object]:
        missing: Iterator[int] = (
            host for host in range(self._num_hosts) if host not in self._hosts
        )
        named = [host for host, _ in zip(missing, range(_MOST_NAMED), strict=False)]
        return {"missing": named, "num_missing": self._num_hosts - len(self._hosts)}

    def _tell(self, message: dict[str, object]) -> None:
        for visitor in list(self._hosts.values()):
            try:
                _send(visitor.connection, message)
            except OSError:
                self._lose(visitor)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has left already
            connection, _ = self._listener.accept()
            connection.settimeout(_PULSE_S)
            self._visitors[connection] = _Visitor(connection, _Lines(), time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, visitor: _Visitor) -> None:
        try:
            data = visitor.connection.recv(_LONGEST_LINE)
            if not data:
                raise ConnectionError("closed")
            visitor.heard_at = time.monotonic()
            for message in visitor.lines.messages(data):
                self._welcome(visitor, int(message["host"]), int(message["hosts"]))
        except (OSError, ValueError, KeyError, TypeError):
            self._lose(visitor)

    def _welcome(self, visitor: _Visitor, host: int, num_hosts: int) -> None:
        problem = ""
        if self.ending is not None:
            _send(visitor.connection, self.ending)
            return
        if num_hosts != self._num_hosts:
            problem = (
                f"the hosts state different numbers of hosts: {self._num_hosts} on host 0, "
                f"{num_hosts} on host {host}; set JAX_NUM_PROCESSES to the same number on all"
            )
            # Others may come in this moment, and would find nobody.
            self.ending, self._ends_at = {"refused": problem}, time.monotonic() + _LINGER_S
        elif not 0 <= host < self._num_hosts or host in self._hosts:
            problem = (
                f"another process is host {host} of {num_hosts} already; give each host an index "
                f"of its own (JAX_PROCESS_ID), from 0 to {num_hosts - 1}"
            )
        if problem:
            with contextlib.suppress(OSError):
                _send(visitor.connection, {"refused": problem})
            self._lose(visitor)
            return
        visitor.host = host
        self._hosts[host] = visitor
        _send(visitor.connection, self._status())

    def _leave_silent(self) -> None:
        for visitor in list(self._visitors.values()):
            if time.monotonic() - visitor.heard_at > _SILENT_S:
                self._lose(visitor)

    def _lose(self, visitor: _Visitor) -> None:
        if self._visitors.pop(visitor.connection, None) is None:
            return
        if visitor.host is not None:
            self._hosts.pop(visitor.host, None)
        self._selector.unregister(visitor.connection)
        visitor.connection.close()


class _Lines:
    """The messages in a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def messages(self, data: bytes) -> list[dict[str, Any]]:
        """Returns the messages that end in `data`; raises ValueError if it holds anything else."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise ValueError("a line is too long")
        messages = [json.loads(line) for line in lines if line.strip()]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line holds no object")
        return messages


def _send(connection: socket.socket, message: dict[str, object]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _listening(bind: Address, backlog: int) -> socket.socket:
    until = time.monotonic() + _PORT_S
    while True:
        try:
            return _listener(bind, backlog)
        except OSError as error:
            if time.monotonic() >= until:
                raise ConfigError(
                    f"JAX_COORDINATOR_ADDRESS: host 0 cannot listen on {bind} ({reason(error)}); "
                    "give all hosts another port, such as "
                    f"{bind.port + 1 if bind.port < 65_535 else 8476}"
                ) from error
        time.sleep(_POLL_S)


def _listener(bind: Address, backlog: int) -> socket.socket:
    places = socket.getaddrinfo(
        bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, place = places[0]
    is_any = bind.host == "::"
    if is_any and not socket.has_dualstack_ipv6():
        family, place = socket.AF_INET, ("0.0.0.0", bind.port)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_any and family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(place)
        listener.listen(backlog)
        listener.settimeout(_PULSE_S)
    except OSError:
        listener.close()
        raise
    return listener


def _wait_for_service(address: Address) -> None:
    """Waits until the service listens: a connection that is refused would be tried again only
    seconds later.
    """
    until = time.monotonic() + _SERVICE_S
    while True:
        try:
            socket.create_connection(address, _PULSE_S).close()
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise TrainingError(
                    f"host 0 at {address} has ended while the hosts joined ({reason(error)})"
                ) from error
        time.sleep(_POLL_S / 4)


def _allow_files(wanted: int) -> None:
    """Raises the limit of open files, as far as the system lets us, where every host needs a
    connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
