"""The meshes that `fit --mesh auto` tries."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from maxbatch import load_config
from maxbatch.around.fit.meshes import mesh_text, proposals
from maxbatch.plan.mesh_shape import MeshShape, check_model_fits

LLAMA2_7B = "model_name=llama2-7b"


def meshes(
    *stated: str, devices: int = 64, slices: int = 1, fixed: Collection[str] | None = None
) -> list[str]:
    """Returns the keys of every proposal, each of them a mesh that the devices and the model
    accept.
    """
    config = load_config(overrides=[LLAMA2_7B, *stated])
    names = [word.partition("=")[0] for word in stated] if fixed is None else fixed
    found = []
    for axes in proposals(config, names, devices, slices):
        one = load_config(
            overrides=[LLAMA2_7B, *stated, *(f"{key}={size}" for key, size in axes.items())]
        )
        shape = MeshShape.from_config(one.plan, devices, slices)
        check_model_fits(one.plan, shape)
        assert shape.num_devices == devices
        found.append(mesh_text(shape, config))
    assert len(found) == len(set(found))
    return [text.replace("ici_", "").replace("_parallelism", "") for text in found]


def test_weights_over_all_devices_come_first_then_tensor_and_data() -> None:
    assert meshes() == [
        "fsdp=64",
        "fsdp=32 tensor=2",
        "data=2 fsdp=32",
        "fsdp=16 tensor=4",
        "fsdp=8 tensor=8",
        "data=64 fsdp=1",
    ]


def test_heads_and_mlp_must_divide_by_the_tensor_axis() -> None:
    assert "fsdp=32 tensor=2" in meshes("base_num_query_heads=30", "base_num_kv_heads=6")
    assert not any(
        "tensor=4" in mesh for mesh in meshes("base_num_query_heads=30", "base_num_kv_heads=6")
    )
    assert not any("tensor" in mesh for mesh in meshes("base_mlp_dim=11007"))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (
            ("ici_tensor_parallelism=2",),
            ["fsdp=32 tensor=2", "data=2 fsdp=16 tensor=2", "data=32 fsdp=1 tensor=2"],
        ),
        (
            ("ici_fsdp_parallelism=16",),
            ["data=4 fsdp=16", "data=2 fsdp=16 tensor=2", "fsdp=16 tensor=4"],
        ),
        (("ici_fsdp_parallelism=16", "ici_data_parallelism=1"), ["fsdp=16 tensor=4"]),
        (
            ("ici_fsdp_parallelism=-1", "ici_tensor_parallelism=1", "ici_data_parallelism=1"),
            ["fsdp=64"],
        ),
        (("ici_fsdp_parallelism=64",), ["fsdp=64"]),
        (
            ("ici_context_parallelism=2", "ici_tensor_parallelism=1", "ici_data_parallelism=1"),
            ["fsdp=32 context=2"],
        ),
    ],
)
def test_what_the_user_states_stays(stated: tuple[str, ...], expected: list[str]) -> None:
    assert meshes(*stated) == expected


LONG = ("context_parallel_strategy=ring", "max_target_length=65536")


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (
            LONG,
            [
                "fsdp=64",
                "fsdp=32 context=2",
                "fsdp=16 context=4",
                "fsdp=8 context=8",
                "fsdp=32 tensor=2",
                "fsdp=16 tensor=2 context=2",
                "fsdp=8 tensor=2 context=4",
                "data=2 fsdp=32",
                "fsdp=16 tensor=4",
                "fsdp=8 tensor=4 context=2",
                "fsdp=8 tensor=8",
                "data=64 fsdp=1",
            ],
        ),
        (
            (*LONG, "ici_fsdp_parallelism=8", "ici_data_parallelism=1"),
            [
                "fsdp=8 tensor=8",
                "fsdp=8 tensor=4 context=2",
                "fsdp=8 tensor=2 context=4",
                "fsdp=8 context=8",
            ],
        ),
        (
            ("ici_context_parallelism=-1", "ici_fsdp_parallelism=4", "ici_tensor_parallelism=1"),
            [
                "data=16 fsdp=4 context=1",
                "data=8 fsdp=4 context=2",
                "data=4 fsdp=4 context=4",
                "data=2 fsdp=4 context=8",
            ],
        ),
        ((*LONG, "ici_context_parallelism=8", "ici_tensor_parallelism=1"), ["fsdp=8 context=8"]),
    ],
    ids=["a strategy", "the other axes are stated", "an axis of -1", "an axis that is stated"],
)
def test_a_stated_strategy_for_long_rows_frees_the_context_axis(
    stated: tuple[str, ...], expected: list[str]
) -> None:
    assert meshes(*stated)[: len(expected)] == expected


def test_over_slices_it_is_the_data_axis_unless_another_is_stated() -> None:
    assert meshes(devices=128, slices=2)[:2] == [
        "fsdp=64 dcn_data=2",
        "fsdp=32 tensor=2 dcn_data=2",
    ]
    stated = meshes("dcn_fsdp_parallelism=2", devices=128, slices=2)
    assert stated[0] == "fsdp=64 dcn_fsdp=2" and not any("dcn_data" in mesh for mesh in stated)


def test_one_device_has_one_mesh() -> None:
    assert meshes(devices=1) == ["fsdp=1"]


@pytest.mark.parametrize(
    ("model", "most"),
    [
        (
            "decoder_block=gemma4_small attention_type=local_sliding,global sliding_window_size=4 "
            "global_num_kv_heads=2",
            2,
        ),
        (
            "decoder_block=qwen3_next inhomogeneous_layer_cycle_interval=2 num_experts=8 "
            "num_experts_per_tok=2 gdn_num_key_heads=4 gdn_num_value_heads=16 "
            "partial_rotary_factor=0.5",
            4,
        ),
        (
            "decoder_block=llama4 num_experts=8 routed_score_func=sigmoid "
            "interleave_moe_layer_step=2 base_mlp_dim=6",
            2,
        ),
    ],
)
def test_heads_and_mlps_of_every_form_must_divide_by_the_tensor_axis(model: str, most: int) -> None:
    """Heads of global layers, keys of a gated delta rule, and MLPs between layers of experts."""
    sizes = (
        "base_num_query_heads=16",
        "base_num_kv_heads=16",
        "head_dim=8",
        "base_num_decoder_layers=2",
    )
    config = load_config(overrides=[*sizes, *model.split()])
    assert (
        max(int(str(axes["ici_tensor_parallelism"])) for axes in proposals(config, (), 64, 1))
        == most
    )


def test_attention_over_latents_has_no_key_value_heads_that_the_tensor_axis_must_divide() -> None:
    deepseek = load_config(overrides=["model_name=deepseek3-671b", "base_num_kv_heads=1"])
    assert {2, 4, 8} <= {axes["ici_tensor_parallelism"] for axes in proposals(deepseek, (), 64, 1)}
