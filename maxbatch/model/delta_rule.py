"""A layer's gated delta rule in place of attention: projections, convolutions, the rule, a gated
norm, a projection; and the rule itself, by which a state per head reads and writes like a memory of
fixed size.

Per token t of a document the state S, [k, v], first decays, then moves what it has stored under the
key towards the value, and is read with the query:

    S = exp(g) S;  S = S + b k (v - S^T k)^T;  o = S^T q

g <= 0 is the logarithm of the decay, b in [0, 1] the rate of writing. Reference: Yang et al. 2024,
Gated Delta Networks (https://arxiv.org/abs/2412.06464), section 3; chunks as in their equations 8
to 10 and Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule
(https://arxiv.org/abs/2406.06484). The layer is Gated DeltaNet's (section 3.4 of the first); its decay
is Mamba 2's (Dao and Gu 2024, https://arxiv.org/abs/2405.21060).

In packed rows every document begins with an empty state. Another document of the row enters an
output as a term of exactly 0, so its tokens change no bit of it; its length moves the borders of
the chunks, and sums in another order.

Shapes: M micro-batch, L length, D model, C channels, W width of the convolution; K key heads, H value
heads, each key head for H / K neighbours, k and v widths of a key and of a value; N chunks of c
tokens; while sampling, N layers, B rows, T new tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.combined import DecoderConfig
from maxbatch.families.matrices import MATRICES
from maxbatch.model.cache import NewTokens, Room, StateCache
from maxbatch.model.norms import norm_of
from maxbatch.model.parameters import add_parameters
from maxbatch.model.products import features_last, product
from maxbatch.model.rope import Rope
from maxbatch.model.segments import Slots
from maxbatch.parallel.remat import kept
from maxbatch.parallel.sharding import Constrain

# The tokens of a chunk in transformers, and by default in MaxText. Their number changes the order
# of sums alone.
CHUNK_TOKENS = 64
_EPSILON = 1e-6  # under the root of a query's or key's length


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


def causal_convolution(
    x_MxLxC: jax.Array,
    kernel_CxW: jax.Array,
    segments_MxL: jax.Array,
    before_MxWxC: jax.Array | None = None,
) -> jax.Array:
    """Returns each channel's sum over the last W tokens of the document, [M, L, C], in x's dtype.

    Args:
      x_MxLxC: the inputs; channels may have several axes.
      kernel_CxW: the weights; the last is that of the token itself.
      segments_MxL: the document of each token; tokens of others, and those before the first one,
        count as 0.
      before_MxWxC: the W - 1 tokens before the first one, of its document; None: the document
        begins there.
    """
    width, (rows, length, *channels) = kernel_CxW.shape[-1], x_MxLxC.shape
    kernel_CxW = kernel_CxW.astype(x_MxLxC.dtype)[None, None]
    outside = (
        segments_MxL[:, :1] if before_MxWxC is not None else jnp.full_like(segments_MxL[:, :1], -1)
    )
    if before_MxWxC is None:
        before_MxWxC = jnp.zeros((rows, width - 1, *channels), x_MxLxC.dtype)
    x = jnp.concatenate([before_MxWxC.astype(x_MxLxC.dtype), x_MxLxC], axis=1)
    segments = jnp.concatenate([jnp.repeat(outside, width - 1, axis=1), segments_MxL], axis=1)
    total = x_MxLxC * kernel_CxW[..., -1]
    for back in range(1, width):
        shifted = slice(width - 1 - back, width - 1 - back + length)
        is_same = (segments[:, shifted] == segments_MxL).reshape(rows, length, *[1] * len(channels))
        total += jnp.where(is_same, x[:, shifted], 0) * kernel_CxW[..., -1 - back]
    return total


def gated_delta_rule(
    q_MxLxKxk: jax.Array,
    k_MxLxKxk: jax.Array,
    v_MxLxHxv: jax.Array,
    log_decay_MxLxH: jax.Array,
    rate_MxLxH: jax.Array,
    segments_MxL: jax.Array,
    chunk_size: int,
    state_MxHxkxv: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the value that each token reads, float32[M, L, H, v], and the state after the last
    token, float32[M, H, k, v].

    Queries and keys are normalised to length 1, and queries divided by the root of their width. All
    is computed in float32, the products at its full precision: the solution of a chunk's triangular
    system would amplify the rounding of shorter types. With chunks of one token it is the
    recurrence itself.

    Args:
      log_decay_MxLxH: float32, at most 0; where it and the rate are 0 a token leaves the state as
        it is.
      rate_MxLxH: float32 in [0, 1].
      segments_MxL: the document of each token; the tokens of one are neighbours.
      chunk_size: the most tokens whose writes are solved together.
      state_MxHxkxv: the state of the first token's document before it; None: the document begins
        there.
    """
    length, chunk_size = q_MxLxKxk.shape[1], min(chunk_size, q_MxLxKxk.shape[1])
    groups = v_MxLxHxv.shape[2] // k_MxLxKxk.shape[2]
    q_MxLxKxk, k_MxLxKxk = (
        _normalised(q_MxLxKxk) * q_MxLxKxk.shape[3] ** -0.5,
        _normalised(k_MxLxKxk),
    )
    is_going_on = state_MxHxkxv is not None
    if state_MxHxkxv is None:
        rows, heads, widths = (
            v_MxLxHxv.shape[0],
            v_MxLxHxv.shape[2],
            (k_MxLxKxk.shape[3], v_MxLxHxv.shape[3]),
        )
        state_MxHxkxv = jnp.zeros((rows, heads, *widths), jnp.float32)

    def chunks(x_MxLxH: jax.Array, repeats: int = 1) -> jax.Array:
        """Returns [M, L, H, ...] as float32[N, M, H, c, ...], the last chunk filled with tokens
        that change nothing.
        """
        x = jnp.repeat(x_MxLxH.astype(jnp.float32), repeats, axis=2)
        x = jnp.pad(x, [(0, 0), (0, -length % chunk_size), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    segments_MxL = jnp.pad(segments_MxL, [(0, 0), (0, -length % chunk_size)], mode="edge")
    segments_NxMxc = segments_MxL.reshape(segments_MxL.shape[0], -1, chunk_size).swapaxes(0, 1)
    with jax.default_matmul_precision("highest"):
        solved = _solved(
            chunks(q_MxLxKxk, groups),
            chunks(k_MxLxKxk, groups),
            chunks(v_MxLxHxv),
            chunks(log_decay_MxLxH),
            chunks(rate_MxLxH),
            _Documents.of(segments_NxMxc, is_going_on),
        )
        last_MxHxkxv, o_NxMxHxcxv = jax.lax.scan(_chunk, state_MxHxkxv.astype(jnp.float32), solved)
    o_MxNxcxHxv = jnp.moveaxis(o_NxMxHxcxv, (0, 2), (1, 3))
    return o_MxNxcxHxv.reshape(o_MxNxcxHxv.shape[0], -1, *o_MxNxcxHxv.shape[3:])[
        :, :length
    ], last_MxHxkxv


def _normalised(x_MxLxKxk: jax.Array) -> jax.Array:
    x = x_MxLxKxk.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPSILON)


class _Documents(NamedTuple):
    """Which tokens of chunks belong together, each bool with an axis for the heads."""

    sees_NxMx1xcxc: jax.Array  # a token of the same document, itself or before
    began_before_NxMx1xc: jax.Array  # whether the token's document goes on from the chunk before
    goes_on_NxMx1xc: jax.Array  # whether it is that of the chunk's last token

    @classmethod
    def of(cls, segments_NxMxc: jax.Array, is_going_on: bool) -> _Documents:
        """Returns them for chunks of rows; `is_going_on`: the first document has a state before the
        first token.
        """
        size = segments_NxMxc.shape[2]
        is_same = segments_NxMxc[..., :, None] == segments_NxMxc[..., None, :]
        sees = is_same & jnp.tril(jnp.ones((size, size), bool))[None, None]
        last_NxMx1 = segments_NxMxc[..., -1:]
        is_first = (
            segments_NxMxc[:1] == segments_NxMxc[:1, :, :1]
            if is_going_on
            else jnp.zeros_like(sees[:1, ..., 0])
        )
        began_before = jnp.concatenate([is_first, segments_NxMxc[1:] == last_NxMx1[:-1]])
        return cls(
            sees[:, :, None], began_before[:, :, None], (segments_NxMxc == last_NxMx1)[:, :, None]
        )


class _Chunks(NamedTuple):
    """Terms of each chunk that do not depend on the incoming state."""

    written_NxMxHxcxv: jax.Array  # what tokens write if the incoming state is 0
    reading_NxMxHxcxk: jax.Array  # coefficient of that state in each write
    q_NxMxHxcxk: jax.Array  # queries to it, decayed
    scores_NxMxHxcxc: jax.Array  # of queries with the keys of the chunk, decayed
    k_NxMxHxcxk: jax.Array  # keys, decayed to the end of the chunk
    decay_NxMxH: jax.Array  # of that state over the chunk


def _solved(
    q_NxMxHxcxk: jax.Array,
    k_NxMxHxcxk: jax.Array,
    v_NxMxHxcxv: jax.Array,
    log_decay_NxMxHxc: jax.Array,
    rate_NxMxHxc: jax.Array,
    documents: _Documents,
) -> _Chunks:
    """Solves the triangular system of each chunk: what a token writes depends on what those before
    it have written.
    """
    sees, began_before, goes_on = documents
    # The decay of each token's document since it or the chunk began. Summed per document, no other
    # one rounds it.
    since_NxMxHxc = jnp.sum(jnp.where(sees, log_decay_NxMxHxc[..., None, :], 0), axis=-1)
    between_NxMxHxcxc = jnp.exp(
        jnp.where(sees, since_NxMxHxc[..., None] - since_NxMxHxc[..., None, :], -jnp.inf)
    )
    into_NxMxHxc = jnp.where(began_before, jnp.exp(since_NxMxHxc), 0)
    onwards_NxMxHxc = jnp.exp(jnp.where(goes_on, since_NxMxHxc[..., -1:] - since_NxMxHxc, -jnp.inf))

    written, reading = (
        v_NxMxHxcxv * rate_NxMxHxc[..., None],
        k_NxMxHxcxk * (rate_NxMxHxc * into_NxMxHxc)[..., None],
    )
    if k_NxMxHxcxk.shape[-2] > 1:
        overlap = jnp.einsum(
            "...ck,...dk->...cd", k_NxMxHxcxk * rate_NxMxHxc[..., None], k_NxMxHxcxk
        )
        solved = jax.lax.linalg.triangular_solve(
            overlap * between_NxMxHxcxc,
            jnp.concatenate([written, reading], axis=-1),
            left_side=True,
            lower=True,
            unit_diagonal=True,
        )
        written, reading = jnp.split(solved, [written.shape[-1]], axis=-1)
    scores = jnp.einsum("...ck,...dk->...cd", q_NxMxHxcxk, k_NxMxHxcxk) * between_NxMxHxcxc
    q, k = q_NxMxHxcxk * into_NxMxHxc[..., None], k_NxMxHxcxk * onwards_NxMxHxc[..., None]
    return _Chunks(written, reading, q, scores, k, into_NxMxHxc[..., -1])


def _chunk(state_MxHxkxv: jax.Array, terms: _Chunks) -> tuple[jax.Array, jax.Array]:
    """Returns the state after a chunk, and what its tokens read, [M, H, c, v]."""
    written, reading, q_MxHxcxk, scores_MxHxcxc, k_MxHxcxk, decay_MxH = terms
    written_MxHxcxv = written - jnp.einsum("...ck,...kv->...cv", reading, state_MxHxkxv)
    read_MxHxcxv = jnp.einsum("...ck,...kv->...cv", q_MxHxcxk, state_MxHxkxv)
    read_MxHxcxv += jnp.einsum("...cd,...dv->...cv", scores_MxHxcxc, written_MxHxcxv)
    state_MxHxkxv = state_MxHxkxv * decay_MxH[..., None, None]
    return state_MxHxkxv + jnp.einsum(
        "...ck,...cv->...kv", k_MxHxcxk, written_MxHxcxv
    ), read_MxHxcxv
