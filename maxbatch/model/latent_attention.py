"""DeepSeek's attention: the keys and values of all heads are made of one latent per token, and so
may queries be.

A part of each query and key is rotated; the key's rotated part is one for all heads. The cache
holds the latent and that part. References: DeepSeek-V2 (https://arxiv.org/abs/2405.04434), section
2.1; DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.1.1.

Shapes: M micro-batch, L length, D model, H heads, h width of a query and key, n and r widths of
their parts that are and are not rotated, v width of a value, c width of the latent; while sampling,
B rows, T new tokens.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.combined import DecoderConfig
from maxbatch.families.matrices import MATRICES, attention_widths
from maxbatch.model.attention import (
    attend,
    attend_to_cache,
    implementation_on,
    in_ring,
    rules_on,
)
from maxbatch.model.cache import Cache, NewTokens, Room
from maxbatch.model.eight_bits import rounded
from maxbatch.model.norms import norm_of
from maxbatch.model.parameters import add_parameters
from maxbatch.model.products import Adapted, features_last, product
from maxbatch.model.ring_attention import ring_attend_to_compressed
from maxbatch.model.rope import Rope, apply_rope, neighbours_apart
from maxbatch.model.scores import ScoreRules
from maxbatch.model.segments import Slots
from maxbatch.parallel.remat import kept
from maxbatch.parallel.sharding import Constrain

_EPSILON = 1e-6  # of the latents' norms; not config.normalization_layer_epsilon


class LatentAttention(nnx.Module):
    """Causal self-attention with keys and values that are made of latents."""

    query: nnx.Param[jax.Array]  # if queries are made of the stream
    query_down: nnx.Param[jax.Array]  # this and the next if they are made of a latent
    query_up: nnx.Param[jax.Array]
    latent: nnx.Param[jax.Array]  # the latent of keys and values, and the rotated part of the key
    latent_up: nnx.Param[jax.Array]  # each head's key without the rotated part, and its value
    out: nnx.Param[jax.Array]

    def __init__(self, config: DecoderConfig, name: str, *, rngs: nnx.Rngs, constrain: Constrain):
        add_parameters(self, config, name, rngs=rngs)
        self.query_down_norm = norm_of(config, f"{name}.query_down_norm", _EPSILON)
        self.latent_norm = norm_of(config, f"{name}.latent_norm", _EPSILON)
        self.rotated, self.unrotated = config.qk_rope_head_dim, config.qk_nope_head_dim
        rules = ScoreRules(_scale(config), config.attn_logits_soft_cap)
        self.scores = rules_on(config, rules, constrain)
        self.constrain, self.quantization = constrain, config.quantization
        self.implementation = implementation_on(config, constrain)

    def __call__(
        self,
        x_MxLxD: jax.Array,
        tokens: Slots | NewTokens,
        rope: Rope | None,
        is_local: jax.Array | bool = False,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the attention output, [M, L, D] in x's dtype, and the cache with new tokens in
        it; see `Attention`.
        """
        del is_local
        if isinstance(tokens, NewTokens):
            attended_MxLxHxv, cache = self._attended_with_cache(x_MxLxD, tokens, rope)
            return self._joined(attended_MxLxHxv), cache
        joined_MxLxD = self._joined(self._attended(x_MxLxD, tokens.segments_MxL, rope))
        return kept(features_last(joined_MxLxD, self.constrain), MATRICES["out"].kept), None

    def _attended(
        self, x_MxLxD: jax.Array, segments_MxL: jax.Array, rope: Rope | None
    ) -> jax.Array:
        """Returns the values that the heads of whole rows attend to, [M, L, H, v]."""
        q_MxLxHxn, q_MxLxHxr = self._queries(x_MxLxD, rope)
        latent_MxLxc, k_MxLx1xr = self._latents(x_MxLxD, rope)
        scores = self.scores._replace(implementation=self.implementation)
        up = self.latent_up[...]
        has_ring = in_ring((*q_MxLxHxn.shape[:3], 1), scores, self.constrain)
        if has_ring and not self.quantization:  # 8-bit products and their adapters are made here
            return ring_attend_to_compressed(
                jnp.concatenate([q_MxLxHxn, q_MxLxHxr], axis=-1),
                latent_MxLxc,
                k_MxLx1xr[:, :, 0],
                up.astype(x_MxLxD.dtype),
                segments_MxL,
                self.constrain,
                scores,
            )
        up_MxLxHxe = product(latent_MxLxc, up, "mlc,cnh->mlnh", self.quantization)
        up_MxLxHxe = self.constrain(up_MxLxHxe, ("batch", "length", *MATRICES["latent_up"].outputs))
        k_MxLxHxn, v_MxLxHxv = jnp.split(
            kept(up_MxLxHxe, MATRICES["latent_up"].kept), [self.unrotated], axis=-1
        )
        k_MxLxHxr = jnp.broadcast_to(k_MxLx1xr, q_MxLxHxr.shape)
        q_MxLxHxh = jnp.concatenate([q_MxLxHxn, q_MxLxHxr], axis=-1)
        k_MxLxHxh = jnp.concatenate([k_MxLxHxn, k_MxLxHxr], axis=-1)
        return attend(q_MxLxHxh, k_MxLxHxh, v_MxLxHxv, segments_MxL, scores, self.constrain)

    def _attended_with_cache(
        self, x_BxTxD: jax.Array, tokens: NewTokens, rope: Rope | None
    ) -> tuple[jax.Array, Cache]:
        """Returns the values that the heads of T more tokens of each row attend to, and the cache
        with the tokens in it.

        Queries are turned into the space of the latents, so all heads read the same slots: [latent,
        rotated] are the keys, the latent alone the values. No head's own keys and values are made.
        In 8 bits latents and their matrix are rounded as for the product that makes keys and
        values, so both ways give the same.
        """
        positions_BxT, cache, layer = tokens
        assert isinstance(cache, Cache), "attention has slots"
        q_BxTxHxn, q_BxTxHxr = self._queries(x_BxTxD, rope)
        latent_BxTxc, k_BxTx1xr = self._latents(x_BxTxD, rope)
        up: jax.Array | Adapted = self.latent_up[...]
        up_cxHxe = up.matrix if isinstance(up, Adapted) else up
        if self.quantization:
            latent_BxTxc, up_cxHxe = (
                rounded(latent_BxTxc, [2], self.quantization),
                rounded(up_cxHxe, [0], self.quantization),
            )
        if isinstance(up, Adapted):
            up_cxHxe += up.low_rank
        v_BxTx1xc = latent_BxTxc[:, :, None]
        cache = cache.write(
            layer, positions_BxT, jnp.concatenate([v_BxTx1xc, k_BxTx1xr], axis=-1), v_BxTx1xc
        )
        k_cxHxn, v_cxHxv = jnp.split(up_cxHxe.astype(x_BxTxD.dtype), [self.unrotated], axis=-1)
        q_BxTxHxc = product(q_BxTxHxn, k_cxHxn, "btnh,cnh->btnc")
        q_BxTxHxcr = jnp.concatenate([q_BxTxHxc, q_BxTxHxr], axis=-1)
        attended_BxTxHxc = attend_to_cache(
            q_BxTxHxcr, cache.layer(layer), positions_BxT, self.scores
        )
        return product(attended_BxTxHxc, v_cxHxv, "btnc,cnh->btnh"), cache

    def empty_cache(self, room: Room, dtype: jnp.dtype, constrain: Constrain) -> Cache:
        """Returns a cache without tokens: of one head, whose keys are the latents and the rotated
        parts, and whose values are the latents.
        """
        width = self.latent.shape[-1]
        return room.slots(1, (width, width - self.rotated), dtype, constrain)

    def _queries(self, x_MxLxD: jax.Array, rope: Rope | None) -> tuple[jax.Array, jax.Array]:
        """Returns the unrotated and the rotated part of the queries."""
        name = "query"
        if hasattr(self, "query_down"):
            down_MxLxc = product(x_MxLxD, self.query_down[...], "mld,dc->mlc", self.quantization)
            down_MxLxc = self.constrain(
                down_MxLxc, ("batch", "length", *MATRICES["query_down"].outputs)
            )
            x_MxLxD, name = (
                self.query_down_norm(kept(down_MxLxc, MATRICES["query_down"].kept)),
                "query_up",
            )
        w_DxHxh = neighbours_apart(getattr(self, name)[...].astype(x_MxLxD.dtype), self.rotated)
        q_MxLxHxh = product(x_MxLxD, w_DxHxh, "mld,dnh->mlnh", self.quantization)
        q_MxLxHxh = self.constrain(q_MxLxHxh, ("batch", "length", *MATRICES["query_up"].outputs))
        q_MxLxHxn, q_MxLxHxr = jnp.split(
            kept(q_MxLxHxh, MATRICES["query_up"].kept), [self.unrotated], axis=-1
        )
        return q_MxLxHxn, self._turned(q_MxLxHxr, rope)

    def _latents(self, x_MxLxD: jax.Array, rope: Rope | None) -> tuple[jax.Array, jax.Array]:
        """Returns the normalised latents of keys and values, and the rotated part of keys, which
        has one head.
        """
        w_Dxcr = neighbours_apart(self.latent[...].astype(x_MxLxD.dtype), self.rotated)
        both_MxLxcr = product(x_MxLxD, w_Dxcr, "mld,dc->mlc", self.quantization)
        both_MxLxcr = self.constrain(both_MxLxcr, ("batch", "length", *MATRICES["latent"].outputs))
        split = [both_MxLxcr.shape[-1] - self.rotated]
        latent_MxLxc, k_MxLxr = jnp.split(
            kept(both_MxLxcr, MATRICES["latent"].kept), split, axis=-1
        )
        return self.latent_norm(latent_MxLxc), self._turned(k_MxLxr[:, :, None], rope)

    def _turned(self, x_MxLxHxr: jax.Array, rope: Rope | None) -> jax.Array:
        return x_MxLxHxr if rope is None else apply_rope(x_MxLxHxr, rope, self.constrain.platform)

    def _joined(self, attended_MxLxHxv: jax.Array) -> jax.Array:
        return product(attended_MxLxHxv, self.out[...], "mlnh,nhd->mld", self.quantization)


def _scale(config: DecoderConfig) -> float:
    """Returns the factor of scores, which grows with the length that YaRN stretches to."""
    scale: float = attention_widths(config)[0] ** -0.5
    if config.rope_type == "yarn" and config.rope_factor > 1:
        scale *= (0.1 * config.mscale * math.log(config.rope_factor) + 1.0) ** 2
    return scale
