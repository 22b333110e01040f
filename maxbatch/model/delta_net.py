"""A layer's gated delta rule in place of attention: projections, convolutions, the rule, a gated
norm, a projection.

References: Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464), section 3.4; the
decay is Mamba 2's (Dao and Gu 2024, https://arxiv.org/abs/2405.21060).

Shapes: M micro-batch, L length, D model; K key heads, H value heads, k and v widths of a key and a
value, W width of the convolution; while sampling, N layers, B rows, T new tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.combined import DecoderConfig
from maxbatch.families.matrices import MATRICES
from maxbatch.model.cache import NewTokens, Room, StateCache
from maxbatch.model.delta_rule import CHUNK_TOKENS, causal_convolution, gated_delta_rule
from maxbatch.model.norms import norm_of
from maxbatch.model.parameters import add_parameters
from maxbatch.model.products import features_last, product
from maxbatch.model.rope import Rope
from maxbatch.model.segments import Slots
from maxbatch.parallel.remat import kept
from maxbatch.parallel.sharding import Constrain


class _Projected(NamedTuple):
    """The products of the stream."""

    q_MxLxKxk: jax.Array
    k_MxLxKxk: jax.Array
    v_MxLxHxv: jax.Array
    gate_MxLxHxv: jax.Array
    log_decay_MxLxH: jax.Array  # float32, at most 0
    rate_MxLxH: jax.Array  # float32, in [0, 1]


class GatedDeltaNet(nnx.Module):
    """The gated delta rule of a layer. It takes no rotary positions: the decay and the convolutions
    tell them.
    """

    delta_query: nnx.Param[jax.Array]
    delta_key: nnx.Param[jax.Array]
    delta_value: nnx.Param[jax.Array]
    delta_gate: nnx.Param[jax.Array]
    delta_rate: nnx.Param[jax.Array]
    delta_decay: nnx.Param[jax.Array]
    convolved_query: nnx.Param[jax.Array]
    convolved_key: nnx.Param[jax.Array]
    convolved_value: nnx.Param[jax.Array]
    decay_scale: nnx.Param[jax.Array]  # logarithms
    decay_shift: nnx.Param[jax.Array]
    delta_out: nnx.Param[jax.Array]

    def __init__(self, config: DecoderConfig, name: str, *, rngs: nnx.Rngs, constrain: Constrain):
        add_parameters(self, config, name, rngs=rngs)
        self.delta_norm = norm_of(config, f"{name}.delta_norm", adds_one=False)
        self.constrain, self.quantization = constrain, config.quantization

    def __call__(
        self,
        x_MxLxD: jax.Array,
        tokens: Slots | NewTokens,
        rope: Rope | None,
        is_local: jax.Array | bool = False,
    ) -> tuple[jax.Array, StateCache | None]:
        """Returns the values that tokens read from their documents' states, projected, [M, L, D] in
        x's dtype, and the cache with new tokens in it; see `Attention`.
        """
        del rope, is_local
        projected = self._projected(x_MxLxD)
        if isinstance(tokens, NewTokens):
            read_MxLxHxv, cache = self._read_with_cache(projected, tokens)
            return self._joined(read_MxLxHxv, projected.gate_MxLxHxv), cache
        projected = self._whole(projected)
        read_MxLxHxv = self._read(projected, tokens.segments_MxL)
        joined_MxLxD = self._joined(read_MxLxHxv, projected.gate_MxLxHxv)
        return kept(features_last(joined_MxLxD, self.constrain), MATRICES["delta_out"].kept), None

    def _read(self, projected: _Projected, segments_MxL: jax.Array) -> jax.Array:
        """Returns the values that the tokens of whole rows read, [M, L, H, v]."""
        q, k, v = (
            jax.nn.silu(causal_convolution(x, kernel, segments_MxL))
            for x, kernel in zip(projected[:3], self._kernels, strict=True)
        )
        read_MxLxHxv, _ = gated_delta_rule(
            q, k, v, projected.log_decay_MxLxH, projected.rate_MxLxH, segments_MxL, CHUNK_TOKENS
        )
        return read_MxLxHxv

    def _read_with_cache(
        self, projected: _Projected, tokens: NewTokens
    ) -> tuple[jax.Array, StateCache]:
        """Returns the values that T more tokens of each row read, [B, T, H, v], and the cache with
        these tokens.

        Tokens at `cache.ends_B` and behind leave the states of their rows as they are.
        """
        positions_BxT, cache, layer = tokens
        assert isinstance(cache, StateCache), "layers of the gated delta rule have states"
        before = cache.layer(layer)
        ones_BxT = jnp.ones(positions_BxT.shape, jnp.int32)
        log_decay_BxTxH, rate_BxTxH = projected.log_decay_MxLxH, projected.rate_MxLxH
        if cache.ends_B is not None:
            is_read_BxTx1 = (positions_BxT < cache.ends_B[:, None])[..., None]
            log_decay_BxTxH, rate_BxTxH = (
                jnp.where(is_read_BxTx1, x, 0) for x in (log_decay_BxTxH, rate_BxTxH)
            )
        q, k, v = (
            jax.nn.silu(causal_convolution(x, kernel, ones_BxT, last))
            for x, kernel, last in zip(projected[:3], self._kernels, before.inputs, strict=True)
        )
        read_BxTxHxv, state_BxHxkxv = gated_delta_rule(
            q, k, v, log_decay_BxTxH, rate_BxTxH, ones_BxT, CHUNK_TOKENS, before.states_NxBxHxkxv
        )
        cache = cache.write(layer, positions_BxT, state_BxHxkxv, projected[:3])
        return read_BxTxHxv, cache

    def empty_cache(self, room: Room, dtype: jnp.dtype, constrain: Constrain) -> StateCache:
        """Returns an empty cache; the convolutions' inputs have the dtype, states are float32."""
        del constrain
        num_layers, num_rows = room.num_stacked, room.num_rows
        (K, k, width), (H, v) = self.convolved_query.shape[-3:], self.delta_value.shape[-2:]
        states = jnp.zeros((num_layers, num_rows, H, k, v), jnp.float32)
        states = self.constrain(states, (None, "batch", "delta_heads", None, None))

        def inputs(heads: str, *shape: int) -> jax.Array:
            zeros = jnp.zeros((num_layers, num_rows, width - 1, *shape), dtype)
            return self.constrain(zeros, (None, "batch", None, heads, None))

        keys = inputs("delta_key_heads", K, k)
        return StateCache(states, (keys, keys, inputs("delta_heads", H, v)), room.ends_B)

    @property
    def _kernels(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.convolved_query[...], self.convolved_key[...], self.convolved_value[...]

    def _projected(self, x_MxLxD: jax.Array) -> _Projected:
        def heads(name: str) -> jax.Array:
            out = product(
                x_MxLxD, getattr(self, f"delta_{name}")[...], "mld,dnh->mlnh", self.quantization
            )
            row = MATRICES[f"delta_{name}"]
            return kept(self.constrain(out, ("batch", "length", *row.outputs)), row.kept)

        def rates(name: str) -> jax.Array:
            # Few outputs, which set how fast states forget: never in 8 bits.
            out = product(
                x_MxLxD, getattr(self, f"delta_{name}")[...], "mld,dn->mln", out_dtype=jnp.float32
            )
            row = MATRICES[f"delta_{name}"]
            return kept(self.constrain(out, ("batch", "length", *row.outputs)), row.kept)

        scale_H, shift_H = (
            x[...].astype(jnp.float32)[None, None] for x in (self.decay_scale, self.decay_shift)
        )
        log_decay_MxLxH = -jnp.exp(scale_H) * jax.nn.softplus(rates("decay") + shift_H)
        products = heads("query"), heads("key"), heads("value"), heads("gate")
        return _Projected(*products, log_decay_MxLxH, jax.nn.sigmoid(rates("rate")))

    def _whole(self, projected: _Projected) -> _Projected:
        """Returns the products with whole rows on each device of a context axis: a state needs all
        tokens before.
        """
        heads, rates = ("batch", None, "delta_heads", None), ("batch", None, "delta_heads")
        keys = ("batch", None, "delta_key_heads", None)
        return projected._replace(
            q_MxLxKxk=self.constrain(projected.q_MxLxKxk, keys),
            k_MxLxKxk=self.constrain(projected.k_MxLxKxk, keys),
            v_MxLxHxv=self.constrain(projected.v_MxLxHxv, heads),
            log_decay_MxLxH=self.constrain(projected.log_decay_MxLxH, rates),
            rate_MxLxH=self.constrain(projected.rate_MxLxH, rates),
        )

    def _joined(self, read_MxLxHxv: jax.Array, gate_MxLxHxv: jax.Array) -> jax.Array:
        gated = self.delta_norm(read_MxLxHxv) * jax.nn.silu(gate_MxLxHxv.astype(jnp.float32))
        gated_MxLxHxv = self.constrain(
            gated.astype(gate_MxLxHxv.dtype), ("batch", "length", *MATRICES["delta_value"].outputs)
        )
        return product(gated_MxLxHxv, self.delta_out[...], "mlnh,nhd->mld", self.quantization)
