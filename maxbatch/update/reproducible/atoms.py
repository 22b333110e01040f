"""Atoms: the sums of some rows and the gradient of their loss, by one program for one device.

Every layout runs the same program, so an atom's gradient is the same to the last bit wherever it is
computed. A larger program, or one for several devices, fuses and rounds otherwise.

Legend: r rows of an atom (`reproducible_rows`), L tokens of a row, F figures.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import UpdateConfig
from maxbatch.data.feed.placement import Batch
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import AXES
from maxbatch.system.hashing import carry
from maxbatch.update.gradients import Accumulation, Objective
from maxbatch.update.reproducible.exact_sums import ExactSum, empty_sum, merged, with_summand
from maxbatch.update.state import TrainState


class AtomSums(NamedTuple):
    """Exact sums over atoms: on a device their first axis is 1, of all devices it counts them."""

    gradient: list[ExactSum]  # of the parameters, in their order
    figures_1xF: ExactSum  # `Figures`, then the objective's other sums
    fingerprint_1x4: jax.Array  # uint32, 16-bit limbs of the sum of row hashes
    tokens_1: jax.Array  # uint32

    def merged(self) -> AtomSums:
        """Adds up the sums of all devices; the results have no first axis."""
        return AtomSums(
            [merged(sums) for sums in self.gradient],
            merged(self.figures_1xF),
            carry(jnp, jnp.sum(self.fingerprint_1x4, axis=0, dtype=jnp.uint32)),
            jnp.sum(self.tokens_1, dtype=jnp.uint32),
        )


class Figures(NamedTuple):
    """The sums over atoms that every objective has: float32 scalars."""

    loss: jax.Array
    weight: jax.Array
    # of the atoms' summed gradients and weights, for the gradient noise scale
    gradient_squares: jax.Array
    weight_squares: jax.Array


class Atoms:
    """The programs of atoms on one device.

    Args:
      abstract: the state; its parameters are whole on the device.
    """

    def __init__(
        self,
        config: UpdateConfig,
        device: jax.Device,
        objective: Objective,
        abstract: TrainState,
    ) -> None:
        mesh = Mesh(
            np.array(device).reshape((1,) * len(AXES)),
            AXES,
            axis_types=(AxisType.Auto,) * len(AXES),
        )
        self._accumulation = Accumulation(config, mesh, objective)
        self._objective, self._params = objective, abstract.params
        self._measures_noise = config.optimizer.gradient_noise_scale
        self.whole = NamedSharding(mesh, P())

    def nothing(self) -> AtomSums:
        """Returns sums of no atom."""
        num_figures = len(Figures._fields) + len(self._objective.others)
        return AtomSums(
            [empty_sum((1, *x.shape)) for x in jax.tree.leaves(self._params)],
            empty_sum((1, num_figures)),
            jnp.zeros((1, 4), jnp.uint32),
            jnp.zeros(1, jnp.uint32),
        )

    def add(self, params: State, sums: AtomSums, rows: Batch) -> AtomSums:
        """Returns the sums with one more atom.

        Args:
          rows: [r, L] arrays.
        """
        accumulation = self._accumulation
        weights = accumulation.staged(params)
        start = accumulation.start(weights, sums_layers=False)
        totals = accumulation.total(accumulation.add(weights, start, rows, False))

        gradient = [g.astype(jnp.float32) for g in jax.tree.leaves(totals.gradient)]
        squares = jnp.float32(0)
        if self._measures_noise:
            squares = jnp.stack([jnp.sum(jnp.square(g)) for g in gradient]).sum()
        figures = Figures(totals.loss, totals.weight, squares, jnp.square(totals.weight))
        others = [totals.others[name] for name in self._objective.others]
        return AtomSums(
            [with_summand(s, g[None]) for s, g in zip(sums.gradient, gradient, strict=True)],
            with_summand(sums.figures_1xF, jnp.stack([*figures, *others])[None]),
            carry(jnp, sums.fingerprint_1x4[0] + totals.fingerprint)[None],
            sums.tokens_1 + totals.tokens,
        )
