"""Leases: one writer of a folder in an object store, where files cannot be locked.

A lease is an object that names its holder. It is written with a precondition, renewed while the holder lives, and
lapses if it is not renewed for `LAPSE_S`. Another process watches its version to see if it lapses, without comparing
the clocks of two machines. (As leases of Kubernetes and of DynamoDB's lock client do.) A holder that cannot be sure by
its own clocks that the lease has not lapsed asks the store before it writes to the folder (`maxbatch.system.fences`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from maxbatch.system.errors import ConfigError, LeaseLost, StoreFailed, TrainingError
from maxbatch.system.fences import Fence
from maxbatch.system.folding import printable
from maxbatch.system.locks import is_lock_on, take_lock
from maxbatch.system.patience import patience
from maxbatch.system.remote_path import RemotePath
from maxbatch.system.storage import AnyPath

LEASE_FILE, LOCK_FILE = ".lease", ".lock"
LAPSE_S = 30.0  # after its last renewal
RENEW_S = 20.0
_LOOK_S = 1.0
_BLIND_S = 5.0  # a read that takes longer proves nothing about the holder: the store was unavailable
_END_WAIT_S = 5.0
_MOST_BYTES = 1 << 16  # of a lease; ours have some 300
_OLDEST_S = 30 * 86400.0  # of a lease whose age is worth telling

Clocks = tuple[float, ...]


class Hold(Protocol):
    """What keeps other processes from writing to a folder."""

    def check(self) -> None:
        """Raises LeaseLost once another process may be writing to the folder."""

    def close(self) -> None:
        """Lets others write to the folder."""


class Lease:
    """A held lease; `close` gives it back.

    Args:
      path: the lease's object.
      version: the version of it that this process wrote.
      holder: the content of the lease.
      since: the clocks when the request that wrote it began.

    Attributes:
      lost: why it is no longer held, None while it is.
    """

    lost: str | None = None

    def __init__(self, path: RemotePath, version: str, holder: dict[str, object], since: Clocks) -> None:
        self._path, self._version, self._holder = path, version, holder
        self._renewed_at, self._renewing = since, threading.Lock()
        self._fence = Fence(path.parent.url, self.ask, self._confirm)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="maxbatch-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._closed.wait(RENEW_S):
            try:
                self._confirm()
            except LeaseLost:
                return
            except StoreFailed:
                continue  # no other process can take it over either while the store does not respond
            except (ConfigError, TrainingError, OSError) as error:
                self.lost = str(error)
                return

    def check(self) -> None:
        """Raises LeaseLost once the lease was lost: another process may be writing."""
        if self.lost:
            raise LeaseLost(f"{self.lost}; this one stops")

    def ask(self) -> None:
        """Raises LeaseLost unless the lease is held; renews it first where it may have lapsed.

        A closed lease is lost to threads that still write.
        """
        if self._closed.is_set():
            self.lost = self.lost or f"{self._path.parent}: the lease is given back"
        self.check()
        if _seconds_since(self._renewed_at) >= (LAPSE_S + RENEW_S) / 2:
            self._confirm()

    def _confirm(self) -> None:
        """Renews the lease; raises LeaseLost if another process holds it."""
        with self._renewing:
            self.check()
            since = _clocks()
            version = self._path.write_if(_content(self._holder), self._version)
            if version is None:
                found = _look(self._path)
                if found is None or found[0].get("token") != self._holder["token"]:
                    self.lost = f"{self._path.parent}: another process holds its lease now"
                    self.check()
                assert found is not None
                version = found[1]  # ours: the response to an earlier try was lost
            self._version, self._renewed_at = version, since

    def close(self) -> None:
        """Gives the lease back; if the store does not respond, the lease stays until it lapses."""
        self._closed.set()
        if patience().gave_up:
            return  # it lapses
        self._thread.join(_END_WAIT_S)
        if self._thread.is_alive() or self.lost:
            return
        remover = threading.Thread(target=self._remove, name="maxbatch-lease-end", daemon=True)
        remover.start()
        remover.join(_END_WAIT_S)

    def _remove(self) -> None:
        try:
            self._path.unlink_if(self._version)
            self._fence.remove()
        except (ConfigError, TrainingError, OSError):
            return  # it lapses


class _Lock:
    """The lock on a folder of a disk; it goes with the process, also when that is killed."""

    def __init__(self, folder: Path, lock: BinaryIO) -> None:
        self._folder, self._lock = folder, lock

    def check(self) -> None:
        if not is_lock_on(self._lock, self._folder / LOCK_FILE):
            raise LeaseLost(
                f"{self._folder}: its lock was removed, and another process may write to it; this one stops"
            )

    def close(self) -> None:
        self._lock.close()


def _clocks() -> Clocks:
    """Returns the clocks of this machine, in seconds: one is never set, one continues while the machine sleeps, and the
    time of day is right again after a virtual machine was stopped."""
    asleep = [time.clock_gettime(time.CLOCK_BOOTTIME)] if hasattr(time, "CLOCK_BOOTTIME") else []
    return (time.monotonic(), time.time(), *asleep)


def _seconds_since(then: Clocks) -> float:
    """Returns the longest elapsed time by any of the clocks."""
    return max(now - before for now, before in zip(_clocks(), then, strict=True))


def _tell(text: str) -> None:
    print(f"maxbatch: {printable(text)}", file=sys.stderr)


def take_lease(path: RemotePath, say: Callable[[str], None] = _tell) -> Lease | str:
    """Takes a lease, waiting for the lapse of one that another process holds.

    Returns:
      The lease; or the holder in words if it renewed its lease, or another process was faster.
    """
    holder = _this_process()
    watched: tuple[str, float] | None = None  # the version, and since when it is known
    while True:
        since, begun = _clocks(), time.monotonic()
        found = _look(path)
        now = time.monotonic()
        if found and watched and found[1] != watched[0] and not _is_dead(found[0]):
            return _in_words(found[0])
        if watched and now - begun > _BLIND_S:
            watched = (watched[0], now)
        if found is None or _is_dead(found[0]) or (watched and now - watched[1] >= LAPSE_S):
            version = path.write_if(_content(holder), found[1] if found else None)
            if version is not None:
                return Lease(path, version, holder, since)
            found = _look(path)
            if found and found[0].get("token") == holder["token"]:  # the response to the first try was lost
                return Lease(path, found[1], holder, since)
            if found and not _is_dead(found[0]):
                return _in_words(found[0])
            continue
        if watched is None:
            watched = (found[1], now)
            say(f"{path.parent}: {_in_words(found[0])} holds its lease; waiting up to {LAPSE_S:.0f} s for it to lapse")
        time.sleep(_LOOK_S)


def hold_lease(folder: RemotePath, refusal: str, named: str = "") -> Lease:
    """Takes the lease of a folder.

    Args:
      folder: the folder.
      refusal: text of the message about another holder: what it does there, and what to do.
      named: the folder as the message names it; "" for its path.

    Raises:
      ConfigError: another process holds it.
    """
    lease = take_lease(folder / LEASE_FILE)
    if isinstance(lease, str):
        raise ConfigError(f"{named or folder}: {lease} {refusal}")
    return lease


def hold_folder(folder: AnyPath, refusal: str, named: str = "") -> Hold:
    """Keeps other processes from writing to a folder: by its lease, or on a disk by its lock. Arguments are as of
    `hold_lease`.

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
    """Holds the lease of a folder for the length of a block, as `hold_lease` does; a folder of a disk needs none.

    Yields:
      A function that raises TrainingError once the lease was lost; the end of the block calls it too.
    """
    if not isinstance(folder, RemotePath):
        yield lambda: None
        return
    with contextlib.closing(hold_lease(folder, refusal)) as lease:
        yield lease.check
        lease.check()


