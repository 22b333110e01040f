"""Rows reach their planned devices, whichever host staged them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from maxbatch.data.feed.feed import BatchSeries, HostOrder
from maxbatch.data.feed.placement import Batch, BatchShape, Placement, is_loading
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from tests.helpers.tiny import LENGTH, some_rows, tiny_config


def placement_of(expansion: int = 1, loads: list[bool] | None = None, *overrides: str) -> Placement:
    placement = Placement(batch_sharding(make_mesh(tiny_config(*overrides))), LENGTH, expansion)
    if loads is not None:  # as if these of the eight devices belonged to hosts that load
        placement._device_loads = np.array(loads)
    return placement


def flat(batch: Batch) -> dict[str, np.ndarray]:
    arrays = zip(("tokens", "segments", "weights"), batch[:3], strict=True)
    return {name: np.asarray(array).reshape(-1, LENGTH) for name, array in arrays}


@pytest.mark.parametrize("num_rows", [16, 11, 8, 1])
def test_rows_lie_in_order_and_the_rest_is_padding(num_rows: int) -> None:
    rows = some_rows(num_rows)
    staged = flat(placement_of().stage(rows, num_rows, BatchShape(8, 2)))
    for name, array in staged.items():
        np.testing.assert_array_equal(array[:num_rows], rows[name])
        assert not array[num_rows:].any()


@pytest.mark.parametrize("micro_batch", [8, 16, 24])
@pytest.mark.parametrize("expansion", [2, 4])
@pytest.mark.parametrize("tensor", [1, 4])
def test_staged_by_a_few_hosts_rows_are_arranged_in_the_program(
    micro_batch: int, expansion: int, tensor: int
) -> None:
    loads = [is_loading(device // 2, expansion) for device in range(8)]  # four hosts of two devices
    placement = placement_of(expansion, loads, f"ici_tensor_parallelism={tensor}")
    shape = BatchShape(micro_batch, 2)
    rows = some_rows(num_rows := 2 * micro_batch - 3)
    staged = placement.stage(rows, num_rows, shape)
    for part in staged.tokens:
        for device, shard in enumerate(part.addressable_shards):
            assert loads[device] or not shard.data.any(), "other hosts stage placeholders"
    arrange = jax.jit(placement.arrange(micro_batch))
    for j in range(2):
        arranged = flat(arrange(jax.tree.map(lambda x, j=j: x[j], staged)))
        for name, array in arranged.items():
            wanted = rows[name][j * micro_batch : (j + 1) * micro_batch]
            np.testing.assert_array_equal(array[: len(wanted)], wanted)
            assert not array[len(wanted) :].any()


@pytest.mark.parametrize("expansion", [2, 4])
def test_a_loading_host_stages_e_shares_and_any_other_placeholders_of_its_own(
    expansion: int,
) -> None:
    """24 rows on 8 devices are 3 rows each: a loading device stages e arrays of so many, any other
    one.
    """
    placement = placement_of(expansion, [is_loading(device, expansion) for device in range(8)])
    tokens = placement.abstract_batch(shape := BatchShape(24, 2)).tokens
    assert [part.sharding.shard_shape(part.shape) for part in tokens] == [
        (2, 3, LENGTH)
    ] * expansion
    staged = placement.stage(some_rows(48), 48, shape).tokens
    rows_of_device = np.array(
        [[shard.data.any(axis=(0, 2)).sum() for shard in x.addressable_shards] for x in staged]
    )
    assert rows_of_device.sum(axis=0).tolist() == [
        3 * expansion * loads for loads in placement._device_loads
    ]
    placeholders = placement.padding(shape).tokens
    assert all(part is placeholders[0] for part in placeholders), "one array stands for all"


def test_padding_is_made_once() -> None:
    placement = placement_of()
    assert placement.padding(BatchShape(8, 2)) is placement.padding(BatchShape(8, 2))


def test_a_share_reads_the_rows_of_its_slots_batch_after_batch() -> None:
    """Two batches of 16 rows in micro-batches of 8, then a last one of 5; this host has slots 2, 3,
    6 and 7.
    """
    placement = placement_of()
    placement.local_rows = lambda shape: np.array([[[2, 3, 6, 7]], [[10, 11, 14, 15]]])  # type: ignore[method-assign]
    shape = BatchShape(8, 2)
    order = HostOrder(placement, [BatchSeries(100, 16, 2, shape), BatchSeries(132, 5, 1, shape)])
    everything = [
        102,
        103,
        106,
        107,
        110,
        111,
        114,
        115,
        118,
        119,
        122,
        123,
        126,
        127,
        130,
        131,
        134,
        135,
    ]
    assert len(order) == len(everything)
    for first in range(len(everything)):
        for stop in range(first, len(everything) + 1):
            assert order.indices(first, stop).tolist() == everything[first:stop]
