"""The whole update: accumulate over micro-batches, reduce once, divide once, clip, step.

Shapes: A micro-batches in the array, M rows in a micro-batch, L tokens in a row, d shards of the data axis. Of the A
micro-batches the first `num_micro_batches` are trained on; the number is an argument, so one executable serves every
stage of a ramp that keeps M.

Loss and gradient are the weighted mean over the global batch (sum of losses over sum of weights), so the update does
not depend on how the batch is cut; a batch without weight changes nothing. `optax.MultiSteps` accumulates sums and
never emits: its state lives inside one update, where a NaN cannot outlive it and a checkpoint cannot see it. The
gradients of layers that run in a loop are added up by their backward pass itself (`SummingLayers`).
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

from maxbatch.data.feed.placement import Batch
from maxbatch.data.stream.fingerprint import carry, limb_sums, row_hashes
from maxbatch.model.decoder import Decoder
from maxbatch.model.loss import loss_sums
from maxbatch.parallel.pipeline import make_pipeline
from maxbatch.parallel.sharding import activation_constraint, parameter_shardings
from maxbatch.training.layer_gradients import SummingLayers
from maxbatch.training.optimizers import make_optimizer
from maxbatch.training.state import TrainState, abstract_model, with_layers

_NEVER = 2**31 - 1  # micro-batches after which the accumulator would emit


class Objective(NamedTuple):
    """What is trained for.

    Attributes:
      sums: `(decoder, rows, batch_shards) -> (loss_sum, weight_sum, other_sums)` of a micro-batch: float32 scalars,
        the others by name. Rows are a NamedTuple of [M, L] arrays, of which the first three are those of `Batch`.
      others: names of the other sums.
    """

    sums: Callable[[Decoder, Any, int], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]
    others: tuple[str, ...] = ()


def _next_token(decoder: Decoder, rows: Batch, batch_shards: int) -> Any:
    return *loss_sums(decoder, *rows, batch_shards=batch_shards), {}


NEXT_TOKEN = Objective(_next_token)  # pre-training: the cross-entropy of each token


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


class Sums(NamedTuple):
    """What the micro-batches of an update add up to so far, a row for each shard of the data axis."""

    accumulator: Any  # `optax.MultiSteps`' state, whose `acc_grads` are the gradients of the summed losses
    layers: nnx.State  # those of the layers, float32, where their backward pass adds them up; else empty
    losses_d: jax.Array
    weights_d: jax.Array
    others_d: dict[str, jax.Array]
    parts_d: Parts
    fingerprints_dx4: jax.Array


class StepMetrics(NamedTuple):
    """Scalars of one update, on device: what was trained on and what came of it."""

    loss: jax.Array  # float32, weighted mean over the global batch
    weight: jax.Array  # float32, sum of loss weights
    grad_norm: jax.Array  # float32, global norm of the mean gradient before clipping
    skipped: jax.Array  # bool, the gradient was not finite and the state stayed as it was
    parts: Parts
    fingerprint: jax.Array  # uint32[4], 16-bit limbs of the sum of row hashes
    others: dict[str, jax.Array]  # float32, the objective's other sums


class Update:
    """The update in its parts: start from nothing, add micro-batches, step. Traced inside of a program.

    Args:
      config: the run's config.
      mesh: the device mesh.
      objective: what is trained for.
    """

    def __init__(self, config: ConfigDict, mesh: Mesh, objective: Objective = NEXT_TOKEN) -> None:
        self._config, self._mesh, self._objective = config, mesh, objective
        self._pipeline = make_pipeline(config, mesh, ("fsdp",))
        # Outside of the pipeline its devices share the rows of the embedding and of the loss.
        row_axes = ("fsdp", "pipeline")
        constrain = activation_constraint(mesh, row_axes)
        _, params_shape = abstract_model(config, constrain, self._pipeline)  # refuses a stated attention here
        self._sums_layers = config.scan_layers and self._pipeline is None
        row_shards = math.prod(mesh.shape[axis] for axis in row_axes)
        self.data_shards = mesh.shape["data"]
        self._partial_sharding = jax.tree.map(
            lambda s: NamedSharding(mesh, P("data", *s.spec)), parameter_shardings(params_shape, mesh)
        )
        self._accumulator = optax.MultiSteps(
            optax.identity(), every_k_schedule=lambda _: jnp.int32(_NEVER), use_grad_mean=False
        )

        def loss_fn(
            params: nnx.State, layer_sums: nnx.State, layers: nnx.State, rows: Any
        ) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
            summing = (
                SummingLayers(layer_sums["layers"], config.remat_policy, constrain) if layer_sums else None
            )
            graphdef, _ = abstract_model(config, constrain, summing or self._pipeline)
            decoder = nnx.merge(graphdef, nnx.merge_state(params, layers))
            loss, weight, others = objective.sums(decoder, rows, row_shards)
            return loss, (weight, others)

        # Per data shard one partial gradient, so that the sum over the data axis can wait for the last micro-batch.
        self._partial_gradients = jax.vmap(
            jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True),
            in_axes=(None, 0, None, 0),
            spmd_axis_name="data",
        )
        self._add_fingerprints = jax.vmap(
            lambda limbs, rows: carry(jnp, limbs + limb_sums(jnp, row_hashes(jnp, *rows))),
            spmd_axis_name="data",
        )

    def staged(self, params: nnx.State) -> nnx.State:
        """The parameters in the order in which the model's layers run, for `start` and `add`."""
        return with_layers(params, self._pipeline.stage_order) if self._pipeline else params

    def start(self, params: nnx.State, sums_layers: bool = True) -> Sums:
        """The sums of no micro-batch.

        Args:
          params: `staged` parameters.
          sums_layers: add the gradients of the layers up in their backward pass, where they run in a loop.
        """
        shards = self.data_shards
        zeros = jax.tree.map(lambda p: jnp.zeros((shards, *p.shape), p.dtype), params)
        zeros = jax.lax.with_sharding_constraint(zeros, self._partial_sharding)
        nothing = jnp.zeros(shards, jnp.float32)
        others = dict.fromkeys(self._objective.others, nothing)
        parts = Parts(nothing, nothing, nothing)
        limbs = jnp.zeros((shards, 4), jnp.uint32)
        layers, rest = self._apart(zeros, sums_layers and self._sums_layers)
        layers = jax.tree.map(lambda x: x.astype(jnp.float32), layers)
        return Sums(self._accumulator.init(rest), layers, nothing, nothing, others, parts, limbs)

    def _apart(self, params: nnx.State, sums_layers: bool) -> tuple[nnx.State, nnx.State]:
        """The parameters of the layers, if their gradients are added up in their backward pass, and the rest."""
        if not sums_layers:
            return nnx.State({}), params
        return nnx.split_state(params, nnx.PathContains("layers"), ...)

    def add(self, params: nnx.State, sums: Sums, rows: Any, measures_noise: jax.Array | bool) -> Sums:
        """The sums with one more micro-batch.

        Args:
          params: `staged` parameters.
          sums: so far.
          rows: [M, L] arrays, as the objective takes them.
          measures_noise: whether to take the noise scale's parts from it: of an update the first micro-batch.
        """
        shards = jax.tree.map(lambda x: x.reshape(self.data_shards, -1, x.shape[-1]), rows)
        of_layers, rest = self._apart(params, bool(sums.layers))
        (loss_d, (weight_d, others_d)), (gradients, layers) = self._partial_gradients(
            rest, sums.layers, of_layers, shards
        )
        with jax.numpy_dtype_promotion("standard"):  # MultiSteps mixes its counters into float32
            _, accumulator = self._accumulator.update(gradients, sums.accumulator)
        parts = sums.parts_d
        if measures_noise is not False:  # of the first micro-batch, whose gradients the sums are
            first = (accumulator.acc_grads, layers)
            parts = jax.lax.cond(measures_noise, _measured, lambda *_: sums.parts_d, first, weight_d)
        return Sums(
            accumulator,
            layers,
            sums.losses_d + loss_d,
            sums.weights_d + weight_d,
            jax.tree.map(jnp.add, sums.others_d, others_d),
            parts,
            self._add_fingerprints(sums.fingerprints_dx4, tuple(shards)[:3]),
        )

    def step(
        self, state: TrainState, sums: Sums, learning_rate: jax.Array, batch_ratio: jax.Array
    ) -> tuple[TrainState, StepMetrics]:
        """The state after the update, and its metrics; not finite or without weight, it changes nothing."""
        config = self._config
        gradient_sum, loss_sum, weight, others, parts, fingerprint = jax.tree.map(
            lambda x: x.sum(axis=0),
            (nnx.merge_state(sums.accumulator.acc_grads, sums.layers), *sums[2:]),
        )
        fingerprint = carry(jnp, fingerprint)
        if self._pipeline:
            gradient_sum = with_layers(gradient_sum, self._pipeline.layer_order)
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
        return state, StepMetrics(loss_sum / denominator, weight, norm, ~finite, parts, fingerprint, others)


