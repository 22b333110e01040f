"""The held-out loss is exact: weighted by token, its own batch size, nothing dropped."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from maxbatch.config.config import Config
from maxbatch.data.feed.placement import Placement
from maxbatch.data.stream.stream import open_stream
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.run.compile.background import Background
from maxbatch.run.evaluation import EvalResult, Evaluator
from maxbatch.update.state import abstract_model, abstract_state, init_state
from tests.helpers.tiny import tiny_config

CONFIG = tiny_config("eval_fraction=0.05", "enable_data_shuffling=false")  # 25 rows


def plain_loss() -> float:
    """The mean over all held-out tokens, in one batch and with the logits in full."""
    stream = open_stream(CONFIG, split="eval")
    rows = stream.read(0, stream.samples_per_epoch)
    graphdef, _ = abstract_model(CONFIG.decoder)
    params = init_state(
        CONFIG.update, abstract_state(CONFIG.update, make_mesh(CONFIG, jax.devices()[:1]))
    ).params
    decoder = nnx.merge(graphdef, params)
    logits = decoder.hidden(rows["tokens"], rows["segments"]).x_MxLxD @ decoder.output_projection()
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], rows["tokens"][:, 1:])
    weights = rows["weights"][:, 1:]
    return float((losses * weights).sum() / weights.sum())


def evaluated(config: Config, batch_size: int, num_devices: int = 1) -> EvalResult:
    """The held-out loss of the first parameters, in batches of a size."""
    mesh = make_mesh(config, jax.devices()[:num_devices])
    params = init_state(config.update, abstract_state(config.update, mesh)).params
    placement = Placement(batch_sharding(mesh), config.max_target_length)
    held_out = open_stream(config, split="eval")
    evaluator = Evaluator(config.update, config.evaluation, placement, held_out, 25, batch_size)
    with Background() as background:
        evaluator.compile(params, background)
        return evaluator(params)


@pytest.mark.runs
@pytest.mark.parametrize(("num_devices", "batch_size"), [(1, 25), (1, 4), (4, 8), (8, 24)])
def test_the_loss_does_not_depend_on_devices_or_on_the_eval_batch(
    num_devices: int, batch_size: int
) -> None:
    result = evaluated(CONFIG, batch_size, num_devices)
    assert result.num_rows == 25
    np.testing.assert_allclose(result.loss, plain_loss(), rtol=1e-5)


def test_eval_steps_bounds_the_batches() -> None:
    assert evaluated(tiny_config("eval_fraction=0.05", "eval_steps=2"), 4).num_rows == 8


def test_eval_samples_bounds_the_rows_on_every_batch() -> None:
    results = [
        evaluated(tiny_config("eval_fraction=0.05", "eval_samples=7"), size) for size in (2, 4)
    ]
    assert [result.num_rows for result in results] == [7, 7]
    np.testing.assert_allclose(results[0].loss, results[1].loss, rtol=1e-5)
