"""The optimizer's update of pieces of a fixed size, by one program for one device.

Parameters and moments stay in their shards. Every device flattens its shards of the parameters of a
band, one after another, and cuts them into pieces of Q values; zeros fill the last piece. The
update of a value depends on that value alone, and the size of a piece on the model alone, so every
layout runs the same program.

Legend: N devices, Q values of a piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import ModelOptimizerConfig
from maxbatch.parallel.trees import State
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.optimizers import AT_REST, is_decayed, make_optimizer
from maxbatch.update.reproducible.exact_sums import ExactSum, merged_and_rounded
from maxbatch.update.step import moved_average

_SMALLEST_PIECE, _LARGEST_PIECE = 2**10, 2**18
_PIECE = "piece"
_PIECES = 32  # of a model, unless they would be smaller or larger than these
_BANDS, _SMALLEST_BAND = 8, 2**20  # of a model, unless they would be smaller


class Columns(NamedTuple):
    """What a parameter has in a state, and its gradient: one array each, or one per parameter."""

    gradient: Any  # float32, of the batch's sum
    params: Any
    moments: list[Any]  # in the order of the optimizer's state
    average: Any | None


class Band(NamedTuple):
    """Parameters of one dtype that all decay or all do not, and that are updated together."""

    dtype: np.dtype
    decays: bool
    places: list[int]  # among the parameters


class MomentsApart:
    """The split of an optimizer's state into moments, one tree as the parameters, and scalars."""

    def __init__(self, opt_state: optax.OptState, params: jax.tree_util.PyTreeDef) -> None:
        self._is_moments: Callable[[object], bool] = lambda x: jax.tree.structure(x) == params
        parts, self._structure = jax.tree.flatten(opt_state, is_leaf=self._is_moments)
        self._are_moments = [self._is_moments(part) for part in parts]

    def split(self, opt_state: optax.OptState) -> tuple[list[Any], list[Any]]:
        """Returns the moments and the scalars of a state."""
        parts = jax.tree.leaves(opt_state, is_leaf=self._is_moments)
        pairs = list(zip(parts, self._are_moments, strict=True))
        return [part for part, is_moment in pairs if is_moment], [
            part for part, is_moment in pairs if not is_moment
        ]

    def joined(self, moments: Sequence[Any], scalars: Sequence[Any]) -> optax.OptState:
        """Returns the state of moments and scalars."""
        left, others = iter(moments), iter(scalars)
        parts = [next(left if is_moment else others) for is_moment in self._are_moments]
        return jax.tree.unflatten(self._structure, parts)


