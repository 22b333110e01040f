"""The rows of docs/batch-size.md that count samples: emulated in a few lines, and planned as on the
page.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Callable, Iterator, Sequence

import pytest

from maxbatch import BatchPlan, load_config
from tests.helpers.batch_page import rows_of

ROWS = rows_of("The count")
STREAM = list(range(100_000))  # ids of samples

Update = list[int]  # the ids that one update trains on


def loader(batch_size: int, ids: list[int]) -> Iterator[list[int]]:
    """`DataLoader(batch_size)`: consecutive ids."""
    yield from (ids[i : i + batch_size] for i in range(0, len(ids), batch_size))


def sampler(rank: int, world: int) -> list[int]:
    """`DistributedSampler` without a shuffle: every world-th id from rank on."""
    return STREAM[rank::world]


def data_parallel(batch_size: int, gpus: int) -> Update:
    batch = next(loader(batch_size, STREAM))
    parts = [batch[i * len(batch) // gpus : (i + 1) * len(batch) // gpus] for i in range(gpus)]
    return [row for part in parts for row in part]


def ddp(batch_size: int, world: int, sampled: bool = True) -> Update:
    ranks = [sampler(rank, world) if sampled else STREAM for rank in range(world)]
    return [row for ids in ranks for row in next(loader(batch_size, ids))]


def ddp_shuffled(batch_size: int, seeds: Sequence[int]) -> Update:
    """Ranks without a sampler; each shuffles all ids by its own seed."""
    ranks = [random.Random(seed).sample(STREAM, len(STREAM)) for seed in seeds]
    return [row for ids in ranks for row in next(loader(batch_size, ids))]


def keras(batch_size: int, replicas: int) -> Update:
    """`experimental_distribute_dataset` re-batches a global batch into one of each replica."""
    return [
        row
        for part in loader(batch_size // replicas, next(loader(batch_size, STREAM)))
        for row in part
    ]


def passes(per_replica: int, micro: int, replicas: int) -> Update:
    own = [STREAM[r * per_replica : (r + 1) * per_replica] for r in range(replicas)]
    return [
        row
        for rows in own
        for j in range(per_replica // micro)
        for row in rows[j * micro : (j + 1) * micro]
    ]


def megatron(micro: int, batch: int, replicas: int) -> Update:
    assert batch % (micro * replicas) == 0
    return passes(batch // replicas, micro, replicas)


THERE: dict[str, tuple[Callable[[], Update], int]] = {  # the update, and the devices
    "data-parallel-alone": (lambda: data_parallel(256, 1), 1),
    "data-parallel": (lambda: data_parallel(256, 8), 8),
    "ddp-alone": (lambda: ddp(256, 1), 1),
    "ddp": (lambda: ddp(256, 8), 8),
    "ddp-divided": (lambda: ddp(256 // 8, 8), 8),
    "ddp-without-sampler": (lambda: ddp(32, 8, sampled=False), 8),
    "ddp-shuffled-without-sampler": (lambda: ddp_shuffled(32, range(8)), 8),
    "samples-per-node": (lambda: ddp(64 // 8, 4 * 8), 32),
    "keras-fit": (lambda: keras(256, 8), 8),
    "keras-dataset": (lambda: keras(256, 8), 8),
    "drops-the-rest": (lambda: passes(10, 4, 8), 8),
    "megatron-count": (lambda: megatron(2, 96, 8), 8),
    "tokens-of-an-update": (lambda: ddp(65536 // 256 // 8, 8), 8),
    "maxtext-doc-names": (lambda: passes(4 * 2, 4, 8), 8),
}


def test_every_row_that_counts_has_an_emulation() -> None:
    assert set(ROWS) == set(THERE)


@pytest.mark.parametrize("row", ROWS)
def test_the_count_there_is_the_count_of_the_page_and_of_the_plan(row: str) -> None:
    _, said, here = ROWS[row]
    update, devices = THERE[row]
    distinct = len(set(update()))
    plan = BatchPlan.from_config(load_config(overrides=shlex.split(re.sub("`", "", here))), devices)
    assert distinct == int(said) == plan.global_batch_size_to_train_on


def test_without_a_sampler_every_rank_trains_on_the_same_rows() -> None:
    update = ddp(32, 8, sampled=False)
    assert len(update) == 256 and update[:32] * 8 == update
    shuffled_alike = ddp_shuffled(32, [7] * 8)
    assert len(shuffled_alike) == 256 and len(set(shuffled_alike)) == 32


def test_samples_per_node_are_printed() -> None:
    plan = BatchPlan.from_config(load_config(overrides=["global_batch_size=256"]), 32, 4)
    assert (plan.samples_per_host, plan.rows_per_loading_host) == (64, 64)
