"""The sums of a global batch inside a program: its losses, its weight and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxbatch.config.combined import UpdateConfig
from maxbatch.data.feed.placement import Batch
from maxbatch.update.balance import Balance, Scale
from maxbatch.update.gradients import Accumulation, Objective, Sums, Totals
from maxbatch.update.packed_rows import may_be_on_several_shards
from maxbatch.update.state import TrainState


class BatchSums:
    """The sums of an objective over the micro-batches of a batch, for a state's parameters.

    Args:
      arrange: turns a staged micro-batch into the rows to train on (`Placement.arrange`).
    """

    def __init__(
        self,
        config: UpdateConfig,
        mesh: Mesh,
        arrange: Callable[[Batch], Batch],
        objective: Objective,
    ) -> None:
        self._accumulation = Accumulation(config, mesh, objective)
        self._arrange, self._objective = arrange, objective
        self._measures_noise = config.optimizer.gradient_noise_scale

    @property
    def balance(self) -> Balance | None:
        """The balance keys of a model with experts."""
        return self._accumulation.balance

    def scale(self, state: TrainState, batch: Batch, num_micro_batches: jax.Array) -> Scale | None:
        """Returns the balance terms' facts of the whole batch; None without such terms."""
        if self.balance is None or not self.balance.has_terms:
            return None

        def count(
            j: jax.Array, counted: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            rows = self._arrange(_micro_batch(batch, j))
            tokens = jnp.sum(rows.segments != 0, dtype=jnp.int32)
            return counted[0] + self._objective.weigh(rows), counted[1] + tokens

        passes = num_passes(batch, num_micro_batches)
        weight, tokens = jax.lax.fori_loop(0, passes, count, (jnp.float32(0), jnp.int32(0)))
        return Scale(
            weight / jnp.maximum(tokens, 1).astype(jnp.float32), state.opt_state.last_counts_NxE
        )

    def totals(
        self, state: TrainState, batch: Batch, num_micro_batches: jax.Array, scale: Scale | None
    ) -> Totals:
        """Returns the sums of the first micro-batches of a batch.

        Args:
          batch: arrays [A, M, L], as they are staged.
          scale: for the balance terms; None: the loss has none.
        """
        accumulation = self._accumulation
        params = accumulation.staged(state.params, state.frozen)
        max_micro_batches = jax.tree.leaves(batch)[0].shape[0]
        parts = 1 if may_be_on_several_shards(batch) else accumulation.data_shards
        measures_noise = self._measures_noise and max_micro_batches * parts > 1

        def add_micro_batch(j: jax.Array, sums: Sums) -> Sums:
            rows = self._arrange(_micro_batch(batch, j))
            return accumulation.add(
                params, sums, rows, (j == 0) if measures_noise else False, scale
            )

        sums = accumulation.start(params, sums_layers=max_micro_batches > 1)
        if max_micro_batches == 1:  # a single one: without a loop the accumulator is free
            sums = add_micro_batch(jnp.int32(0), sums)
        else:
            passes = num_passes(batch, num_micro_batches)
            sums = jax.lax.fori_loop(0, passes, add_micro_batch, sums)
        return accumulation.total(sums)


def num_passes(batch: Batch, num_micro_batches: jax.Array) -> jax.Array:
    """Returns the micro-batches to take; where samples share rows, those that hold any.

    Rows are filled pass by pass, and a host without rows does not know how many lengths need.
    """
    if batch.begins is None:
        return num_micro_batches
    held = [jnp.any(begins > 0, axis=(1, 2)) for begins in jax.tree.leaves(batch.begins)]
    return jnp.sum(functools.reduce(jnp.logical_or, held), dtype=jnp.int32)


def _micro_batch(batch: Batch, j: jax.Array) -> Batch:
    micro: Batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), batch)
    return micro
