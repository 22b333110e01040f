"""A user's own model on meshes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch import ConfigError
from maxbatch.model.decoder import Decoder
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.run.own import Rows, next_token_loss, objective_of, task_model
from maxbatch.run.task import TaskModel
from maxbatch.update.gradients import NEXT_TOKEN
from tests.helpers.tiny import some_rows, tiny_config


class OneMatrix(nnx.Module):
    """A model of four parameters."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jnp.zeros((2, 2)))


def model_on(num_devices: int, *overrides: str) -> TaskModel:
    config = tiny_config("ici_fsdp_parallelism=1", *overrides)
    mesh = MeshShape.from_config(config.plan, num_devices)
    return task_model(partial(OneMatrix, config), config.update, mesh)


def test_a_model_of_the_user_takes_a_pipeline_axis_that_comes_to_one_stage() -> None:
    assert model_on(1, "ici_pipeline_parallelism=-1").flops_per_token == 6 * 4


def test_a_model_of_the_user_is_refused_a_pipeline_whose_stages_follow_from_the_devices() -> None:
    with pytest.raises(ConfigError, match="works: ici_pipeline_parallelism=1"):
        model_on(2, "ici_pipeline_parallelism=-1", "dcn_pipeline_parallelism=-1")


def test_a_loss_of_the_user_is_refused_terms_that_are_added_to_the_configs_own() -> None:
    experts = (
        "decoder_block=mixtral",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
    )
    for term in ("load_balance_loss_weight", "router_z_loss_weight"):
        keys = tiny_config(*experts, f"{term}=0.1").model
        with pytest.raises(ConfigError, match=f"{term}=0.1: .*own loss only; works: {term}=0"):
            objective_of(next_token_loss, None, keys)


def test_a_loss_of_the_user_over_the_configs_experts_counts_where_their_tokens_go() -> None:
    config = tiny_config(
        "decoder_block=mixtral",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
        "base_num_decoder_layers=1",
        "base_moe_mlp_dim=16",
    )
    model = Decoder(config.decoder, rngs=nnx.Rngs(params=0))
    rows = Rows(*(jnp.asarray(array) for array in some_rows(2).values()))

    @nnx.jit
    def sums(model: Decoder, rows: Rows) -> tuple[Any, Any]:
        return NEXT_TOKEN.sums(model, rows, 1), objective_of(
            next_token_loss, None, config.model
        ).sums(model, rows, 1)

    (loss, weight, _, routing), (own_loss, own_weight, _, own_routing) = sums(model, rows)
    assert float(own_loss) == pytest.approx(float(loss), rel=1e-5) and float(own_weight) == float(
        weight
    )
    jax.tree.map(np.testing.assert_array_equal, own_routing, routing)
    assert int(routing.counts_E.sum()) == 2 * int(jnp.sum(rows.segments != 0))
