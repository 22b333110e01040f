"""The step that starts at s trains on exactly stream[s : s + B], each sample at its planned
place.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from maxbatch import BatchPlan
from maxbatch.data.feed.feed import Feed
from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.data.stream.stream import open_stream
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.rampup import Stage
from maxbatch.run.compile.ladder import plan_shapes
from tests.helpers.tiny import LENGTH, tiny_config

RAMP = ("batch_size_schedule=0:8 20:16 60:24", "per_device_batch_size=2", "train_samples=150")


def make_feed(first_step: int = 0, *overrides: str, num_devices: int = 4) -> Feed:
    config = tiny_config(*RAMP, *overrides)
    plan = BatchPlan.from_config(config, num_devices)
    placement = Placement(batch_sharding(make_mesh(config, jax.devices()[:num_devices])), LENGTH)
    (shape, *_) = plan_shapes(plan.stages)
    return Feed(open_stream(config), plan.manager, lambda *_: shape, placement, first_step)


def test_every_step_gets_exactly_its_samples_in_order() -> None:
    stream, position = open_stream(tiny_config()), 0
    with make_feed() as feed:
        for staged in feed:
            wanted = stream.read(position, position + staged.planned.num_rows)
            for name, array in zip(
                ("tokens", "segments", "weights"), staged.batch[:3], strict=True
            ):
                rows = np.asarray(array).reshape(-1, LENGTH)
                np.testing.assert_array_equal(rows[: staged.planned.num_rows], wanted[name])
                assert name == "tokens" or not rows[staged.planned.num_rows :].any(), (
                    "padding has no segment, no weight"
                )
            assert staged.planned.first_sample == position
            position += staged.planned.num_rows
    assert position == 150


def test_batches_follow_the_schedule_and_the_last_is_what_is_left() -> None:
    with make_feed() as feed:
        assert [staged.planned.num_rows for staged in feed] == [8, 8, 8, 16, 16, 16, 24, 24, 24, 6]


@pytest.mark.parametrize("first_step", [1, 4, 9])
def test_a_feed_that_starts_later_goes_on_as_the_first_would_have(first_step: int) -> None:
    with make_feed() as whole, make_feed(first_step) as rest:
        late = list(whole)[first_step:]
        for one, other in zip(late, rest, strict=True):
            assert one[1:4] == other[1:4]
            np.testing.assert_array_equal(one.batch.tokens, other.batch.tokens)


def test_samples_lie_where_the_layout_draws_them() -> None:
    """Axolotl's example: 3 rows, 2 accumulation steps, 3 devices."""
    config = tiny_config("per_device_batch_size=3", "gradient_accumulation_steps=2", "steps=1")
    plan = BatchPlan.from_config(config, 3)
    stream = open_stream(config)
    placement = Placement(batch_sharding(make_mesh(config, jax.devices()[:3])), LENGTH)
    with Feed(stream, plan.manager, lambda *_: BatchShape(9, 2), placement, 0) as feed:
        (staged,) = feed
    for device, shard in enumerate(staged.batch.tokens.addressable_shards):
        for j, layout in enumerate(plan.layout()):
            first, end = layout[device]
            np.testing.assert_array_equal(shard.data[j], stream.read(first, end)["tokens"])
    assert plan.layout()[1][2] == (15, 18)


def test_what_goes_wrong_in_the_feed_is_raised_where_it_is_read() -> None:
    def fail(stage: Stage, opens_stage: bool) -> BatchShape:
        raise ValueError("no shape for this stage")

    config = tiny_config(*RAMP)
    plan = BatchPlan.from_config(config, 1)
    placement = Placement(batch_sharding(make_mesh(config, jax.devices()[:1])), LENGTH)
    with (
        Feed(open_stream(config), plan.manager, fail, placement, 0) as feed,
        pytest.raises(ValueError, match="no shape"),
    ):
        next(feed)


def test_the_number_of_workers_does_not_change_the_stream() -> None:
    with make_feed() as threads, make_feed(0, "grain_worker_count=1") as workers:
        for one, other in zip(threads, workers, strict=True):
            np.testing.assert_array_equal(one.batch.tokens, other.batch.tokens)
