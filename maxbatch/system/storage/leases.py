"""Leases: a single writer per folder of an object store, which has no file locks.

A lease is an object that names its holder. It is written with a precondition, renewed while the
holder lives, and lapses when not renewed for `LAPSE_S`. Other processes watch its version to detect
a lapse, so no two machines' clocks are compared (as in Kubernetes and DynamoDB's lock client). A
holder whose own clocks do not rule out a lapse asks the store before it writes to the folder
(`maxbatch.system.storage.fences`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from maxbatch.system.errors import ConfigError, LeaseLost, StoreFailed, TrainingError
from maxbatch.system.processes.repeating import Repeating
from maxbatch.system.storage.fences import Fence
from maxbatch.system.storage.locks import is_lock_on, take_lock
from maxbatch.system.storage.object_stores import read_version, remove_if, version_of, write_if
from maxbatch.system.storage.patience import patience
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import AnyPath
from maxbatch.system.terminal.warning import note

LEASE_FILE, LOCK_FILE = ".lease", ".lock"
LAPSE_S = 30.0  # after its last renewal
RENEW_S = 20.0
_LOOK_S = 1.0
_BLIND_S = 5.0  # a slower read proves nothing about the holder: the store was unavailable
_END_WAIT_S = 5.0
_MOST_BYTES = 1 << 16  # bound of a lease; ours have some 300
_OLDEST_S = 30 * 86400.0  # oldest age shown in messages

Clocks = tuple[float, ...]


class Hold(Protocol):
    """A hold on a folder, which excludes other writers."""

    def check(self) -> None:
        """Raises LeaseLost if another process may be writing to the folder."""

    def close(self) -> None:
        """Lets others write to the folder."""


class Lease:
    """A held lease; `close` releases it.

    Args:
      since: the clocks at the start of the request that wrote it.

    Attributes:
      lost: the reason why it is no longer held; None while it is.
    """

    lost: str | None = None

    def __init__(
        self, path: RemotePath, version: str, holder: dict[str, object], since: Clocks
    ) -> None:
        self._path, self._version, self._holder = path, version, holder
        self._renewed_at, self._renewing = since, threading.Lock()
        self._fence = Fence(path.parent.url, self.ask, self._confirm)
        self._is_closed = False
        self._renewals = Repeating(self._renew, RENEW_S, "maxbatch-lease")

    def _renew(self) -> None:
        try:
            self._confirm()
        except StoreFailed:
            return  # nobody can take it over while the store does not respond
        except (ConfigError, TrainingError, OSError) as error:
            self.lost = self.lost or str(error)
            raise

    def check(self) -> None:
        """Raises LeaseLost if the lease was lost: another process may be writing."""
        if self.lost:
            raise LeaseLost(f"{self.lost}; this one stops")

    def ask(self) -> None:
        """Raises LeaseLost unless the lease is held; renews it first if it may have lapsed.

        Threads that still write after `close` get LeaseLost.
        """
        if self._is_closed:
            self.lost = self.lost or f"{self._path.parent}: the lease is given back"
        self.check()
        if _seconds_since(self._renewed_at) >= (LAPSE_S + RENEW_S) / 2:
            self._confirm()

    def _confirm(self) -> None:
        """Renews the lease; raises LeaseLost if another process holds it."""
        with self._renewing:
            self.check()
            since = _clocks()
            version = write_if(self._path.url, _content(self._holder), self._version)
            if version is None:
                lease = _look(self._path)
                if lease is None or lease[0].get("token") != self._holder["token"]:
                    self.lost = f"{self._path.parent}: another process holds its lease now"
                    self.check()
                assert lease is not None
                version = lease[1]  # ours: the response to an earlier try was lost
            self._version, self._renewed_at = version, since

    def close(self) -> None:
        """Releases the lease; if the store does not respond, the lease lapses later."""
        self._is_closed = True
        has_ended = self._renewals.stop(0.0 if patience().gave_up else _END_WAIT_S)
        if patience().gave_up or not has_ended or self.lost:
            return  # it lapses
        remover = threading.Thread(target=self._remove, name="maxbatch-lease-end", daemon=True)
        remover.start()
        remover.join(_END_WAIT_S)

    def _remove(self) -> None:
        try:
            remove_if(self._path.url, self._version)
            self._fence.remove()
        except (ConfigError, TrainingError, OSError):
            return  # it lapses


class _Lock:
    """The lock on a folder of a disk; the system frees it when the process ends."""

    def __init__(self, folder: Path, lock: BinaryIO) -> None:
        self._folder, self._lock = folder, lock

    def check(self) -> None:
        if not is_lock_on(self._lock, self._folder / LOCK_FILE):
            raise LeaseLost(
                f"{self._folder}: its lock was removed, and another process may write to it; this "
                "one stops"
            )

    def close(self) -> None:
        self._lock.close()


def _clocks() -> Clocks:
    """Returns this machine's clocks in seconds: monotonic, time of day and, if any, monotonic
    through sleep.

    The time of day is right again after a virtual machine was stopped.
    """
    asleep = [time.clock_gettime(time.CLOCK_BOOTTIME)] if hasattr(time, "CLOCK_BOOTTIME") else []
    return (time.monotonic(), time.time(), *asleep)


def _seconds_since(clocks: Clocks) -> float:
    """Returns the longest elapsed time among the clocks."""
    return max(now - before for now, before in zip(_clocks(), clocks, strict=True))


def take_lease(path: RemotePath, say: Callable[[str], None] = note) -> Lease | str:
    """Takes a lease, after waiting for another holder's to lapse.

    Returns:
      The lease; or the holder in words, if it renewed its lease or another process was faster.
    """
    holder = _this_process()
    watched: tuple[str, float] | None = None  # the version, and the time when it was first seen
    while True:
        since, begun = _clocks(), time.monotonic()
        lease = _look(path)
        now = time.monotonic()
        if lease and watched and lease[1] != watched[0] and not _is_dead(lease[0]):
            return _in_words(lease[0])
        if watched and now - begun > _BLIND_S:
            watched = (watched[0], now)
        if lease is None or _is_dead(lease[0]) or (watched and now - watched[1] >= LAPSE_S):
            version = write_if(path.url, _content(holder), lease[1] if lease else None)
            if version is not None:
                return Lease(path, version, holder, since)
            lease = _look(path)
            # the response to the first try was lost
            if lease and lease[0].get("token") == holder["token"]:
                return Lease(path, lease[1], holder, since)
            if lease and not _is_dead(lease[0]):
                return _in_words(lease[0])
            continue
        if watched is None:
            watched = (lease[1], now)
            say(
                f"{path.parent}: {_in_words(lease[0])} holds its lease; waiting up to "
                f"{LAPSE_S:.0f} s for it to lapse"
            )
        time.sleep(_LOOK_S)


def hold_lease(folder: RemotePath, refusal: str, named: str = "") -> Lease:
    """Takes the lease of a folder.

    Args:
      refusal: message about another holder: its activity, and a remedy.
      named: the folder's name in the message; "": its path.

    Raises:
      ConfigError: another process holds it.
    """
    lease = take_lease(folder / LEASE_FILE)
    if isinstance(lease, str):
        raise ConfigError(f"{named or folder}: {lease} {refusal}")
    return lease


def hold_folder(folder: AnyPath, refusal: str, named: str = "") -> Hold:
    """Keeps other processes from writing to a folder, by its lease or, on a disk, its lock.
    Arguments as for `hold_lease`.

    Raises:
      ConfigError: another process holds it.
      OSError: the lock cannot be taken.
    """
    if isinstance(folder, RemotePath):
        return hold_lease(folder, refusal, named)
    lock = take_lock(folder / LOCK_FILE)
    if lock is None:
        raise ConfigError(f"{named or folder}: another process {refusal}")
    return _Lock(folder, lock)


@contextlib.contextmanager
def leased(folder: AnyPath, refusal: str) -> Iterator[Callable[[], None]]:
    """Holds the lease of a folder during a block, as `hold_lease` does; a folder of a disk needs
    none.

    Yields:
      A function that raises TrainingError if the lease was lost; the end of the block also calls
      it.
    """
    if not isinstance(folder, RemotePath):
        yield lambda: None
        return
    with contextlib.closing(hold_lease(folder, refusal)) as lease:
        yield lease.check
        lease.check()


def _look(path: RemotePath) -> tuple[dict[str, object], str] | None:
    try:
        if path.stat().st_size > _MOST_BYTES:
            version = version_of(path.url)
            return ({}, version) if version else None
        content, version = read_version(path.url)
    except FileNotFoundError:
        return None
    return _holder(content), version


def _holder(content: bytes) -> dict[str, object]:
    """Parses the facts about the holder from a lease; empty for foreign content."""
    try:
        holder = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _content(holder: dict[str, object]) -> bytes:
    return json.dumps(holder | {"renewed": time.time()}).encode()


def _this_process() -> dict[str, object]:
    pid = os.getpid()
    return {
        "token": os.urandom(8).hex(),
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": pid,
        "born": _born(pid),
        "started": time.time(),
    }


def _machine() -> str:
    """Returns an id of this machine, its boot and its process namespace; "" if there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> str | None:
    """Returns the start of a local process, in ticks since boot; None if it is not alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_dead(holder: dict[str, object]) -> bool:
    """Returns whether the holder was a process of this machine and is dead."""
    is_here = (
        holder.get("machine") == _machine() != "" and holder.get("host") == socket.gethostname()
    )
    pid = holder.get("pid")
    return is_here and isinstance(pid, int) and _born(pid) != holder.get("born")


def _in_words(holder: dict[str, object]) -> str:
    """Describes a holder, with the age of its lease if this machine's clock gives it."""
    pid, host = holder.get("pid"), holder.get("host")
    renewed = holder.get("renewed") if holder.get("machine") == _machine() != "" else None
    name = (
        "".join(c for c in host[:80] if c.isprintable())
        if isinstance(host, str)
        else "an unknown host"
    )
    age = max(0.0, time.time() - renewed) if isinstance(renewed, float) else None
    since = "" if age is None or age > _OLDEST_S else f" (renewed {age:.0f} s ago)"
    return f"process {pid if isinstance(pid, int) else '?'} on {name}{since}"
