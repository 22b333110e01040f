"""Where every array of a preset lives, and which meshes are refused."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import pytest
from jax.sharding import PartitionSpec as P

from maxbatch import load_config
from maxbatch.parallel.mesh import lay_out, make_mesh, share_out
from maxbatch.parallel.sharding import ACTIVATION_RULES, activation_constraint
from maxbatch.plan.mesh_shape import AXES, MeshShape
from maxbatch.update.state import abstract_state
from tests.helpers.tiny import bytes_of

PRESETS = sorted(
    path.stem for path in (Path(__file__).parents[2] / "configs" / "models").glob("*.yml")
)
SHARDED = ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "ici_pipeline_parallelism=2")
# Stacked layers over the pipeline, widths over fsdp, heads, MLP and vocabulary over tensor; outside
# of the layers the pipeline's devices split the width too.
LAYER = {
    "attention.query": P("pipeline", "fsdp", "tensor", None),
    "attention.key": P("pipeline", "fsdp", "tensor", None),
    "attention.value": P("pipeline", "fsdp", "tensor", None),
    "attention.out": P("pipeline", "tensor", None, "fsdp"),
    "attention_norm.scale": P("pipeline", None),
    "mlp.gate": P("pipeline", "fsdp", "tensor"),
    "mlp.up": P("pipeline", "fsdp", "tensor"),
    "mlp.down": P("pipeline", "tensor", "fsdp"),
    "mlp_norm.scale": P("pipeline", None),
}
GOLDEN = {
    "embedding": P("tensor", ("fsdp", "pipeline")),
    "final_norm.scale": P(None),
    "output": P(("fsdp", "pipeline"), "tensor"),
    **{f"layers.{name}": spec for name, spec in LAYER.items()},
}


def placements(*overrides: str) -> dict[str, tuple[tuple[int, ...], P, int]]:
    """Shape, partition and bytes on one device of every array of the train state, by its name."""
    config = load_config(overrides=list(overrides))
    table = {}
    for path, leaf in jax.tree.leaves_with_path(abstract_state(config.update, make_mesh(config))):
        names = [
            str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", ""))))
            for entry in path
        ]
        own = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        table[".".join(names).removesuffix(".value")] = (leaf.shape, leaf.sharding.spec, own)
    return table


@pytest.mark.parametrize("preset", PRESETS)
def test_every_array_of_a_preset_is_split_over_all_devices(preset: str) -> None:
    """Parameters and both moments: a device holds an eighth of all matrices (-s prints all).

    Norms, biases, the sinks of heads and the counts of experts are small.
    """
    table = placements(f"model_name={preset}", "ici_pipeline_parallelism=2")
    for name, (shape, spec, own) in table.items():
        print(f"{name:40} {shape!s:24} {spec!s:60} {own:>14,} bytes a device")
        if shape and not any(small in name for small in ("norm", "bias", "sinks", "counts")):
            assert own == math.prod(shape) * 4 // 8, name


@pytest.mark.parametrize("preset", ["llama2-7b", "llama3-70b"])
def test_golden_placement_of_parameters_and_moments(preset: str) -> None:
    table = placements(f"model_name={preset}", *SHARDED)
    for part in ("params", "mu", "nu"):
        found = {
            name.split(f"{part}.", 1)[1]: spec
            for name, (_, spec, _) in table.items()
            if f"{part}." in name
        }
        assert found == GOLDEN


def test_golden_placement_of_activations() -> None:
    mesh = make_mesh(load_config(overrides=[*SHARDED, "base_num_kv_heads=1"]))
    spec = activation_constraint(mesh, ("fsdp",)).spec
    assert spec((2, 4, 8, 16), ("stage", "batch", "length", "embed")) == P(
        "pipeline", ("fsdp",), "context", None
    )
    heads = ("batch", "length", "heads", "head_dim")
    assert spec((4, 8, 4, 16), heads) == P(("fsdp",), "context", "tensor", None)
    assert spec((4, 8, 1, 16), ("batch", "length", "kv_heads", "head_dim")) == P(
        ("fsdp",), "context", None, None
    )
    rules = {name: axis for name, axis in ACTIVATION_RULES.items() if axis}
    assert rules.pop("layer_input") == "fsdp"  # of rows that every device has whole
    assert set(rules.values()) == {"pipeline", "context", "tensor", "expert"}


def test_nothing_is_held_twice_where_no_axis_replicates() -> None:
    config = load_config(overrides=["model_name=llama3-8b", *SHARDED])
    total = bytes_of(abstract_state(config.update, make_mesh(config)))
    own = sum(own for _, _, own in placements("model_name=llama3-8b", *SHARDED).values())
    assert total / 8 <= own < 1.001 * total / 8


class _Chip(SimpleNamespace):
    __hash__ = object.__hash__


def test_half_of_the_chips_of_each_host_make_a_mesh_though_they_fill_no_box_of_the_torus() -> None:
    """Two slices of 4 x 2 chips, of two hosts with 2 x 2 chips each: the first half of every host
    trains.
    """
    chips = [
        _Chip(
            id=number,
            platform="tpu",
            device_kind="TPU v5p",
            process_index=number // 4,
            slice_index=number // 8,
            core_on_chip=0,
            coords=(number // 4 % 2 * 2 + number % 2, number // 2 % 2, 0),
        )
        for number in range(16)
    ]
    first, last = share_out(cast(list[jax.Device], chips), 8, 4)
    assert [chip.id for chip in first] == [0, 1, 4, 5, 8, 9, 12, 13] and [
        chip.id for chip in last
    ] == [3, 7, 11, 15]
    columns = [chip for chip in first if chip.coords[0] % 2 == 0]
    shape = MeshShape(
        dict.fromkeys(AXES, 1) | {"fsdp": 2}, dict.fromkeys(AXES, 1) | {"data": 2}, num_slices=2
    )
    rows = lay_out(shape, columns).devices.reshape(2, 2)
    assert [[chip.id for chip in row] for row in rows] == [[0, 4], [8, 12]], (
        "data over slices, fsdp within"
    )
