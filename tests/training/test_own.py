"""A user's own model: what of the mesh it can use."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from maxbatch import ConfigError
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.plan.plan_config import PlanConfig
from maxbatch.training.own import task_model
from maxbatch.training.task import TaskModel
from maxbatch.training.update.update_config import UpdateConfig
from tests.helpers.tiny import tiny_config


class OneMatrix(nnx.Module):
    """A model of four parameters."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jnp.zeros((2, 2)))


def model_on(num_devices: int, *overrides: str) -> TaskModel:
    config = tiny_config("ici_fsdp_parallelism=1", *overrides)
    mesh = MeshShape.from_config(PlanConfig.of(config), num_devices)
    return task_model(partial(OneMatrix, config), UpdateConfig.of(config), mesh, "")


def test_a_model_of_the_user_takes_a_pipeline_axis_that_comes_to_one_stage() -> None:
    assert model_on(1, "ici_pipeline_parallelism=-1").flops_per_token == 6 * 4


def test_a_model_of_the_user_is_refused_a_pipeline_whose_stages_follow_from_the_devices() -> None:
    with pytest.raises(ConfigError, match="works: ici_pipeline_parallelism=1"):
        model_on(2, "ici_pipeline_parallelism=-1", "dcn_pipeline_parallelism=-1")
