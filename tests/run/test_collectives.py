"""What an update sends between devices: gradients cross the data axis once, however they were
accumulated.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.state import abstract_state
from maxbatch.update.step import make_train_step
from tests.helpers.collectives import Collective, bytes_over, collectives
from tests.helpers.tiny import LENGTH, MEASURED, bytes_of, tiny_config


def sent(steps: int, micro_batch: int, *overrides: str) -> tuple[list[Collective], Any]:
    """The collectives of an update in `steps` micro-batches, and the abstract state."""
    config = tiny_config("scan_layers=true", MEASURED, *overrides)
    mesh = make_mesh(config)
    abstract = abstract_state(config.update, mesh)
    batch = Placement(batch_sharding(mesh), LENGTH).abstract_batch(BatchShape(micro_batch, steps))
    scalars = (np.int32(steps), UpdateSettings(np.float32(0)))
    text = (
        make_train_step(config.update, mesh, abstract)
        .lower(abstract, batch, *scalars)
        .compile()
        .as_text()
    )
    return collectives(text, dict(mesh.shape), trips=steps), abstract


@pytest.mark.runs
def test_eight_micro_batches_send_as_many_bytes_over_the_data_axis_as_one() -> None:
    """What DDP's `no_sync` is for: at most 1.05 times the bytes of a single pass, here less than
    1.01.
    """
    data_axis = ("ici_data_parallelism=8", "ici_fsdp_parallelism=1")
    one, abstract = sent(1, 16, *data_axis)
    eight, _ = sent(8, 16, *data_axis)
    assert bytes_over(eight, "data") <= 1.01 * bytes_over(one, "data")
    # Once each gradient, and a few scalars.
    assert bytes_of(abstract.params) <= bytes_over(one, "data") <= bytes_of(abstract.params) + 1024


@pytest.mark.runs
def test_with_fsdp_inside_the_data_axis_is_still_crossed_once() -> None:
    """Of the micro-batches only fsdp knows: it gathers weights and scatters gradients in each, to
    hold neither.
    """
    meshes = ("ici_data_parallelism=2", "ici_fsdp_parallelism=4")
    one, _ = sent(1, 16, *meshes)
    eight, _ = sent(8, 16, *meshes)
    assert bytes_over(eight, "data") <= 1.05 * bytes_over(one, "data")
    assert not [c for c in eight if "data" in c.axes and c.times > 1]


def test_a_pipeline_sends_parts_to_neighbours_and_gradients_over_the_data_axis_once() -> None:
    """Three permutes of a part a tick, forward and backward; nothing else over the stages within
    the ticks.
    """
    steps, ticks, parts = 3, 3, 2
    meshes = ("ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_pipeline_parallelism=2")
    found, _ = sent(steps, 32, *meshes, f"num_pipeline_microbatches={parts}", "remat_policy=full")
    assert not [c for c in found if "data" in c.axes and c.times > 1]
    in_ticks = [c for c in found if "pipeline" in c.axes and c.times >= steps * ticks]
    part = 32 // 4 // parts * LENGTH * 32 * 4  # rows of a device, length, width, float32
    assert [(c.kind, c.num_bytes) for c in in_ticks] == [("collective-permute", part)] * 6


@pytest.mark.parametrize(
    ("line", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, x", {"tensor"}),
        ("replica_groups=[2,4]<=[8], x", {"fsdp", "tensor"}),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", {"data"}),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, x", {"data"}),
        (
            "replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) "
            "{'axis_1'}",
            {"fsdp", "tensor"},
        ),
        ("source_target_pairs={{0,2},{2,0}}, x", {"fsdp"}),
        ("replica_groups={}, x", {"data", "fsdp", "tensor"}),
    ],
)
def test_the_axes_of_a_collective_are_read_from_every_way_of_writing_its_groups(
    line: str, axes: set[str]
) -> None:
    text = (
        f"ENTRY main (p: f32[2]) -> f32[2] {{\n  %a = f32[2,3]{{1,0}} all-reduce(%p), {line}\n}}\n"
    )
    (found,) = collectives(text, {"data": 2, "fsdp": 2, "tensor": 2}, trips=1)
    assert (found.num_bytes, found.axes, found.times) == (24, axes, 1)
    assert jax.device_count() == 8
