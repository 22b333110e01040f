"""Files that grow at their end, on a disk and in object stores."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from maxbatch.system.storage import appending
from maxbatch.system.storage.appending import open_appender
from maxbatch.system.storage.storage import as_path
from tests.helpers.stores import Store


def test_lines_that_are_synced_can_be_read_and_the_object_is_one(
    store: Store, tmp_path: Path
) -> None:
    for path in (tmp_path / "log", as_path(store.bucket() + "/log")):
        path.write_bytes(b"0\n")
        log = open_appender(path, b"0\n")
        log.append(b"1\n")
        log.sync()
        assert path.read_bytes() == b"0\n1\n"
        log.append(b"2\n")
        log.close()
        assert path.read_bytes() == b"0\n1\n2\n"
        assert [p.name for p in path.parent.iterdir()] == ["log"]


def test_a_large_object_is_joined_in_the_store_and_not_sent_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appending, "REWRITTEN_BYTES", 1000)
    # S3 joins parts of 5 MiB at least
    path, begin = as_path(store.bucket() + "/log"), b"x" * (6 << 20)
    path.write_bytes(begin)
    log = open_appender(path, begin)
    store.forget()
    for number in range(3):
        log.append(b"%d\n" % number)
        log.sync()
    log.close()
    assert path.read_bytes() == begin + b"0\n1\n2\n"
    assert (
        sum(size for _, method, _, size, _ in store.requests() if method in ("PUT", "POST"))
        < 20_000
    )


def test_an_object_that_outgrows_the_bound_is_joined_from_then_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begin = as_path(store.bucket() + "/log"), b"x" * (6 << 20)
    monkeypatch.setattr(appending, "REWRITTEN_BYTES", len(begin))
    path.write_bytes(begin)
    log = open_appender(path, begin)
    log.append(b"0\n")
    log.sync()
    store.forget()
    log.append(b"1\n")
    log.close()
    assert path.read_bytes() == begin + b"0\n1\n"
    assert (
        sum(size for _, method, _, size, _ in store.requests() if method in ("PUT", "POST"))
        < 20_000
    )


def test_lines_that_were_joined_and_whose_answer_was_lost_are_not_joined_twice(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begin = as_path(store.bucket() + "/log"), b"x" * (6 << 20)
    monkeypatch.setattr(appending, "REWRITTEN_BYTES", 1000)
    path.write_bytes(begin)
    log = open_appender(path, begin)
    log.append(b"0\n")
    store.forget()
    with store.failing(
        share=1.0, at_most=1, kinds=("lost",), matching="^POST .*(/compose|uploadId=)"
    ):
        log.sync()
    assert [status for *_, status in store.requests()].count(425) == 1
    log.append(b"1\n")
    log.close()
    assert path.read_bytes() == begin + b"0\n1\n"


def test_lines_whose_answer_was_lost_are_not_written_twice(store: Store) -> None:
    path = as_path(store.bucket() + "/log")
    path.write_bytes(b"0\n")
    log = open_appender(path, b"0\n")
    log.append(b"1\n")
    store.forget()
    with store.failing(share=1.0, at_most=1, kinds=("lost",), matching="^(PUT|POST)"):
        log.sync()
    assert [status for *_, status in store.requests()].count(425) == 1
    log.append(b"2\n")
    log.close()
    assert path.read_bytes() == b"0\n1\n2\n"


def test_lines_reach_the_store_by_themselves_and_seldom(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appending, "PERIOD_S", 0.5)
    path = as_path(store.bucket() + "/log")
    path.write_bytes(b"")
    log = open_appender(path, b"")
    store.forget()
    started = time.monotonic()
    while path.read_bytes().count(b"\n") < 50:
        assert time.monotonic() < started + 60, "nothing comes"
        log.append(b"line\n" * 10)
        time.sleep(0.05)
    most = (time.monotonic() - started) / appending.PERIOD_S + 1
    assert 1 <= sum(method in ("PUT", "POST") for _, method, *_ in store.requests()) <= most
    log.close()
