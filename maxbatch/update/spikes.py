"""Spikes: updates whose loss or gradient norm is far above those of the updates before.

An update is a spike if its loss, or its gradient norm before clipping, exceeds the mean of the
window by more than `skip_step_scaling_factor` standard deviations (with n - 1). The window holds
the figures of the last `skip_step_interval` updates, skipped spikes among them, so that a lasting
new level becomes normal. No update is a spike before max(2, interval // 2) figures are kept.

The rule is OLMo-core's
(https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim/skip_step_optimizer.py). It runs
inside of the compiled update, on float32 figures of the whole batch, so no update waits for the
host, and every layout takes the same decision.

Shapes: W figures of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import ModelOptimizerConfig

_LEAST_SCALE = 1e-30  # above float32's subnormals, which some devices take for 0


class SpikeWindow(NamedTuple):
    """The figures of the last updates, the newest at the end; each device has all of them."""

    losses_W: jax.Array  # float32
    grad_norms_W: jax.Array  # float32, before clipping
    num_kept: jax.Array  # int32: figures, at the end; before them are zeros


def abstract_window(config: ModelOptimizerConfig, mesh: Mesh) -> SpikeWindow | None:
    """Returns the shapes of a run's window; None if the run skips no spikes."""
    if not config.skip_step_on_spikes:
        return None
    whole = NamedSharding(mesh, P())
    figures: Any = jax.ShapeDtypeStruct((config.skip_step_interval,), jnp.float32, sharding=whole)
    count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return SpikeWindow(figures, figures, count)


def window_of(
    losses: Sequence[float], grad_norms: Sequence[float], abstract: SpikeWindow
) -> SpikeWindow:
    """Returns a window on the devices with the last of these figures; all hosts call it."""
    (size,) = abstract.losses_W.shape
    num_kept = min(size, len(losses))

    def at_the_end(figures: Sequence[float]) -> np.ndarray:
        window = np.zeros(size, np.float32)
        window[size - num_kept :] = figures[len(figures) - num_kept :]
        return window

    def placed(value: np.ndarray) -> jax.Array:
        sharding = abstract.num_kept.sharding
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    count = np.array(num_kept, np.int32)
    return SpikeWindow(placed(at_the_end(losses)), placed(at_the_end(grad_norms)), placed(count))


def judge(
    window: SpikeWindow,
    loss: jax.Array,
    grad_norm: jax.Array,
    counts: jax.Array,
    scaling_factor: float,
) -> tuple[jax.Array, SpikeWindow]:
    """Returns whether an update with these figures is a spike (bool[]), and the window after it.

    Args:
      counts: bool[]: whether the update is finite and has weight; any other is no spike, and is not
        kept.
    """
    size = window.losses_W.size
    is_above = _exceeds(window.losses_W, window.num_kept, loss, scaling_factor) | _exceeds(
        window.grad_norms_W, window.num_kept, grad_norm, scaling_factor
    )
    after = SpikeWindow(
        jnp.append(window.losses_W[1:], loss),
        jnp.append(window.grad_norms_W[1:], grad_norm),
        jnp.minimum(window.num_kept + 1, size),
    )
    kept: SpikeWindow = jax.tree.map(lambda new, old: jnp.where(counts, new, old), after, window)
    return counts & is_above & (window.num_kept >= max(2, size // 2)), kept


def _exceeds(
    figures_W: jax.Array, num_kept: jax.Array, figure: jax.Array, scaling_factor: float
) -> jax.Array:
    """Compares a figure with the kept ones, all as differences from the newest of these.

    In float32, differences of figures that are close together are exact, and scaled to at most 1
    their squares cannot overflow.
    """
    size, newest = figures_W.size, figures_W[-1]
    is_kept_W = jnp.arange(size) >= size - num_kept
    differences_W = jnp.where(is_kept_W, figures_W - newest, 0)
    scale = jnp.maximum(jnp.max(jnp.abs(differences_W)), _LEAST_SCALE)
    scaled_W = differences_W / scale
    count = jnp.maximum(num_kept, 2).astype(jnp.float32)  # with fewer, the answer is not used
    mean = jnp.sum(scaled_W) / count
    squares = jnp.sum(jnp.where(is_kept_W, (scaled_W - mean) ** 2, 0))
    deviation = jnp.sqrt(squares / (count - 1))
    return (figure - newest) / scale - mean > scaling_factor * deviation
