"""One writer of a folder in an object store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.processes.repeating import Repeating
from maxbatch.system.storage import leases
from maxbatch.system.storage.leases import Lease, leased, take_lease
from maxbatch.system.storage.object_stores import read_version
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import as_path
from maxbatch.system.storage.stores.store import split
from tests.helpers.stores import LEASE_WRITES, Store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LAPSE_S", 60.0)
    monkeypatch.setattr(leases, "RENEW_S", 0.5)
    monkeypatch.setattr(leases, "_LOOK_S", 0.1)


@pytest.fixture
def path(store: Store) -> RemotePath:
    found = as_path(store.bucket() + "/run/.lease")
    assert isinstance(found, RemotePath)
    return found


def test_of_starts_at_the_same_time_one_gets_the_lease(path: RemotePath, store: Store) -> None:
    taken: list[Lease | str] = []
    threads = [
        threading.Thread(target=lambda: taken.append(take_lease(path, lambda _: None)))
        for _ in range(4)
    ]
    store.forget()
    # None has seen another's lease: all have looked before the first of them writes.
    with store.failing(together=4, matching=LEASE_WRITES):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [status for *_, status in store.requests()].count(412) == 3
    (held,) = [one for one in taken if isinstance(one, Lease)]
    held.check()
    refused = [one for one in taken if isinstance(one, str)]
    assert len(refused) == 3 and all("process " in one and "renewed " in one for one in refused)
    held.close()
    assert not path.exists()


def test_a_lease_of_a_process_here_that_no_longer_lives_is_taken_over_at_once(
    path: RemotePath,
) -> None:
    take = (
        "import os, sys; from maxbatch.system.storage.leases import take_lease; from "
        "maxbatch.system.storage.storage import as_path\nprint(take_lease(as_path(sys.argv[1]), print), "
        "flush=True); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", take, str(path)], check=False, timeout=60)
    assert path.exists()
    said: list[str] = []
    held = take_lease(path, said.append)
    assert isinstance(held, Lease) and said == [], "whoever waits says so"
    held.close()


def test_a_lease_of_another_machine_is_waited_for_until_it_lapses(
    path: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LAPSE_S", 2.0)
    path.write_bytes(
        json.dumps(
            {"host": "elsewhere", "machine": "x", "pid": 7, "renewed": time.time() - 5}
        ).encode()
    )
    said: list[str] = []
    started = time.monotonic()
    held = take_lease(path, said.append)
    assert isinstance(held, Lease) and time.monotonic() - started >= leases.LAPSE_S
    assert len(said) == 1 and "process 7 on elsewhere holds its lease; waiting up to" in said[0]
    held.close()


def test_a_renewed_lease_is_seen_where_the_store_states_no_version_beside_the_content(
    gs: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LAPSE_S", 3.0)
    path = as_path(gs.bucket() + "/run/.lease")
    assert isinstance(path, RemotePath)
    _, bucket, name = split(path.url)
    emulator = f"http://127.0.0.1:{gs.emulator}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name)}"

    def renew() -> None:
        lease = json.dumps({"host": "elsewhere", "pid": 1, "token": "theirs"}).encode()
        # not by way of the proxy, which states it
        urlopen(Request(emulator, lease, {"Content-Type": "text/plain"}))

    renew()
    renewing = Repeating(renew, 0.5, "renews")
    gs.forget()
    assert isinstance(take_lease(path, lambda _: None), str)
    renewing.stop()
    assert all(method == "GET" for _, method, *_ in gs.requests()), (
        "it does not try to take the lease"
    )


def test_a_holder_whose_lease_was_taken_over_stops(path: RemotePath) -> None:
    held = take_lease(path, lambda _: None)
    assert isinstance(held, Lease)
    held.check()
    path.write_bytes(b'{"token": "of another"}')
    end = time.monotonic() + 60
    while not held.lost and time.monotonic() < end:
        time.sleep(0.1)
    with pytest.raises(TrainingError, match="another process holds its lease now; this one stops"):
        held.check()
    held.close()
    assert path.read_bytes() == b'{"token": "of another"}', "what is not ours stays"


def test_a_lease_whose_answers_were_lost_is_held(path: RemotePath, store: Store) -> None:
    with store.failing(share=1.0, at_most=1, kinds=("lost",), matching=LEASE_WRITES):
        held = take_lease(path, lambda _: None)
    assert isinstance(held, Lease)
    _, taken = read_version(path.url)
    store.forget()
    with store.failing(share=1.0, at_most=1, kinds=("lost",), matching=LEASE_WRITES):
        end = time.monotonic() + 60
        while read_version(path.url)[1] == taken and time.monotonic() < end:
            time.sleep(0.1)
    _, renewed = read_version(path.url)
    while read_version(path.url)[1] == renewed and time.monotonic() < end:
        time.sleep(0.1)
    assert read_version(path.url)[1] != renewed, "it is renewed again"
    held.check()
    held.close()
    assert not path.exists()


def test_a_folder_that_another_process_holds_is_refused_in_one_line(path: RemotePath) -> None:
    held = take_lease(path, lambda _: None)
    assert isinstance(held, Lease)
    with pytest.raises(ConfigError) as refused, leased(path.parent, "sweeps in it; wait for it"):
        pytest.fail("two hold it")
    here = rf"process {os.getpid()} on \S+ \(renewed \d+ s ago\)"
    assert re.fullmatch(rf"{path.parent}: {here} sweeps in it; wait for it", str(refused.value))
    held.check()
    held.close()


def test_a_block_that_lost_its_lease_stops(path: RemotePath) -> None:
    end = time.monotonic() + 60
    with pytest.raises(TrainingError, match="this one stops"), leased(path.parent, "") as check:
        check()
        path.write_bytes(b'{"token": "of another"}')
        while time.monotonic() < end:
            time.sleep(0.1)
            check()


def test_a_folder_of_a_disk_needs_no_lease(tmp_path: Path) -> None:
    with leased(tmp_path, "") as check, leased(tmp_path, ""):
        check()
    assert not list(tmp_path.iterdir())


def test_a_lease_of_another_kind_of_any_size_costs_little_and_is_waited_for(
    path: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LAPSE_S", 0.5)
    path.write_bytes(b"[" * (20 << 20))
    said: list[str] = []
    tracemalloc.start()
    held = take_lease(path, said.append)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(held, Lease) and "process ? on an unknown host holds its lease" in said[0]
    assert most < 4 << 20
    held.close()


def test_no_age_of_a_lease_is_told_by_another_machines_clock() -> None:
    for renewed in (time.time() - 3600, time.time() + 3600):
        assert (
            leases._in_words({"pid": 7, "host": "h", "machine": "x", "renewed": renewed})
            == "process 7 on h"
        )


@pytest.mark.parametrize(
    "content",
    [
        b'{"renewed": "abc"}',
        b'{"renewed": 1e999, "pid": [1], "host": {}}',
        b'{"renewed": -1e9, "host": "a\\u001b[1m"}',
        b'{"renewed": NaN, "pid": true}',
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"renewed": %s}' % (b"9" * 400),
    ],
)
def test_a_lease_of_any_content_is_told_in_words(content: bytes) -> None:
    words = leases._in_words(leases._holder(content))
    assert re.fullmatch(r"process \S+ on [ -~]+", words) and len(words) < 200