def _look(path: RemotePath) -> tuple[dict[str, object], str] | None:
    try:
        content, version = path.read_version(_MOST_BYTES)
    except FileNotFoundError:
        return None
    return _holder(content), version


def _holder(content: bytes) -> dict[str, object]:
    """Returns the facts about the holder in a lease; none if its content is not ours."""
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
    """Returns an id of this machine, this boot of it and its process numbers; "" if there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> str | None:
    """Returns when a process of this machine started, in ticks since the boot; None if it does not live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_dead(holder: dict[str, object]) -> bool:
    """Returns whether the holder was a process of this machine that no longer lives."""
    is_here = holder.get("machine") == _machine() != "" and holder.get("host") == socket.gethostname()
    pid = holder.get("pid")
    return is_here and isinstance(pid, int) and _born(pid) != holder.get("born")


def _in_words(holder: dict[str, object]) -> str:
    """Names a holder, and the age of its lease if that is known by this machine's clock."""
    pid, host = holder.get("pid"), holder.get("host")
    renewed = holder.get("renewed") if holder.get("machine") == _machine() != "" else None
    name = "".join(c for c in host[:80] if c.isprintable()) if isinstance(host, str) else "an unknown host"
    age = max(0.0, time.time() - renewed) if isinstance(renewed, float) else None
    since = "" if age is None or age > _OLDEST_S else f" (renewed {age:.0f} s ago)"
    return f"process {pid if isinstance(pid, int) else '?'} on {name}{since}"
