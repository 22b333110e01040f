"""The whole update: accumulate over micro-batches, reduce once, divide once, clip, step.

Shapes: A micro-batches in the array, M rows in a micro-batch, L tokens in a row. Of the A micro-batches the first
`num_micro_batches` are trained on; the number is an argument, so one executable serves every stage of a ramp that
keeps M.

Loss and gradient are the token-weighted mean over the global batch (sum of losses over sum of weights), so the
update does not depend on how the batch is cut; a batch without weight changes nothing. `optax.MultiSteps`
accumulates sums and never emits: its state lives inside one call, where a NaN cannot outlive it and a checkpoint
cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from maxbatch.data.fingerprint import carry, limb_sums, row_hashes
from maxbatch.data.placement import Batch
from maxbatch.model.loss import loss_sums
from maxbatch.parallel.pipeline import make_pipeline
from maxbatch.parallel.sharding import activation_constraint, parameter_shardings
from maxbatch.training.optimizers import make_optimizer
from maxbatch.training.state import TrainState, abstract_model, with_layers


class Parts(NamedTuple):
    """What the gradient noise scale needs of the first micro-batch, whose parts are its shards of the data axis.

    One micro-batch is enough for an unbiased estimate, and reading all their gradients once more would cost a
    measurable share of an update.
    """

    gradient_squares: (
        jax.Array
    )  # float32, sum over the parts of the squared norm of the part's summed gradient
    weights: jax.Array  # float32, sum over the parts of the loss weight; 0 where the batch is one part only
    weight_squares: jax.Array  # float32, sum over the parts of its square


class StepMetrics(NamedTuple):
    """Scalars of one update, on device: what was trained on and what came of it."""

    loss: jax.Array  # float32, weighted mean over the global batch
    weight: jax.Array  # float32, sum of loss weights
    grad_norm: jax.Array  # float32, global norm of the mean gradient before clipping
    skipped: jax.Array  # bool, the gradient was not finite and the state stayed as it was
    parts: Parts
    fingerprint: jax.Array  # uint32[4], 16-bit limbs of the sum of row hashes


def make_train_step(
    config: ConfigDict,
    mesh: Mesh,
    abstract: TrainState,
    arrange: Callable[[Batch], Batch] = lambda micro_batch: micro_batch,
) -> Any:
    """Builds the jitted, donated update.

    Args:
      config: the run's config.
      mesh: the device mesh.
      abstract: shapes and shardings of the state.
      arrange: what turns a staged micro-batch into the rows to train on (`Placement.arrange`).

    Returns:
      `train_step(state, batch, num_micro_batches, learning_rate, batch_ratio) -> (state, StepMetrics)`, with
      `state` donated, `num_micro_batches` an int32 scalar, `learning_rate` and `batch_ratio` (of the batch to the
      reference batch, for `adam_scaling=sde`) float32 scalars.
    """
    pipeline = make_pipeline(config, mesh, ("fsdp",))
    # Outside of the pipeline its devices share the rows of the embedding and of the loss.
    row_axes = ("fsdp", "pipeline")
    graphdef, params_shape = abstract_model(config, activation_constraint(mesh, row_axes), pipeline)
    row_shards = math.prod(mesh.shape[axis] for axis in row_axes)
    data_shards = mesh.shape["data"]
    partial_sharding = jax.tree.map(
        lambda s: NamedSharding(mesh, P("data", *s.spec)), parameter_shardings(params_shape, mesh)
    )

    def loss_fn(params: nnx.State, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return loss_sums(nnx.merge(graphdef, params), *batch, batch_shards=row_shards)

    # Per data shard one partial gradient, so that the sum over the data axis can wait for the last micro-batch.
    partial_gradients = jax.vmap(
        jax.value_and_grad(loss_fn, has_aux=True), in_axes=(None, 0), spmd_axis_name="data"
    )

    add_fingerprints = jax.vmap(
        lambda limbs, rows: carry(jnp, limbs + limb_sums(jnp, row_hashes(jnp, *rows))), spmd_axis_name="data"
    )

    def measured(gradients: nnx.State, weight_d: jax.Array) -> Parts:
        squares = [
            jnp.sum(jnp.square(g.astype(jnp.float32)), range(1, g.ndim)) for g in jax.tree.leaves(gradients)
        ]
        return Parts(jnp.stack(squares).sum(axis=0), weight_d, jnp.square(weight_d))

    def accumulate(params: nnx.State, batch: Batch, num_micro_batches: jax.Array) -> Any:
        accumulator = optax.MultiSteps(
            optax.identity(), every_k_schedule=lambda _: num_micro_batches + 1, use_grad_mean=False
        )

        def add_micro_batch(j: jax.Array, carried: Any) -> Any:
            accumulated, losses, weights, parts, fingerprints = carried
            micro = arrange(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), batch))
            shards = jax.tree.map(lambda x: x.reshape(data_shards, -1, x.shape[-1]), micro)
            (loss, weight), gradients = partial_gradients(params, shards)
            if measures_noise:
                parts = jax.lax.cond(j == 0, measured, lambda *_: parts, gradients, weight)
            with jax.numpy_dtype_promotion("standard"):  # MultiSteps mixes its counters into float32
                _, accumulated = accumulator.update(gradients, accumulated)
            fingerprints = add_fingerprints(fingerprints, shards)
            return accumulated, losses + loss, weights + weight, parts, fingerprints

        zeros = jax.tree.map(lambda p: jnp.zeros((data_shards, *p.shape), p.dtype), params)
        zeros = jax.lax.with_sharding_constraint(zeros, partial_sharding)
        nothing = jnp.zeros(data_shards, jnp.float32)
        limbs = jnp.zeros((data_shards, 4), jnp.uint32)
        start = (accumulator.init(zeros), nothing, nothing, Parts(nothing, nothing, nothing), limbs)
        max_micro_batches = jax.tree.leaves(batch)[0].shape[0]
        measures_noise = config.gradient_noise_scale and max_micro_batches * data_shards > 1
        if max_micro_batches == 1:  # room for one: without a loop the accumulator costs nothing
            accumulated, *sums = add_micro_batch(jnp.int32(0), start)
        else:
            accumulated, *sums = jax.lax.fori_loop(0, num_micro_batches, add_micro_batch, start)
        gradients, losses, weights, parts, fingerprints = jax.tree.map(
            lambda x: x.sum(axis=0), (accumulated.acc_grads, *sums)
        )
        return gradients, losses, weights, parts, carry(jnp, fingerprints)

    def train_step(
        state: TrainState,
        batch: Batch,
        num_micro_batches: jax.Array,
        learning_rate: jax.Array,
        batch_ratio: jax.Array,
    ) -> tuple[TrainState, StepMetrics]:
        params = with_layers(state.params, pipeline.stage_order) if pipeline else state.params
        gradient_sum, loss_sum, weight, parts, fingerprint = accumulate(params, batch, num_micro_batches)
        if pipeline:
            gradient_sum = with_layers(gradient_sum, pipeline.layer_order)
        denominator = jnp.where(weight > 0, weight, 1.0)
        gradient = jax.tree.map(lambda g: g / denominator, gradient_sum)
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss_sum)

        if config.gradient_clipping_threshold:
            shrink = jnp.minimum(1.0, config.gradient_clipping_threshold / jnp.maximum(norm, 1e-30))
            gradient = jax.tree.map(lambda g: g * shrink, gradient)
        gradient = optax.tree.cast_like(gradient, state.params)
        optimizer = make_optimizer(config, learning_rate, batch_ratio)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        stepped = TrainState(optax.apply_updates(state.params, updates), opt_state)
        applies = finite & (weight > 0)
        state = jax.tree.map(lambda new, old: jnp.where(applies, new, old), stepped, state)
        return state, StepMetrics(loss_sum / denominator, weight, norm, ~finite, parts, fingerprint)

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    whole = NamedSharding(mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, None, whole, whole, whole),
        out_shardings=(shardings, whole),
    )
