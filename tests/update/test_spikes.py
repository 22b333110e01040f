"""An update whose loss or gradient norm is far above those before it is skipped, and nothing else
is.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxbatch.config.combined import ModelOptimizerConfig
from maxbatch.data.feed.placement import BatchShape
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.run.folder.position import Spikes
from maxbatch.run.programs import Programs, checked_mesh_shape
from maxbatch.update.gradients import NEXT_TOKEN, Totals
from maxbatch.update.optimizers import AT_REST, make_optimizer
from maxbatch.update.spikes import abstract_window
from maxbatch.update.state import TrainState, with_spike_window
from maxbatch.update.step import update
from tests.helpers.tiny import one_layer_config

ON = ("skip_step_on_spikes=true", "opt_type=adamw", "mu_dtype=float32")


def spikes_of(
    losses: np.ndarray, norms: np.ndarray, weights: np.ndarray, interval: int, factor: float
) -> list[bool]:
    """The rule in words of numpy: which updates are skipped as spikes."""
    kept: deque[tuple[float, float]] = deque(maxlen=interval)
    skipped = []
    for loss, norm, weight in zip(losses, norms, weights, strict=True):
        is_judged = np.isfinite(loss) and np.isfinite(norm) and weight > 0
        is_spike = False
        if is_judged and len(kept) >= max(2, interval // 2):
            before = np.array(kept, np.float64)
            above = np.array([loss, norm], np.float64) - before.mean(axis=0)
            is_spike = bool((above > factor * before.std(axis=0, ddof=1)).any())
        if is_judged:
            kept.append((float(loss), float(norm)))
        skipped.append(is_spike)
    return skipped


def some_figures(num_updates: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses and norms that drift, jump to other levels for good, spike alone, stand still, and are
    not finite or without weight now and then.
    """
    rng = np.random.default_rng(seed)
    drift = 3 + np.cumsum(rng.normal(0, 1e-3, num_updates))
    level = np.repeat(rng.choice([0, 0.5, 4, -2, 1e4], num_updates // 100), 100)
    losses = np.abs(drift + level + rng.normal(0, 0.05, num_updates))
    norms = rng.lognormal(0, 0.5, num_updates)
    for figures in (losses, norms):
        alone = rng.random(num_updates) < 0.02
        figures[alone] *= rng.lognormal(0.5, 2, alone.sum())
        figures[rng.random(num_updates) < 0.01] = np.nan
        figures[rng.random(num_updates) < 0.003] = np.inf
    losses[2000:2200], norms[2100:2300] = 2.7182818, 1e-12
    weights = np.where(rng.random(num_updates) < 0.03, 0, 2.0 ** rng.integers(0, 4, num_updates))
    return losses.astype(np.float32), norms.astype(np.float32), weights.astype(np.float32)


def updates_of(
    config: ModelOptimizerConfig, losses: np.ndarray, norms: np.ndarray, weights: np.ndarray
) -> tuple[TrainState, Any]:
    """Takes an update of a single parameter with each loss, gradient norm and weight."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    params = {"scale": jnp.ones(1)}
    start = TrainState(params, make_optimizer(config, AT_REST).init(params))
    abstract = start._replace(spikes=abstract_window(config, mesh))

    def step(state: TrainState, figures: tuple[jax.Array, ...]) -> tuple[TrainState, Any]:
        loss, norm, weight = figures
        total = jnp.where(weight > 0, weight, 1)
        nothing: Any = jnp.float32(0)
        totals = Totals(
            {"scale": (norm * total)[None]},
            loss * total,
            weight,
            {},
            nothing,
            nothing,
            nothing,
            None,
        )
        settings = UpdateSettings(jnp.float32(1e-3), adam_weight_decay=jnp.float32(0))  # type: ignore[arg-type]
        state, metrics = update(config, state, totals, settings)
        return state, (metrics.skipped, metrics.is_spike, state.params["scale"][0])

    first = with_spike_window(start, abstract, (), ())
    state, taken = jax.jit(partial(jax.lax.scan, step))(first, (losses, norms, weights))
    return jax.device_get(state), jax.device_get(taken)


def test_the_rule_is_the_sentence_of_its_documentation_on_10_000_updates() -> None:
    losses, norms, weights = some_figures(10_000, seed=1)
    for interval, factor in ((128, 6.0), (5, 1.5)):
        config = one_layer_config(
            *ON, f"skip_step_interval={interval}", f"skip_step_scaling_factor={factor}"
        ).update.optimizer
        expected = spikes_of(losses, norms, weights, interval, factor)
        state, (skipped, spikes, scales) = updates_of(config, losses, norms, weights)
        assert 50 < sum(expected) < 5000
        assert spikes.tolist() == expected
        non_finite = ~(np.isfinite(losses) & np.isfinite(norms))
        assert skipped.tolist() == (spikes | non_finite).tolist()
        # A skipped update changes neither parameters nor moments; every other one is taken.
        applied = ~(spikes | non_finite | (weights == 0))
        assert optax.tree.get(state.opt_state, "count") == applied.sum()
        assert not np.diff(scales, prepend=np.float32(1))[~applied].any()


def test_a_lasting_new_level_becomes_normal_and_equal_figures_are_no_spikes() -> None:
    losses = np.repeat(np.float32([2.3, 9.7]), 40)
    norms = weights = np.ones(80, np.float32)
    config = one_layer_config(*ON, "skip_step_interval=16").update.optimizer
    _, (_, spikes, _) = updates_of(config, losses, norms, weights)
    assert np.flatnonzero(spikes).tolist() == [40]


def test_a_window_that_is_put_back_from_a_position_decides_as_before() -> None:
    """A resume has the figures as Python numbers, which the recorder kept beside the device."""
    losses, norms, weights = some_figures(2000, seed=2)
    config = one_layer_config(*ON, "skip_step_interval=9").update.optimizer
    whole, (_, expected, _) = updates_of(config, losses, norms, weights)
    kept = Spikes()
    for loss, norm, weight in zip(losses, norms, weights, strict=True):
        if np.isfinite(loss) and np.isfinite(norm) and weight > 0:
            kept = kept.kept(float(loss), float(norm), 9)
    assert whole.spikes is not None and sum(expected) > 20
    assert tuple(whole.spikes.losses_W.tolist()) == kept.losses
    assert tuple(whole.spikes.grad_norms_W.tolist()) == kept.grad_norms
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    abstract = whole._replace(spikes=abstract_window(config, mesh))
    again = with_spike_window(whole, abstract, kept.losses, kept.grad_norms)
    for found, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_without_the_key_the_program_is_the_one_without_the_rule() -> None:
    """Nor has it an argument for the window, whatever the other two keys are."""

    def lowered(*overrides: str) -> Any:
        config = one_layer_config(*overrides)
        devices = jax.devices()[:1]
        shape = checked_mesh_shape(config.plan, config.decoder, devices)
        programs = Programs(config.programs, devices, shape, NEXT_TOKEN)
        return programs.step(BatchShape(2, 1)), programs.abstract

    off, abstract = lowered()
    others, _ = lowered("skip_step_interval=7", "skip_step_scaling_factor=2")
    on, with_window = lowered("skip_step_on_spikes=true")
    assert abstract.spikes is None
    assert off.as_text() == others.as_text() != on.as_text()
    inputs, more = (len(jax.tree.leaves(one.in_avals)) for one in (off, on))
    assert more == inputs + 3
    assert with_window.saved == abstract.saved