class Pieces:
    """The cut of a state's shards into bands of parameters, and of bands into pieces.

    Only one band at a time is in memory twice.

    Attributes:
      bands: the parameters, cut by the model alone.
      size: Q.
    """

    def __init__(self, config: ModelOptimizerConfig, params: State, mesh: Mesh) -> None:
        self._mesh = mesh
        arrays = jax.tree.leaves(params)
        self._specs = [x.sharding.spec for x in arrays]
        self._shapes = [x.sharding.shard_shape(x.shape) for x in arrays]
        decays = jax.tree.leaves(is_decayed(config, params))
        sizes = [math.prod(x.shape) for x in arrays]
        kinds = [(x.dtype, bool(decay)) for x, decay in zip(arrays, decays, strict=True)]
        most = max(sum(sizes) / _BANDS, _SMALLEST_BAND)
        self.bands = [
            Band(*kind, places)
            for kind in dict.fromkeys(kinds)
            for places in _filled([i for i, k in enumerate(kinds) if k == kind], sizes, most)
        ]
        size = 2 ** math.ceil(math.log2(max(sum(sizes) / _PIECES, 1)))
        self.size = min(max(size, _SMALLEST_PIECE), _LARGEST_PIECE)

    def num_values(self, band: Band) -> int:
        """Returns the values of a band in a device's shards."""
        values: int = sum(math.prod(self._shapes[place]) for place in band.places)
        return values

    def num_pieces(self, band: Band) -> int:
        """Returns the pieces of a band on a device."""
        pieces: int = math.ceil(self.num_values(band) / self.size)
        return pieces

    def cut(self, band: Band, columns: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Cuts columns of a band's whole arrays, one per parameter, inside of a program.

        Returns:
          For each piece, that piece of each column: [N, Q].
        """
        num_pieces = self.num_pieces(band)

        def cut_shards(columns: list[list[jax.Array]]) -> list[list[jax.Array]]:
            pieces: list[list[jax.Array]] = [[] for _ in range(num_pieces)]
            for column in columns:
                flat = jnp.concatenate([x.reshape(-1) for x in column])
                flat = jnp.pad(flat, (0, num_pieces * self.size - flat.size))
                for i, piece in enumerate(pieces):
                    piece.append(flat[None, i * self.size : (i + 1) * self.size])
            return pieces

        cut: list[list[jax.Array]] = jax.shard_map(
            cut_shards,
            mesh=self._mesh,
            in_specs=([self._specs_of(band)] * len(columns),),
            out_specs=P(self._mesh.axis_names),
            check_vma=False,
        )(columns)
        return cut

    def join(self, band: Band, pieces: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Returns the columns of a band's pieces, inside of a program; the opposite of `cut`."""
        num_columns = len(pieces[0])

        def join_column(pieces: list[list[jax.Array]], column: int) -> list[jax.Array]:
            flat = jnp.concatenate([piece[column][0] for piece in pieces])
            arrays, start = [], 0
            for place in band.places:
                shape = self._shapes[place]
                end = start + math.prod(shape)
                arrays.append(flat[start:end].reshape(shape))
                start = end
            return arrays

        columns: list[list[jax.Array]] = jax.shard_map(
            lambda pieces: [join_column(pieces, column) for column in range(num_columns)],
            mesh=self._mesh,
            in_specs=(P(self._mesh.axis_names),),
            out_specs=[self._specs_of(band)] * num_columns,
            check_vma=False,
        )(pieces)
        return columns

    def reduce(self, band: Band, sums: list[ExactSum]) -> list[jax.Array]:
        """Adds up the sums of all devices, [N, ...], inside of a program, and rounds them.

        A device receives the parts of its own shards alone.
        """
        specs = self._specs_of(band)

        def reduce_array(spec: P, sums: ExactSum) -> jax.Array:
            split: set[str] = set()
            for dim, entry in enumerate(spec, start=1):
                axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
                split.update(axes)
                if axes:
                    sums = ExactSum(
                        *(jax.lax.all_to_all(x, axes, dim, 0, tiled=True) for x in sums)
                    )
            others = [a for a, n in self._mesh.shape.items() if n > 1 and a not in split]
            return merged_and_rounded(sums, tuple(others))

        reduced: list[jax.Array] = jax.shard_map(
            lambda sums: [reduce_array(*x) for x in zip(specs, sums, strict=True)],
            mesh=self._mesh,
            in_specs=(P(self._mesh.axis_names),),
            out_specs=specs,
            check_vma=False,
        )(sums)
        return reduced

    def _specs_of(self, band: Band) -> list[P]:
        return [self._specs[place] for place in band.places]


def _filled(places: Sequence[int], sizes: Sequence[int], most: float) -> Iterator[list[int]]:
    """Yields the places in bands of at most so many values, or of one place."""
    band: list[int] = []
    for place in places:
        if band and sum(sizes[i] for i in [*band, place]) > most:
            yield band
            band = []
        band.append(place)
    if band:
        yield band


class NewPiece(NamedTuple):
    """A piece after an update."""

    params: jax.Array
    moments: list[jax.Array]
    average: jax.Array | None
    scalars: list[jax.Array]  # of the optimizer's state
    is_finite: jax.Array  # bool: whether the new values are, applied or not


def step_piece(
    config: ModelOptimizerConfig,
    decays: bool,
    piece: Columns,
    scalars: list[jax.Array],
    denominator: jax.Array,
    shrink: jax.Array,
    applies: jax.Array,
    settings: UpdateSettings,
) -> NewPiece:
    """Returns a piece after the update, or as it was if the update does not apply.

    Args:
      decays: whether its parameters have weight decay.
      piece: arrays [1, Q].
      scalars: the optimizer's state besides moments.
      denominator: the weight of the batch.
      shrink: the factor of clipping.
    """
    params, gradient = {_PIECE: piece.params}, piece.gradient / denominator
    if config.gradient_clipping_threshold:
        gradient = gradient * shrink
    optimizer = make_optimizer(config, settings, decays=lambda tree: {_PIECE: decays})
    apart = MomentsApart(
        jax.eval_shape(make_optimizer(config, AT_REST).init, params), jax.tree.structure(params)
    )
    before = apart.joined([{_PIECE: moment} for moment in piece.moments], scalars)
    updates, after = optimizer.update(
        optax.tree.cast_like({_PIECE: gradient}, params), before, params
    )
    new_params: Any = optax.apply_updates(params, updates)
    average: Any = None
    if piece.average is not None:
        before_it: Any = {_PIECE: piece.average}
        moved: Any = moved_average(before_it, new_params, settings)
        average = moved[_PIECE]
    moments, new_scalars = apart.split(after)

    new = new_params[_PIECE], [moment[_PIECE] for moment in moments], average, new_scalars
    old = piece.params, piece.moments, piece.average, scalars
    is_finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(new)]).all()
    kept_params, kept_moments, kept_average, kept_scalars = jax.tree.map(
        lambda new, old: jnp.where(applies, new, old), new, old
    )
    return NewPiece(kept_params, kept_moments, kept_average, kept_scalars, is_finite)
