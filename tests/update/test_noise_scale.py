"""The gradient noise scale from parts of a batch equals the one from per-example gradients."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx

from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.data.stream.stream import open_stream
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.noise_scale import NoiseScale
from maxbatch.update.state import abstract_model, abstract_state, init_state
from maxbatch.update.step import make_train_step
from tests.helpers.tiny import LENGTH, MEASURED, loss_sums, one_layer_config

ROWS = 256


@cache
def exact_noise_scale() -> float:
    """tr(covariance of the examples' gradients) / |mean gradient|^2, over all rows there are."""
    config = one_layer_config()
    graphdef, _ = abstract_model(config.decoder)
    params = init_state(
        config.update, abstract_state(config.update, make_mesh(config, jax.devices()[:1]))
    ).params
    rows = open_stream(config).read(0, ROWS)

    def loss(
        params: nnx.State, tokens: jax.Array, segments: jax.Array, weights: jax.Array
    ) -> jax.Array:
        one = (x[None] for x in (tokens, segments, weights))
        return loss_sums(nnx.merge(graphdef, params), *one)[0] / weights.sum()

    per_example = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0, 0)))
    gradients = per_example(params, rows["tokens"], rows["segments"], rows["weights"])
    flat = np.concatenate(
        [np.asarray(g).reshape(ROWS, -1) for g in jax.tree.leaves(gradients)], axis=1
    )
    mean = flat.mean(axis=0)
    return float(((flat - mean) ** 2).sum(axis=1).mean() / (mean**2).sum())


@pytest.mark.runs
@pytest.mark.parametrize(
    ("overrides", "num_devices", "shape"),
    [
        ((), 1, BatchShape(4, 8)),  # eight micro-batches
        (("ici_data_parallelism=4",), 4, BatchShape(32, 1)),  # one micro-batch over four replicas
        (("ici_data_parallelism=2",), 4, BatchShape(16, 2)),  # both
    ],
)
def test_it_is_that_of_per_example_gradients(
    overrides: tuple[str, ...], num_devices: int, shape: BatchShape
) -> None:
    config = one_layer_config(MEASURED, *overrides)
    mesh = make_mesh(config, jax.devices()[:num_devices])
    abstract = abstract_state(config.update, mesh)
    step, state = (
        make_train_step(config.update, mesh, abstract),
        init_state(config.update, abstract),
    )
    placement, stream = Placement(batch_sharding(mesh), LENGTH), open_stream(config)
    measured = NoiseScale()
    rng = np.random.default_rng(0)
    for _ in range(100):
        rows = stream.batch(rng.integers(0, ROWS, 32))
        batch = placement.stage(rows, 32, shape)
        scalars = (np.int32(shape.max_micro_batches), UpdateSettings(np.float32(0)))
        state, metrics = step(state, batch, *scalars)  # at rate 0 the parameters stay
        measured = measured.after(
            float(metrics.grad_norm),
            float(metrics.weight),
            32,
            *(float(figure) for figure in metrics.noise_parts),
        )
    assert measured.samples == pytest.approx(exact_noise_scale(), rel=0.1)


@pytest.mark.parametrize("num_measured", [1, 3, 4])
def test_the_estimate_is_exact_where_the_moments_are(num_measured: int) -> None:
    """Parts of one weight, some of four: E|g|^2 = w^2 G + w V and E|sum g|^2 = W^2 G + W V, in
    numbers.
    """
    square, variance, weight = 3.0, 50.0, 10.0
    part = weight**2 * square + weight * variance
    whole = (4 * weight) ** 2 * square + 4 * weight * variance
    parts = (num_measured * part, num_measured * weight, num_measured * weight**2)
    noise = NoiseScale().after(whole**0.5 / (4 * weight), 4 * weight, 8, *parts)
    assert noise.samples == pytest.approx(variance / square * 8 / (4 * weight))


@pytest.mark.parametrize(
    "update",
    [
        (1.0, 10.0, 4, 0.0, 0.0, 0.0),  # not measured
        (1.0, 10.0, 4, 100.0, 10.0, 100.0),  # one part
        (float("nan"), 10.0, 4, 50.0, 10.0, 25.0),
        (1.0, 10.0, 4, float("inf"), 10.0, 25.0),
    ],
)
def test_an_update_that_says_nothing_changes_nothing(
    update: tuple[float, float, int, float, float, float],
) -> None:
    before = NoiseScale(2.0, 1.0, 0.5)
    assert before.after(*update) == before
    assert NoiseScale().after(*update).samples is None


def test_a_negative_average_gives_no_estimate() -> None:
    assert NoiseScale(2.0, -1.0, 0.5).samples is None and NoiseScale(-2.0, 1.0, 0.5).samples is None
