"""Writes below a folder whose lease another process may hold by now."""

from __future__ import annotations

import json
import time
import types
from pathlib import Path

import pytest

from maxbatch.system.errors import LeaseLost
from maxbatch.system.storage import appending, leases
from maxbatch.system.storage.appending import open_appender
from maxbatch.system.storage.fences import BUILDING
from maxbatch.system.storage.leases import Lease, take_lease
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import as_path, clone_files, remove_tree
from tests.helpers.stores import Store


@pytest.fixture(autouse=True)
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 25.0)
    monkeypatch.setattr(appending, "PERIOD_S", 1000.0)


@pytest.fixture
def folder(store: Store) -> RemotePath:
    found = as_path(store.bucket() + "/run")
    assert isinstance(found, RemotePath)
    return found


def taken(folder: RemotePath) -> Lease:
    lease = take_lease(folder / ".lease", lambda _: None)
    assert isinstance(lease, Lease)
    return lease


def write_as_another(path: RemotePath, data: bytes) -> None:
    """Writes as another process does: this one's fence knows nothing of it."""
    path.file_system.pipe_file(path.url, data)


def take_over(folder: RemotePath) -> None:
    write_as_another(folder / ".lease", b'{"token": "of another"}')


def sleep_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the clocks of this process an hour late, as after a stop that nothing here noticed."""
    clocks = leases._clocks
    monkeypatch.setattr(leases, "_clocks", lambda: tuple(one + 3600 for one in clocks()))


def has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stop between the question for the lease and the write."""
    monkeypatch.setattr(Lease, "ask", lambda self: None)


@pytest.mark.parametrize("stop", [sleep_an_hour, has_asked])
def test_a_writer_whose_lease_was_taken_over_changes_no_object(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch, stop: object
) -> None:
    if stop is has_asked:
        has_asked(monkeypatch)
    lease, path = taken(folder), folder / "config.yml"
    path.write_bytes(b"first")
    path.write_bytes(b"mine")
    assert path.read_bytes() == b"mine"
    take_over(folder)
    write_as_another(path, b"of another")
    if stop is sleep_an_hour:
        sleep_an_hour(monkeypatch)
    with pytest.raises(LeaseLost, match="another process holds its lease now; this one stops"):
        path.write_bytes(b"late")
    assert path.read_bytes() == b"of another"
    lease.close()


def test_a_writer_whose_lease_may_have_lapsed_asks_before_it_writes_copies_or_removes(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken(folder)
    path = folder / "kept"
    path.write_bytes(b"kept")
    (tmp_path / "file").write_bytes(b"late")
    take_over(folder)
    sleep_an_hour(monkeypatch)
    for change in (
        lambda: path.unlink(),
        lambda: path.upload(tmp_path / "file"),
        lambda: (folder / "other").write_bytes(b"late"),
        lambda: path.copy(folder / "other"),
        lambda: remove_tree(folder),
        lambda: (folder / f"{BUILDING}x" / "new").write_bytes(b"late"),
    ):
        with pytest.raises(LeaseLost):
            change()
    assert path.read_bytes() == b"kept"
    assert sorted(p.name for p in folder.iterdir()) == [".lease", "kept"]


def test_the_holder_writes_over_what_a_former_holder_wrote_late(folder: RemotePath) -> None:
    lease, path = taken(folder), folder / "config.yml"
    path.write_bytes(b"mine")
    write_as_another(path, b"late")
    path.write_bytes(b"mine again")
    assert path.read_bytes() == b"mine again"
    lease.close()
    path.write_bytes(b"anybody's")
    assert path.read_bytes() == b"anybody's" and not (folder / ".lease").exists()


def test_lines_of_a_writer_whose_lease_was_taken_over_are_not_written(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_asked(monkeypatch)
    taken(folder)
    path = folder / "metrics.jsonl"
    path.write_bytes(b"0\n")
    log = open_appender(path, b"0\n")
    log.append(b"1\n")
    log.sync()
    take_over(folder)
    write_as_another(path, b"0\n1\n2\n3\n")
    log.append(b"late\n")
    with pytest.raises(LeaseLost, match="this one stops"):
        log.sync()
    assert path.read_bytes() == b"0\n1\n2\n3\n"


def test_a_checkpoint_that_was_removed_before_it_was_copied_does_not_come_back(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_asked(monkeypatch)
    taken(folder)
    staging = folder / f"{BUILDING}x-5"
    for name in ("a", "b", "commit_success.txt"):
        (staging / name).write_bytes(b"")
    found = staging.files()
    monkeypatch.setattr(RemotePath, "files", lambda self: found)  # the stop is after the listing
    for path, _ in found:
        path.file_system.rm_file(path.url)
    with pytest.raises(FileNotFoundError):
        clone_files(staging, folder / "5")
    assert not (folder / "5").exists()


def test_a_lease_that_is_given_back_lets_nothing_through_that_still_writes(
    folder: RemotePath,
) -> None:
    lease = taken(folder)
    fence = lease._fence
    lease.close()
    with pytest.raises(LeaseLost, match="the lease is given back"):
        fence.write((folder / "late").url, b"late")
    assert not (folder / "late").exists()


def test_a_wait_that_was_itself_stopped_takes_no_lease_that_was_renewed_meanwhile(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LAPSE_S", 0.5)
    holder = {"host": "elsewhere", "machine": "x", "pid": 7, "token": "t"}
    write_as_another(folder / ".lease", json.dumps(holder).encode())

    def renew_and_stop(_: str) -> None:
        write_as_another(folder / ".lease", json.dumps(holder | {"renewed": time.time()}).encode())
        time.sleep(1.0)

    refused = take_lease(folder / ".lease", renew_and_stop)
    assert isinstance(refused, str) and refused.startswith("process 7 on elsewhere")


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_an_hour_off_takes_over_no_lease_that_is_renewed(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.5)
    held = taken(folder)
    jumped = types.SimpleNamespace(
        monotonic=time.monotonic, sleep=time.sleep, time=lambda: time.time() + 3600 * hours
    )
    monkeypatch.setattr(leases, "time", jumped)
    monkeypatch.setattr(held, "_renewed_at", held._renewed_at[:2])  # of the clocks that are left
    monkeypatch.setattr(leases, "_is_dead", lambda holder: False)
    assert isinstance(take_lease(folder / ".lease", lambda _: None), str)
    (folder / "mine").write_bytes(b"")
    held.check()
    held.close()
