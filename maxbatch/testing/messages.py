"""Messages between the testing process and its hosts, pickled over a pipe."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

When = Literal["setup", "call", "teardown"]


def is_picklable(value: object) -> bool:
    """Returns whether a message can hold a value."""
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


# --- to a host ---


@dataclass(frozen=True)
class SessionOptions:
    """The options of the caller's pytest, with which a host opens its own session."""

    option: dict[str, object]
    arguments: list[str]
    worker: dict[str, object] | None  # pytest-xdist's `workerinput`, if the caller is a worker
    files: list[str]  # files with the tests of these hosts


@dataclass(frozen=True)
class Start:
    """The first message."""

    host: int
    num_hosts: int
    num_devices: int  # of this host
    port: int  # on which the first host listens
    session: SessionOptions | None  # None: the host calls functions


@dataclass(frozen=True)
class Phase:
    """A request to set up, call or tear down a test."""

    when: When
    test: str  # its node id
    following: str | None  # node id of a later test, whose fixtures stay
    folder: Path


@dataclass(frozen=True)
class Call:
    """A request to call a function with the pod, with the caller's working folder and
    environment.
    """

    function: bytes
    folder: Path
    working_folder: str
    variables: dict[str, str]


@dataclass(frozen=True)
class Close:
    """A request to end."""


@dataclass(frozen=True)
class Exchanged:
    """The values that the hosts sent to a common point, by host."""

    values: dict[int, bytes]


@dataclass(frozen=True)
class Refused:
    """The answer to a request that cannot be served."""

    why: str


# --- from a host ---


@dataclass(frozen=True)
class Exchange:
    """The arrival at a common point (`pod.barrier()`), which all hosts reach with the same name."""

    point: str
    value: bytes


@dataclass(frozen=True)
class Signal:
    """A request to kill a host, or to stop it for some seconds."""

    host: int
    stopped_s: float | None  # None: it is killed


@dataclass(frozen=True)
class Started:
    """The answer to `Start`."""

    main_thread: int


@dataclass(frozen=True)
class Warned:
    """A warning of a test, which pytest lists at its end."""

    message: Warning
    file: str
    line: int


@dataclass(frozen=True)
class Reported:
    """The answer to `Phase`: pytest's report as plain data."""

    report: dict[str, Any]
    warnings: tuple[Warned, ...] = ()

    @property
    def has_raised(self) -> bool:
        """Whether the phase raised, even if expected (xfail)."""
        is_expected = "wasxfail" in self.report and self.report["outcome"] == "skipped"
        return bool(is_expected or self.report["outcome"] == "failed")

    @property
    def place(self) -> str:
        """The file and line where the phase raised, or else the text of the failure."""
        shown = self.report["longrepr"]
        crash = shown["reprcrash"] if isinstance(shown, dict) else None
        return f"{crash['path']}:{crash['lineno']}" if crash else str(shown)


@dataclass(frozen=True)
class Returned:
    """The answer to `Call`: the pickled result."""

    value: bytes


@dataclass(frozen=True)
class Raised:
    """An exception in place of an answer; with `exits` it ends the whole test run."""

    text: str
    exits: bool = False


Answer = Started | Reported | Returned | Raised
