"""The way of a stream through the layers of a decoder, for whole rows and for new tokens alike.

A decoder is a few parts, one after the other; the layers of a part share one program and are
stacked. `through` is the only place where a layer is called: a loop, rematerialisation and a layer
runner call it with one layer, or one cycle of layers, at a time.

Shapes: M micro-batch, L length, D model, P width of a layer's input besides the stream; while
sampling, B rows, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxbatch.model.attention import KeysValues
from maxbatch.model.cache import Caches, NewTokens
from maxbatch.model.experts.routing import RoutingSums
from maxbatch.model.layer import Beside, DecoderLayer, LayerCycle
from maxbatch.model.rope import Rope, Ropes
from maxbatch.model.segments import Slots, lengths_in_segments
from maxbatch.model.stacked import Stacked, Static
from maxbatch.parallel.pipeline import Layers
from maxbatch.parallel.sharding import Constrain

LayerDef: TypeAlias = nnx.GraphDef[Any]  # of a layer or of a cycle of layers
KeysByPlace: TypeAlias = dict[int, KeysValues]  # by place in the cycle of layers


class Carried(NamedTuple):
    """What one element of a stack hands to the next."""

    x_MxLxD: jax.Array
    keys: KeysByPlace | None = None  # of the last cycle, if its layers share their keys
    caches: Caches | None = None  # of new tokens; None for whole rows


class Continued(NamedTuple):
    """T more tokens of each row, which attend to those in the caches and to each other."""

    positions_BxT: jax.Array
    lengths_Bx1: jax.Array  # the most tokens that each row will have


# (what is handed on, the tokens, a layer or a cycle of layers) -> (what it hands on, the sums of
# its experts)
Step: TypeAlias = Callable[
    [Carried, Slots | Continued, Stacked], tuple[Carried, RoutingSums | None]
]


class LayerRunner(Protocol):
    """A way to run the layers of whole rows other than a plain loop over them."""

    @property
    def constrain(self) -> Constrain:
        """The constraint on activations inside of the layers."""

    def order(self, num_stacked: int) -> np.ndarray:
        """Returns the numbers of the layers, or cycles, in the order in which their parameters come
        stacked.
        """

    def __call__(
        self,
        layers: Layers[RoutingSums | None],
        stacked: Stacked,
        x_MxLxD: jax.Array,
        slots: Slots,
        /,
    ) -> tuple[jax.Array, RoutingSums | None]:
        """Returns x after all layers and their sums, stacked alike; `layers` runs as many as are
        stacked.
        """


class Part(NamedTuple):
    """Layers, or cycles of layers, that run one after the other by one program."""

    layerdef: LayerDef
    stacked: Stacked
    # The number of each in the caches, or of those that it reads: int[N].
    in_cache: np.ndarray
    ropes: Ropes | None
    is_local: bool  # whether its layers are, where neither they nor the stack say so
    # Whose keys and values attention reads: the layer's own; its own, which the next part reads
    # too; or those of the part before it.
    keys: Literal["own", "given", "taken"] = "own"
    sources: tuple[int, ...] = ()  # for each place of the cycle, the place whose keys are shared
    taken: KeysByPlace | None = None  # those of the part before it, of whole rows
    runner: LayerRunner | None = None  # of its layers; None: a plain loop

    @property
    def step(self) -> Step:
        """The way through one element of the stack."""
        return partial(through, self)


def through(
    part: Part, carried: Carried, tokens: Slots | Continued, element: Stacked
) -> tuple[Carried, RoutingSums | None]:
    """Returns the stream after one element of a part's stack, a layer or a cycle of layers, and the
    sums of its experts, those of a cycle stacked.
    """
    module = nnx.merge(part.layerdef, element.parameters)
    x_MxLxD = carried.x_MxLxD
    given: KeysByPlace = {}
    all_sums: list[RoutingSums] = []
    caches = list(carried.caches.places) if carried.caches else []
    for place, layer in enumerate(module.layers):
        beside = _beside(part, layer, place, element)
        rope = _rope(part.ropes, tokens, beside.is_local) if layer.has_rope else None
        # a layer without keys of its own reads those of this place, in the cycle before it
        source = part.sources[place] if part.keys == "taken" else place
        if isinstance(tokens, Continued):
            new = NewTokens(tokens.positions_BxT, caches[source], element.in_cache)
            x_MxLxD, sums, cache = layer(x_MxLxD, new, rope, beside)
            assert cache is not None, "new tokens have a cache"
            caches[source] = cache
        else:
            shared = None if part.taken is None else part.taken[source]
            if part.keys == "given" and place in part.sources:
                shared = given[place] = layer.keys_values(x_MxLxD, rope)
            x_MxLxD, sums, _ = layer(x_MxLxD, tokens, rope, beside, shared)
        all_sums += [] if sums is None else [sums]
    carried = Carried(x_MxLxD, given or None, Caches(tuple(caches)) if caches else None)
    if not all_sums:
        return carried, None
    return carried, _stacked(all_sums) if isinstance(module, LayerCycle) else all_sums[0]


def _beside(part: Part, layer: DecoderLayer, place: int, element: Stacked) -> Beside:
    """Returns the inputs of the layer at a place of an element besides the stream."""
    is_local = element.is_local
    if layer.is_local is not None:
        is_local = layer.is_local
    elif is_local is None:
        is_local = part.is_local
    elif isinstance(is_local, Static):
        is_local = is_local.value
    number = element.number + place if place and element.number is not None else element.number
    return Beside(is_local, number, None if element.inputs is None else element.inputs[place])


def _rope(
    ropes: Ropes | None, tokens: Slots | Continued, is_local: jax.Array | bool
) -> Rope | None:
    """Returns the tables of a layer at the tokens' positions."""
    if ropes is None:
        return None
    if isinstance(tokens, Continued):
        return ropes.of(is_local, lambda: tokens.lengths_Bx1, tokens.positions_BxT)
    return ropes.of(is_local, partial(lengths_in_segments, tokens.segments_MxL))


def loop(
    step: Step, carried: Carried, tokens: Slots | Continued, stacked: Stacked
) -> tuple[Carried, RoutingSums | None]:
    """Returns the stream after the last element of a stack, and the sums of all, stacked alike. The
    program has a loop.
    """

    def one(carried: Carried, element: Stacked) -> tuple[Carried, RoutingSums | None]:
        # the keys of the cycle before it are those that it replaces, and no layer reads them
        return step(carried._replace(keys=None), tokens, element)

    return jax.lax.scan(one, carried, stacked)


def unrolled(
    step: Step, carried: Carried, tokens: Slots | Continued, stacked: Stacked
) -> tuple[Carried, RoutingSums | None]:
    """Returns the same as `loop`; the program has each element by itself."""
    all_sums = []
    for element in stacked.one_by_one():
        carried, sums = step(carried._replace(keys=None), tokens, element)
        all_sums.append(sums)
    return carried, _stacked(all_sums)


def _stacked(sums_of_layers: Sequence[RoutingSums | None]) -> RoutingSums | None:
    """Returns the sums of layers on a leading axis; None of layers without experts."""
    stacked: RoutingSums | None = jax.tree.map(
        lambda *of_layers: jnp.stack(of_layers), *sums_of_layers
    )
    return stacked
