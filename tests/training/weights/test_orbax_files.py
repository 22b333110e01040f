"""Orbax's small files in object stores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.multihost import multihost

from maxbatch.runs.position import COMMITTED_FILE
from maxbatch.system.errors import StoreRefused
from maxbatch.system.patience import Patience
from maxbatch.system.storage import as_path
from maxbatch.training.weights.orbax_files import BARRIER_S, COMMIT_S, PatientFiles, let_orbax_reach_stores
from tests.helpers.stores import Store

REQUESTS: dict[str, tuple[Callable[[PatientFiles, str], object], object]] = {
    "open": (lambda files, folder: files.open(f"{folder}/x", "rb").read(), b"old"),
    "exists": (lambda files, folder: files.exists(f"{folder}/x"), True),
    "isdir": (lambda files, folder: files.isdir(folder), True),
    "listdir": (lambda files, folder: files.listdir(folder), ["x"]),
    "stat": (lambda files, folder: files.stat(f"{folder}/x").length, 3),
    "remove": (lambda files, folder: files.remove(f"{folder}/x"), None),
    "rmtree": (lambda files, folder: files.rmtree(folder), None),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_small_file_is_waited_for(store: Store, name: str) -> None:
    folder = store.bucket() + "/folder"
    as_path(f"{folder}/x").write_bytes(b"old")
    ask, expected = REQUESTS[name]
    store.forget()
    with store.failing(share=1.0, at_most=2, kinds=("425",)):  # which no client tries again
        assert ask(PatientFiles(), folder) == expected
    assert [status for *_, status in store.requests()].count(425) == 2
    assert as_path(f"{folder}/x").exists() == (name not in ("remove", "rmtree"))


def test_a_removal_that_s3_answers_with_an_error_per_key_removes_or_raises(s3: Store) -> None:
    folder = s3.bucket() + "/folder"
    for name in ("params/x", "params/y", COMMITTED_FILE):
        as_path(f"{folder}/{name}").write_bytes(b"old")
    with s3.failing(keeps=True):
        PatientFiles().rmtree(folder)
    assert not as_path(folder).exists()
    as_path(f"{folder}/params/x").write_bytes(b"old")
    with s3.failing(keeps=True, denied=r"^DELETE .*params"), pytest.raises(StoreRefused, match="no permission"):
        PatientFiles().rmtree(folder)


def test_hosts_wait_for_each_other_for_longer_than_one_of_them_for_the_store() -> None:
    let_orbax_reach_stores()
    assert multihost.coordination_timeout() == BARRIER_S > Patience.seconds
    wait = future.CommitFuture(_nothing())
    assert wait._t._timeout_secs == BARRIER_S, "of a host, for the folder that the first host makes"
    wait.result()
    assert COMMIT_S > BARRIER_S


async def _nothing() -> None:
    pass
