"""Atoms: the sums of some rows and the gradient of their loss, by one program for one device.

Every layout runs the same program, so an atom's gradient is the same to the last bit wherever it is
computed. A larger program, or one for several devices, fuses and rounds otherwise.

Legend: r rows of an atom (`reproducible_rows`), L tokens of a row, F figures, N layers with
experts, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.combined import UpdateConfig
from maxbatch.data.feed.placement import Batch
from maxbatch.families.parameter import LAYERS
from maxbatch.model.experts.routing import RoutingSums, carried
from maxbatch.parallel.remat import Remat
from maxbatch.parallel.trees import State
from maxbatch.system.hashing import carry
from maxbatch.update.balance import Balance, Scale
from maxbatch.update.gradients import Accumulation, Objective
from maxbatch.update.reproducible.exact_sums import (
    ExactSum,
    empty_bits,
    empty_sum,
    merged,
    rounded,
    with_summand,
    with_summand_in_place,
)
from maxbatch.update.reproducible.programs import mesh_of
from maxbatch.update.state import TrainState


class RoutingCounts(NamedTuple):
    """The whole numbers of `RoutingSums`: on a device their first axis is 1."""

    choices_1xNxE: jax.Array  # int32
    dropped_1xN: jax.Array  # int32
    limbs_1xNx4: jax.Array  # uint32

    def reduced(self) -> RoutingCounts:
        """Adds up the counts of all devices; the results have no first axis."""
        choices, dropped, limbs = (jnp.sum(x, axis=0, dtype=x.dtype) for x in self)
        return RoutingCounts(choices, dropped, carried(limbs))


class BatchFigures(NamedTuple):
    """The sums of a batch but for the gradient, rounded once."""

    # float32: `Figures`, the objective's other sums, the scores, rows and squares of routing
    figures_F: jax.Array
    fingerprint_4: jax.Array
    tokens: jax.Array
    counts: RoutingCounts | None  # of a model with experts; without the first axis


class FigureSums(NamedTuple):
    """Sums over atoms but for the gradient: on a device their first axis is 1, of all devices it
    counts them.
    """

    figures_1xF: ExactSum
    fingerprint_1x4: jax.Array  # uint32, 16-bit limbs of the sum of row hashes
    tokens_1: jax.Array  # uint32
    counts: RoutingCounts | None

    def reduced(self) -> BatchFigures:
        """Adds up the sums of all devices."""
        return BatchFigures(
            rounded(merged(self.figures_1xF)),
            carry(jnp, jnp.sum(self.fingerprint_1x4, axis=0, dtype=jnp.uint32)),
            jnp.sum(self.tokens_1, dtype=jnp.uint32),
            None if self.counts is None else self.counts.reduced(),
        )


class AtomSums(NamedTuple):
    """Exact sums over atoms."""

    gradient: list[ExactSum]  # of the parameters, in their order: `empty_bits` with summands
    figures: FigureSums


class LayerSums(NamedTuple):
    """The sums of a stacked parameter of the layers, while an atom's gradients are added to it."""

    gradient: ExactSum  # `empty_bits` with summands
    squares: jax.Array  # float32: of the atom's gradient


