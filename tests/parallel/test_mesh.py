"""Where every array of a preset lives, and which meshes are refused."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import pytest
from jax.sharding import PartitionSpec as P

from maxbatch import BatchPlan, ConfigError, load_config
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["ici_tensor_parallelism=8"],
            "ici_tensor_parallelism=8: the tensor axis of 8 must divide base_num_query_heads=4; "
            "works: ",
        ),
        (
            ["ici_context_parallelism=4", "max_target_length=30"],
            "ici_context_parallelism=4: the context axis of 4 must divide max_target_length=30; "
            "works: ",
        ),
        (
            ["ici_pipeline_parallelism=8"],
            "ici_pipeline_parallelism=8: the pipeline axis of 8 must divide "
            "base_num_decoder_layers=4; works: ",
        ),
        (
            ["ici_pipeline_parallelism=-1", "ici_fsdp_parallelism=1"],
            "ici_pipeline_parallelism=-1: the pipeline axis of 8 must divide "
            "base_num_decoder_layers=4; works: ",
        ),
        (
            ["dcn_pipeline_parallelism=2", "ici_pipeline_parallelism=4"],
            "ici_pipeline_parallelism=4: the pipeline axis of 8 must divide "
            "base_num_decoder_layers=4; works: ",
        ),
        (
            ["ici_pipeline_parallelism=2", "num_pipeline_repeats=4"],
            "num_pipeline_repeats=4: 2 stages x 4 repeats must divide base_num_decoder_layers=4; "
            "works: ",
        ),
        (
            ["num_pipeline_repeats=2"],
            "num_pipeline_repeats=2: there is no pipeline to repeat with 1 stage; works: ",
        ),
        (
            ["ici_data_parallelism=3"],
            "ici_data_parallelism=3: the ici axes must multiply to the 8 devices; works: ",
        ),
        (
            ["ici_pipeline_parallelism=2", "ici_fsdp_parallelism=8"],
            "ici_fsdp_parallelism=8: the ici axes must multiply to the 8 devices; works: ",
        ),
    ],
)
def test_a_mesh_that_the_model_or_the_devices_do_not_fit_is_refused_with_one_that_works(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_mesh(load_config(overrides=overrides))
    stated, _, works = str(refused.value).partition("works: ")
    assert f"{stated}works: " == message
    make_mesh(load_config(overrides=[*overrides, *works.split()]))


def test_layers_that_the_stages_do_not_divide_are_refused_before_any_device_is_touched() -> None:
    with pytest.raises(
        ConfigError, match="must divide base_num_decoder_layers=126; works: ici_pipeline"
    ) as refused:
        BatchPlan.from_config(
            load_config(overrides=["model_name=llama3-405b", "ici_pipeline_parallelism=8"]), 64
        )
    works = str(refused.value).partition("works: ")[2]
    plan = BatchPlan.from_config(load_config(overrides=["model_name=llama3-405b", works]), 64)
    assert plan.num_pipeline_stages == 2


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
