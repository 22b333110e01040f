"""JAX's private names are those that `jax_internals` uses; each failure says what depends on the
name.
"""

from __future__ import annotations

import pytest

from maxbatch.parallel.jax_internals import coordination

COORDINATION = {
    "client": "the messages of hosts, heartbeats and checkpoints",
    "process_id": "refusals before the hosts have joined",
    "num_processes": "refusals before the hosts have joined",
    "coordinator_address": "the watch over the first host",
}


@pytest.mark.parametrize("name", COORDINATION)
def test_the_state_of_jax_distributed_is_there(name: str) -> None:
    assert hasattr(coordination(), name), f"without it fail: {COORDINATION[name]}"