def _measured(gradients: Any, weight_d: jax.Array) -> Parts:
    squares = [
        jnp.sum(jnp.square(g.astype(jnp.float32)), range(1, g.ndim)) for g in jax.tree.leaves(gradients)
    ]
    return Parts(jnp.stack(squares).sum(axis=0), weight_d, jnp.square(weight_d))


def make_train_step(
    config: ConfigDict,
    mesh: Mesh,
    abstract: TrainState,
    arrange: Callable[[Batch], Batch] = lambda micro_batch: micro_batch,
) -> Any:
    """Builds the jitted, donated update of pre-training.

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
    update = Update(config, mesh)

    def train_step(
        state: TrainState,
        batch: Batch,
        num_micro_batches: jax.Array,
        learning_rate: jax.Array,
        batch_ratio: jax.Array,
    ) -> tuple[TrainState, StepMetrics]:
        params = update.staged(state.params)
        max_micro_batches = jax.tree.leaves(batch)[0].shape[0]
        measures_noise = config.gradient_noise_scale and max_micro_batches * update.data_shards > 1

        def add_micro_batch(j: jax.Array, sums: Sums) -> Sums:
            micro = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), batch)
            return update.add(params, sums, arrange(micro), (j == 0) if measures_noise else False)

        sums = update.start(params, sums_layers=max_micro_batches > 1)
        if max_micro_batches == 1:  # room for one: without a loop the accumulator costs nothing
            sums = add_micro_batch(jnp.int32(0), sums)
        else:
            sums = jax.lax.fori_loop(0, num_micro_batches, add_micro_batch, sums)
        return update.step(state, sums, learning_rate, batch_ratio)

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    whole = NamedSharding(mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, None, whole, whole, whole),
        out_shardings=(shardings, whole),
    )
