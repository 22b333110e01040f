"""Orbax's small files in object stores."""

from __future__ import annotations

from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.multihost import multihost

from maxbatch.system.object_stores import PATIENCE
from maxbatch.training.orbax_files import BARRIER_S, COMMIT_S, let_orbax_wait_for_stores


def test_hosts_wait_for_each_other_for_longer_than_one_of_them_for_the_store() -> None:
    let_orbax_wait_for_stores()
    assert multihost.coordination_timeout() == BARRIER_S > PATIENCE.seconds
    wait = future.CommitFuture(_nothing())
    assert wait._t._timeout_secs == BARRIER_S, "of a host, for the folder that the first host makes"
    wait.result()
    assert COMMIT_S > BARRIER_S


async def _nothing() -> None:
    pass
