"""A layer of a decoder: attention, then the MLP or experts, each with its norms; and a cycle of
layers of several forms.

Shapes: M micro-batch, L length, D model, P width of a layer's input besides the stream. While
sampling, M are the rows and L their new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
from flax import nnx

from maxbatch.config.combined import DecoderConfig
from maxbatch.families.cycle import LayerForm, cycle_length, cycle_of
from maxbatch.families.family import FAMILIES
from maxbatch.families.matrices import layer_paths
from maxbatch.model.attention import Attention, KeysValues
from maxbatch.model.cache import Cache, NewTokens, StateCache
from maxbatch.model.experts.experts import Experts
from maxbatch.model.experts.routing import RoutingSums
from maxbatch.model.mlp import MLP
from maxbatch.model.norms import norm_of
from maxbatch.model.parameters import add_parameters
from maxbatch.model.products import features_last
from maxbatch.model.rope import Rope
from maxbatch.model.segments import Slots
from maxbatch.parallel.sharding import Constrain

STREAM = ("batch", "length", "embed")


class Beside(NamedTuple):
    """What a layer is given besides the stream: what distinguishes it from the layers that share
    its program.
    """

    is_local: jax.Array | bool
    number: jax.Array | int | None  # among all layers; None in a model without experts
    input_MxLxP: jax.Array | None  # None in most families


class LayerOutput(NamedTuple):
    """The stream after a layer, in its dtype, and what the layer leaves beside it."""

    x_MxLxD: jax.Array
    sums: RoutingSums | None  # None without experts
    cache: Cache | StateCache | None  # with the new tokens in it; None for whole rows


class DecoderLayer(nnx.Module):
    """One residual block: attention, then the MLP or experts, normalised before or after, or both.

    `decoder_block` decides which.
    """

    mlp: MLP  # if the layer has no experts, or has them beside it
    experts: Experts  # if it has
    shared_experts: MLP  # of every token
    layer_scale: nnx.Param[jax.Array]  # [1]; if the family has one

    def __init__(
        self,
        config: DecoderConfig,
        name: str,
        form: LayerForm,
        *,
        rngs: nnx.Rngs,
        constrain: Constrain,
    ):
        family = FAMILIES[config.decoder_block]
        attention = form.attention.layer_class()
        self.attention_norm = norm_of(config, f"{name}.attention_norm")
        self.attention = attention(config, f"{name}.attention", rngs=rngs, constrain=constrain)
        self.attention_post_norm = norm_of(config, f"{name}.attention_post_norm")
        self.mlp_norm = norm_of(config, f"{name}.mlp_norm")
        self.has_experts, self.is_local, self.has_rope = (
            form.has_experts,
            form.is_local,
            form.has_rope,
        )
        if self.has_experts:
            self.experts = Experts(config, f"{name}.experts", rngs=rngs, constrain=constrain)
        self.mlp_own_norm, self.experts_norm, self.experts_own_norm = (
            norm_of(config, f"{name}.{part}_norm") for part in ("mlp_own", "experts", "experts_own")
        )
        experts = family.experts if self.has_experts else None
        self.is_beside_mlp = experts is not None and experts.are_beside_mlp
        if self.is_beside_mlp or not self.has_experts:
            self.mlp = MLP(config, f"{name}.mlp", rngs=rngs, constrain=constrain)
        if self.has_experts and config.shared_experts:
            self.shared_experts = MLP(
                config, f"{name}.shared_experts", rngs=rngs, constrain=constrain
            )
        self.mlp_post_norm = norm_of(config, f"{name}.mlp_post_norm")
        add_parameters(self, config, name, rngs=rngs)  # those of its endings
        for ending in family.endings:
            for norm in ending.norms:
                setattr(self, norm, norm_of(config, f"{name}.{norm}"))
        self.endings: tuple[End, ...] = tuple(ending.layer_class() for ending in family.endings)
        self.config, self.constrain = config, constrain

    def __call__(
        self,
        x_MxLxD: jax.Array,
        tokens: Slots | NewTokens,
        rope: Rope | None,
        beside: Beside,
        shared: KeysValues | None = None,
    ) -> LayerOutput:
        """Returns the stream after this layer, and what the layer leaves beside it.

        Args:
          tokens: the tokens of whole rows, or those that follow the ones in a cache.
          rope: the tables of their positions; None: the layer rotates nothing.
          shared: the keys and values of its attention; None: it makes its own.
        """
        inner_MxLxD = self.attention_norm(x_MxLxD)
        if shared is None:
            attended_MxLxD, cache = self.attention(inner_MxLxD, tokens, rope, beside.is_local)
        else:
            assert isinstance(self.attention, Attention), "its keys and values are not shared"
            attended_MxLxD, cache = self.attention(
                inner_MxLxD, tokens, rope, beside.is_local, shared
            )
        x_MxLxD = self.constrain(x_MxLxD + self.attention_post_norm(attended_MxLxD), STREAM)
        out_MxLxD, sums = self._fed_forward(x_MxLxD, tokens, beside.number)
        x_MxLxD = self._add(x_MxLxD, out_MxLxD, beside.input_MxLxP)
        if isinstance(tokens, Slots):
            x_MxLxD = features_last(x_MxLxD, self.constrain)
        return LayerOutput(x_MxLxD, sums, cache)

    @property
    def layers(self) -> list[DecoderLayer]:
        """Itself: a layer of one form is its whole cycle."""
        return [self]

    def keys_values(self, x_MxLxD: jax.Array, rope: Rope | None) -> KeysValues:
        """Returns the keys and values of its attention, for itself and for layers without their
        own.
        """
        assert isinstance(self.attention, Attention), "its keys and values are not shared"
        return self.attention.keys_values(self.attention_norm(x_MxLxD), rope)

    def _fed_forward(
        self, x_MxLxD: jax.Array, tokens: Slots | NewTokens, number: jax.Array | int | None
    ) -> tuple[jax.Array, RoutingSums | None]:
        """Returns the output of the MLP or the experts, and the sums of the experts."""
        inner_MxLxD = self.mlp_norm(x_MxLxD)
        if not self.has_experts:
            return self.mlp(inner_MxLxD), None
        read_MxLxD = self.experts_norm(x_MxLxD) if self.is_beside_mlp else inner_MxLxD
        sums = None
        if isinstance(tokens, NewTokens):  # rows that are sampled have no capacity
            out_MxLxD = self.experts.of_each(read_MxLxD, x_MxLxD)
        else:
            assert number is not None, "layers with experts are numbered"
            out_MxLxD, sums = self.experts(read_MxLxD, tokens, number, x_MxLxD)
        if self.is_beside_mlp:
            own_MxLxD = self.mlp_own_norm(self.mlp(inner_MxLxD))
            return own_MxLxD + self.experts_own_norm(out_MxLxD), sums
        if hasattr(self, "shared_experts"):
            out_MxLxD += self.shared_experts(inner_MxLxD)
        return out_MxLxD, sums

    def _add(
        self, x_MxLxD: jax.Array, out_MxLxD: jax.Array, input_MxLxP: jax.Array | None
    ) -> jax.Array:
        x_MxLxD += self.mlp_post_norm(out_MxLxD)
        for ending in self.endings:
            x_MxLxD = ending(self, x_MxLxD, input_MxLxP)
        return self.constrain(x_MxLxD, STREAM)


# (a layer, the stream, the layer's input besides it) -> the stream
End: TypeAlias = Callable[[DecoderLayer, jax.Array, jax.Array | None], jax.Array]


def scaled(layer: DecoderLayer, x_MxLxD: jax.Array, input_MxLxP: jax.Array | None) -> jax.Array:
    """Returns the stream times the layer's factor."""
    del input_MxLxP
    return x_MxLxD * layer.layer_scale[...].astype(x_MxLxD.dtype)[None, None]


class LayerCycle(nnx.Module):
    """One cycle of layers of several forms. Its attributes are their places: "0", "1" and so on."""

    def __init__(self, config: DecoderConfig, stack: str, *, rngs: nnx.Rngs, constrain: Constrain):
        self.length = cycle_length(config)
        for path, form in zip(layer_paths(config, stack), cycle_of(config), strict=True):
            setattr(
                self,
                path[-1],
                DecoderLayer(config, ".".join(path), form, rngs=rngs, constrain=constrain),
            )

    @property
    def layers(self) -> list[DecoderLayer]:
        """The layers, in order."""
        return [getattr(self, str(place)) for place in range(self.length)]