class Weights(NamedTuple):
    """Sums over atoms from which the terms of balance follow, as `FigureSums` has them."""

    weight_1: ExactSum  # of the loss
    tokens_1: jax.Array  # int32

    def scale(self, last_counts_NxE: jax.Array) -> Scale:
        """Returns the terms' facts of the whole batch from the sums of all devices."""
        tokens = jnp.maximum(jnp.sum(self.tokens_1, dtype=jnp.int32), 1)
        weight = rounded(merged(self.weight_1))
        return Scale(weight / tokens.astype(jnp.float32), last_counts_NxE)


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
        self._accumulation = Accumulation(
            config, mesh_of(device), objective, Remat.of(config.remat).of_products
        )
        self._objective, self._abstract = objective, abstract
        self._measures_noise = config.optimizer.gradient_noise_scale

    @property
    def balance(self) -> Balance | None:
        """The balance keys of a model with experts."""
        return self._accumulation.balance

    @property
    def num_figures(self) -> int:
        """F."""
        balance, num_figures = self.balance, len(Figures._fields) + len(self._objective.others)
        return num_figures + (balance.num_layers * (balance.num_experts + 2) if balance else 0)

    def nothing(self) -> AtomSums:
        """Returns sums of no atom."""
        counts = None
        if self.balance is not None:
            routing = RoutingSums.nothing(self.balance.num_layers, self.balance.num_experts)
            counts = _counts(routing)
        return AtomSums(
            [empty_bits((1, *x.shape)) for x in jax.tree.leaves(self._abstract.params)],
            FigureSums(
                empty_sum((1, self.num_figures)),
                jnp.zeros((1, 4), jnp.uint32),
                jnp.zeros(1, jnp.uint32),
                counts,
            ),
        )

    def no_weights(self) -> Weights:
        """Returns the weights of no atom."""
        return Weights(empty_sum((1,)), jnp.zeros(1, jnp.int32))

    def weigh(self, weights: Weights, rows: Batch) -> Weights:
        """Returns the weights with one more atom, of rows [r, L]."""
        weight = self._objective.weigh(rows)
        return Weights(
            with_summand(weights.weight_1, weight[None]),
            weights.tokens_1 + jnp.sum(rows.segments != 0, dtype=jnp.int32),
        )

    def add(
        self,
        params: State,
        frozen: State | None,
        scale: Scale | None,
        sums: AtomSums,
        rows: Batch,
    ) -> AtomSums:
        """Returns the sums with one more atom.

        Args:
          frozen: the model below trained adapters.
          scale: for the balance terms; None: the loss has none.
          rows: [r, L] arrays.
        """
        accumulation, before = self._accumulation, sums.figures
        weights, gradient = accumulation.staged(params, frozen), list(sums.gradient)
        places = jax.tree.unflatten(jax.tree.structure(params), range(len(gradient)))
        has_sums = nnx.PathContains(LAYERS) if accumulation.can_sum_layers else lambda *_: False
        places_of_layers, places_of_rest = nnx.split_state(places, has_sums, ...)
        layers = jax.tree.map(
            lambda place: LayerSums(ExactSum(*(x[0] for x in gradient[place])), jnp.float32(0)),
            places_of_layers,
        )
        totals, layers = accumulation.alone(weights, rows, layers, self._add_layer, scale)

        squares = []
        of_layers = jax.tree.leaves(layers, is_leaf=lambda x: isinstance(x, LayerSums))
        for place, of_layer in zip(jax.tree.leaves(places_of_layers), of_layers, strict=True):
            gradient[place] = ExactSum(*(x[None] for x in of_layer.gradient))
            squares.append(of_layer.squares)
        of_rest = jax.tree.leaves(totals.gradient)
        for place, array in zip(jax.tree.leaves(places_of_rest), of_rest, strict=True):
            g = array.astype(jnp.float32)
            gradient[place] = with_summand_in_place(gradient[place], g[None])
            squares.append(self._squares(g))

        weight = totals.weight
        figures = Figures(totals.loss, weight, jnp.stack(squares).sum(), jnp.square(weight))
        others = [totals.others[name] for name in self._objective.others]
        figures_F, counts = jnp.stack([*figures, *others]), None
        if totals.routing is not None and before.counts is not None:
            routing = totals.routing
            parts = routing.scores_E.reshape(-1), routing.sequence, routing.squares
            figures_F = jnp.concatenate([figures_F, *parts])
            added: RoutingCounts = jax.tree.map(jnp.add, before.counts, _counts(routing))
            counts = added._replace(limbs_1xNx4=carried(added.limbs_1xNx4))
        return AtomSums(
            gradient,
            FigureSums(
                with_summand(before.figures_1xF, figures_F[None]),
                carry(jnp, before.fingerprint_1x4[0] + totals.fingerprint)[None],
                before.tokens_1 + totals.tokens,
                counts,
            ),
        )

    def _add_layer(self, sums: LayerSums, gradient: jax.Array, layer: jax.Array) -> LayerSums:
        """Returns the sums of a stacked parameter with the gradient of one of its layers."""
        g = gradient.astype(jnp.float32)
        return LayerSums(
            with_summand_in_place(sums.gradient, g, layer), sums.squares + self._squares(g)
        )

    def _squares(self, gradient: jax.Array) -> jax.Array:
        """Returns the sum of the squares of an array; 0 if nobody needs it."""
        return jnp.sum(jnp.square(gradient)) if self._measures_noise else jnp.float32(0)

    def others_of(self, figures_F: jax.Array) -> dict[str, jax.Array]:
        """Returns the objective's other sums."""
        names, first = self._objective.others, len(Figures._fields)
        return dict(zip(names, figures_F[first : first + len(names)], strict=True))

    def routing_of(self, figures: BatchFigures) -> RoutingSums | None:
        """Returns the routing sums of a batch of a model with experts."""
        if self.balance is None or figures.counts is None:
            return None
        layers, experts = self.balance.num_layers, self.balance.num_experts
        values = figures.figures_F[len(Figures._fields) + len(self._objective.others) :]
        scores, sequence, squares = jnp.split(values, [layers * experts, layers * (experts + 1)])
        choices, dropped, limbs = figures.counts
        return RoutingSums(
            choices, scores.reshape(layers, experts), sequence, squares, dropped, limbs
        )


def _counts(routing: RoutingSums) -> RoutingCounts:
    return RoutingCounts(routing.counts_E[None], routing.dropped[None], routing.limbs_4[None])
