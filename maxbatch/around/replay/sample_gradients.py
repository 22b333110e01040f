"""The gradients of a batch's samples, one row at a time.

B samples; g the batch's gradient, the sum of its samples' parts g_i: the gradient of sample i's
summed loss over the weight of the whole batch. The share of sample i is g.g_i / g.g.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxbatch.around.replay.task import Measuring, UpdateRows
from maxbatch.data.feed.placement import Batch, BatchShape
from maxbatch.parallel.trees import State
from maxbatch.run.folder.json_file import finite
from maxbatch.update.balance import Scale
from maxbatch.update.batch_sums import BatchSums
from maxbatch.update.state import TrainState


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample of an update; a number that is not finite is None."""

    index: int  # its own number in the stream; of a response, that of its prompt
    loss: float | None  # per token; None without weight
    weight: float  # the sum of its tokens' weights
    grad_norm: float | None  # of the gradient of a batch of it alone
    share: float | None  # of the batch's gradient; None where that is 0

    @property
    def pull(self) -> float:
        """The length of its part of the batch's gradient, up to a factor of the batch; infinite if
        that is not finite.

        A share says how much of the batch's direction is a sample's. A sample that pulls elsewhere,
        as a strange one does, has a small share and a long part.
        """
        return math.inf if self.grad_norm is None else self.grad_norm * self.weight


class _Whole(NamedTuple):
    """The whole batch, as the parts of its samples need it; on the devices."""

    gradient: State  # the mean over the batch, float32
    square: jax.Array  # g.g
    weight: jax.Array
    scale: Scale | None  # for the balance terms


class _Part(NamedTuple):
    """Figures of one sample, scalars."""

    loss: jax.Array  # summed
    weight: jax.Array
    grad_norm: jax.Array
    dot: jax.Array  # g.g_i


class _Programs(NamedTuple):
    """The compiled programs of the samples of batches of one shape."""

    whole: Callable[[TrainState, Batch, np.int32], _Whole]
    part: Callable[[TrainState, Batch, _Whole], _Part]  # of a batch of one row
    single: BatchShape  # of that batch


def samples(rows: UpdateRows, state: TrainState) -> Iterator[Sample]:
    """Yields the samples of an update, in the order of the stream, at the parameters of a state."""
    programs = _programs(rows.measuring, rows.shape)
    whole = programs.whole(state, rows.batch, np.int32(rows.num_passes))
    square = float(whole.square)
    for number, own_number in enumerate(rows.own_numbers):
        row = {name: array[number : number + 1] for name, array in rows.arrays.items()}
        staged = rows.measuring.stage(row, programs.single)
        part = jax.device_get(programs.part(state, staged, whole))
        weight = float(part.weight)
        yield Sample(
            own_number,
            finite(float(part.loss) / weight) if weight else None,
            weight,
            finite(float(part.grad_norm)),
            finite(float(part.dot) / square) if square else None,
        )


@functools.lru_cache(maxsize=2)
def _programs(measuring: Measuring, shape: BatchShape) -> _Programs:
    mesh, arrange = measuring.mesh, measuring.arrange
    single = BatchShape(len(mesh.devices.flat), 1)
    whole_sums, own_sums = (
        BatchSums(measuring.keys, mesh, arrange(cut.micro_batch), measuring.objective)
        for cut in (shape, single)
    )

    def find_whole(state: TrainState, batch: Batch, count: jax.Array) -> _Whole:
        scale = whole_sums.scale(state, batch, count)
        totals = whole_sums.totals(state, batch, count, scale)
        mean = _mean(totals.gradient, totals.weight)
        return _Whole(mean, optax.tree.vdot(mean, mean), totals.weight, scale)

    def find_part(state: TrainState, row: Batch, whole: _Whole) -> _Part:
        single = jnp.int32(1)
        alone = own_sums.totals(state, row, single, own_sums.scale(state, row, single))
        # the terms of experts' balance depend on the batch
        within = alone if whole.scale is None else own_sums.totals(state, row, single, whole.scale)
        part = _mean(within.gradient, whole.weight)
        norm = optax.tree.norm(_mean(alone.gradient, alone.weight))
        return _Part(alone.loss, alone.weight, norm, optax.tree.vdot(whole.gradient, part))

    return _Programs(jax.jit(find_whole), jax.jit(find_part), single)


def _mean(gradient: State, weight: jax.Array) -> State:
    divisor = jnp.where(weight > 0, weight, 1.0)
    mean: State = jax.tree.map(lambda g: g.astype(jnp.float32) / divisor, gradient)
    return mean
