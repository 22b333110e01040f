"""The numbers of experts in a plan."""

from __future__ import annotations

import math

import jax
import pytest

from maxbatch import BatchPlan, load_config
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.mesh import make_mesh
from maxbatch.update.state import abstract_state

KEYS = (
    "model_name=mixtral-8x7b",
    "per_device_batch_size=2",
    "max_target_length=4096",
    "weight_dtype=float32",
)


def numbers(*overrides: str, devices: int = 16) -> dict:
    return BatchPlan.from_config(load_config(overrides=[*KEYS, *overrides]), devices).to_dict()


def test_a_plan_has_the_rows_of_an_expert_group_and_the_bytes_of_its_experts() -> None:
    whole = 4 * 3 * 32 * 8 * 4096 * 14336  # bytes, matrices, layers, experts, D, F
    names = (
        "expert_group_size",
        "experts_per_device",
        "rows_per_expert_group",
        "choices_per_expert",
    )
    expected = {
        (): (1, 8, 2, 2 * 4096 * 2 / 8, 16),
        ("ici_expert_parallelism=4",): (4, 2, 8, 8 * 4096 * 2 / 8, 16),
        ("ici_expert_parallelism=2", "ici_context_parallelism=2"): (2, 4, 8, 8 * 2048 * 2 / 8, 16),
        ("ici_expert_parallelism=2", "ici_tensor_parallelism=2"): (2, 4, 8, 8 * 4096 * 2 / 8, 16),
        ("ici_expert_parallelism=2", "ici_pipeline_parallelism=2"): (2, 4, 4, 4096, 16),
        ("ici_expert_parallelism=2", "ici_data_parallelism=2"): (2, 4, 4, 4096, 8),
    }
    for keys, (*values, shards) in expected.items():
        plan = numbers(*keys)
        assert [plan[name] for name in names] == values, keys
        assert plan["expert_bytes_per_device"] == whole // shards, keys


@pytest.mark.parametrize(
    "keys",
    [
        ("ici_fsdp_parallelism=8",),
        ("ici_fsdp_parallelism=4", "ici_expert_parallelism=2"),
        ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "ici_pipeline_parallelism=2"),
        ("ici_fsdp_parallelism=2", "ici_expert_parallelism=2", "ici_context_parallelism=2"),
        ("ici_fsdp_parallelism=4", "ici_context_parallelism=2"),
        # takes the experts
        ("base_emb_dim=66", "head_dim=16", "ici_fsdp_parallelism=4", "ici_data_parallelism=2"),
        # leaves all whole
        ("base_emb_dim=66", "head_dim=16", "ici_fsdp_parallelism=4", "ici_expert_parallelism=2"),
    ],
)
def test_a_plan_counts_the_bytes_of_experts_that_the_state_of_a_device_has(
    keys: tuple[str, ...],
) -> None:
    config = load_config(overrides=["model_name=tiny-moe", *keys])
    shapes = jax.tree.leaves_with_path(abstract_state(config.update, make_mesh(config)).params)
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for path, leaf in shapes
        if parameter_path(path)[-1].startswith("expert_")
    )
    assert BatchPlan.from_config(config, 8).to_dict()["expert_bytes_per_device"] == held


def test_a_plan_of_a_dense_model_says_nothing_of_experts() -> None:
    assert not any("expert" in name for name in BatchPlan.from_config(load_config(), 8).to_dict())
