"""The whole update: accumulate over micro-batches, reduce once, divide once, clip, step.

Shapes: A micro-batches in the array, M rows in a micro-batch, L tokens in a row. Training uses the
first `num_micro_batches` of the A micro-batches; the number is an argument, so one executable
serves every stage of a ramp that keeps M.

Loss and gradient are weighted means over the global batch (sum of losses over sum of weights), so
the update does not depend on the cut of the batch; a batch without weight changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import ModelOptimizerConfig, UpdateConfig
from maxbatch.data.feed.placement import Batch
from maxbatch.parallel.trees import State
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.balance import (
    Balance,
    BalancedState,
    RoutingMetrics,
    learned,
    with_learned,
)
from maxbatch.update.batch_sums import BatchSums
from maxbatch.update.gradients import NEXT_TOKEN, NoiseParts, Objective, Totals
from maxbatch.update.optimizers import AT_REST, OptimizerMaker, make_optimizer
from maxbatch.update.spikes import judge
from maxbatch.update.state import TrainState


class StepMetrics(NamedTuple):
    """Metrics of one update: scalars on device."""

    loss: jax.Array  # float32, weighted mean over the global batch
    weight: jax.Array  # float32, sum of loss weights
    grad_norm: jax.Array  # float32, global norm of the mean gradient before clipping
    skipped: jax.Array  # bool: gradient or new state were not finite, or a spike; nothing changed
    noise_parts: NoiseParts
    fingerprint: jax.Array  # uint32[4], 16-bit limbs of the sum of row hashes
    tokens: jax.Array  # uint32, tokens of the rows; padding is none
    others: dict[str, jax.Array]  # float32, the objective's other sums
    routing: RoutingMetrics | None  # of a model with experts
    # bool: whether it was skipped as a spike; None where spikes are not skipped
    is_spike: jax.Array | None = None
    # uint32[devices, arrays, 2]: hashes of the new state (`reproducible_sums`)
    hashes: jax.Array | None = None


def make_train_step(
    config: UpdateConfig,
    mesh: Mesh,
    abstract: TrainState,
    arrange: Callable[[Batch], Batch] = lambda micro_batch: micro_batch,
    objective: Objective = NEXT_TOKEN,
    own_optimizer: OptimizerMaker | None = None,
) -> jax.stages.Wrapped:
    """Builds the jitted, donated update of pre-training.

    Args:
      arrange: turns a staged micro-batch into the rows to train on (`Placement.arrange`).
      own_optimizer: makes a user's optimizer; None: the config's.

    Returns:
      `train_step(state, batch, num_micro_batches, settings) -> (state, StepMetrics)`, with `state`
      donated, `num_micro_batches` an int32 scalar, and `settings` (`UpdateSettings`) float32
      scalars.
    """
    sums = BatchSums(config, mesh, arrange, objective)

    def train_step(
        state: TrainState, batch: Batch, num_micro_batches: jax.Array, settings: UpdateSettings
    ) -> tuple[TrainState, StepMetrics]:
        scale = sums.scale(state, batch, num_micro_batches)
        totals = sums.totals(state, batch, num_micro_batches, scale)
        return update(config.optimizer, state, totals, settings, sums.balance, own_optimizer)

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    whole = NamedSharding(mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, None, whole, whole),
        out_shardings=(shardings, whole),
    )


def abstract_settings() -> UpdateSettings:
    settings: UpdateSettings = jax.tree.map(
        lambda _: jax.ShapeDtypeStruct((), jnp.float32), AT_REST
    )
    return settings


def update(
    config: ModelOptimizerConfig,
    state: TrainState,
    totals: Totals,
    settings: UpdateSettings,
    balance: Balance | None = None,
    own_optimizer: OptimizerMaker | None = None,
) -> tuple[TrainState, StepMetrics]:
    """Returns the state after the update and its metrics; skips a non-finite update, one without
    weight, or a spike (`maxbatch.update.spikes`).

    With experts (`balance`), also steps the routers' bias and stores the counts for the next
    update.
    """
    denominator = jnp.where(totals.weight > 0, totals.weight, 1.0)
    norm = optax.tree.norm(jax.tree.map(lambda g: g / denominator, totals.gradient))

    # One division by the weight of the whole batch, after the sum: the cut of the batch is no part
    # of the result.
    def stepped(state: TrainState, gradient_sum: State) -> TrainState:
        params, opt_state = learned(state.params, balance), state.opt_state
        gradient = jax.tree.map(lambda g: g / denominator, learned(gradient_sum, balance))
        if config.gradient_clipping_threshold:
            shrink = jnp.minimum(1.0, config.gradient_clipping_threshold / jnp.maximum(norm, 1e-30))
            gradient = jax.tree.map(lambda g: g * shrink, gradient)
        gradient = optax.tree.cast_like(gradient, params)
        optimizer = make_optimizer(config, settings, balance is not None, own_optimizer)
        before = opt_state.optimizer if balance else opt_state
        updates, opt_state = optimizer.update(gradient, before, params)
        params = with_learned(state.params, optax.apply_updates(params, updates), balance)
        if balance is not None:
            assert totals.routing is not None, "experts have counts"
            opt_state = BalancedState(opt_state, totals.routing.counts_E)
            params = balance.with_bias_stepped(params, totals.routing.counts_E)
        return state._replace(
            params=params,
            opt_state=opt_state,
            average=moved_average(state.average, params, settings),
        )

    # A branch, so that the usual update does not compute the new state twice to check it.
    finite = jnp.isfinite(norm) & jnp.isfinite(totals.loss)
    finite &= jax.lax.cond(
        finite & (own_optimizer is not None or may_overflow(config, settings)),
        lambda *inputs: _all_finite(stepped(*inputs).saved),
        lambda *inputs: jnp.bool_(True),
        state,
        totals.gradient,
    )
    applies = finite & (totals.weight > 0)
    is_spike, window = None, state.spikes
    if window is not None:
        is_spike, window = judge(
            window, totals.loss / denominator, norm, applies, config.skip_step_scaling_factor
        )
        applies &= ~is_spike

    routing = None
    if balance is not None and totals.routing is not None:
        routing = balance.metrics(totals.routing, state.opt_state.last_counts_NxE)

    new = stepped(state, totals.gradient)
    state = jax.tree.map(lambda new, old: jnp.where(applies, new, old), new, state)
    state = state._replace(spikes=window)
    loss = totals.loss / denominator
    noise_parts, fingerprint, others = totals.noise_parts, totals.fingerprint, totals.others
    return state, StepMetrics(
        loss,
        totals.weight,
        norm,
        ~finite if is_spike is None else ~finite | is_spike,
        noise_parts,
        fingerprint,
        totals.tokens,
        others,
        routing,
        is_spike,
    )


def moved_average(average: State | None, params: State, settings: UpdateSettings) -> State | None:
    """Returns the averaged parameters after an update: average x b + parameters x (1 - b), b =
    2^-halvings.
    """
    if average is None:
        return None
    new = -jnp.expm1(-math.log(2) * settings.average_halvings)  # 1 - b without cancellation
    moved: State = jax.tree.map(lambda a, p: a + new * (p.astype(jnp.float32) - a), average, params)
    return moved


def may_overflow(
    config: ModelOptimizerConfig, settings: UpdateSettings, xp: Any = jnp
) -> jax.Array | bool:
    """Returns whether a finite gradient can give a non-finite state, so that the state must be
    checked.

    The gradient's norm is finite, so its values are below 1e20, and with usual settings no
    optimizer's direction reaches 1e32. With rate and decay at most 1, no parameter reaches 1e38 in
    any run.

    Args:
      xp: jax.numpy, or numpy for numbers on the host.
    """
    has_usual_settings = (
        1e-12 <= config.adam_eps <= 1
        and max(config.adam_b1 or 0.0, config.adam_b2 or 0.0) <= 1 - 1e-6
        and config.adam_scaling == "none"
    )
    if not has_usual_settings:
        return True
    decay = (
        settings.adam_weight_decay if config.adam_weight_decay is None else config.adam_weight_decay
    )
    is_usual: jax.Array = settings.learning_rate * xp.clip(decay, 1.0, 1e30) <= 1
    if config.adam_b1 is None or config.adam_b2 is None:  # like usual decays, at most 1 - 1e-6
        is_usual &= xp.minimum(settings.adam_b1_halvings, settings.adam_b2_halvings) >= 1.5e-6
    return ~is_usual


def _all_finite(state: TrainState) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(state)]).all()
