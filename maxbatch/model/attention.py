"""Grouped-query attention: causal, within the documents of a packed row, and in local layers within
a window.

Shapes: M micro-batch, L length, D model, H query heads, K key and value heads, h head_dim; while
sampling, B rows, T new tokens, G = H / K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from maxbatch.config.combined import DecoderConfig
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.attention import GroupedAttention
from maxbatch.families.matrices import MATRICES
from maxbatch.model.cache import Cache, NewTokens, Room
from maxbatch.model.norms import Norm, norm_of, of_unit_size, unchanged
from maxbatch.model.parameters import add_parameters
from maxbatch.model.products import features_last, join_heads, product
from maxbatch.model.ring_attention import ring_attend
from maxbatch.model.rope import Rope, apply_rope, neighbours_apart
from maxbatch.model.scores import PLAIN, ScoreRules, growth_at, soft_capped
from maxbatch.model.segments import Slots, places_in_segments
from maxbatch.model.splash import splash_attend
from maxbatch.parallel.remat import kept
from maxbatch.parallel.sharding import (
    OVER_HEADS,
    Constrain,
    LogicalAxes,
    num_shards,
    unconstrained,
)
from maxbatch.plan.program import Kernel, attention_rules
from maxbatch.system.errors import ConfigError

_BLOCK_TOKENS = 128  # of a prompt that are read at a time


def choose_implementation(config: DecoderConfig, platform: str, context: int) -> Kernel:
    """Returns the implementation on a platform ("cpu", "gpu" or "tpu") whose context axis has that
    size.

    Raises:
      ConfigError: the platform or the shapes do not allow what `attention` states.
    """
    platforms: dict[Kernel, tuple[str, str]]
    platforms = {"splash": ("tpu", "run on TPUs"), "cudnn": ("gpu", "run on NVIDIA GPUs")}
    rules = {
        name: list(checks)
        for name, checks in attention_rules(config, config.max_target_length, context).items()
    }
    for name, (needed, words) in platforms.items():
        rules[name].insert(0, (platform == needed, f"{words}, and the devices are {platform}"))
    broken = {name: [rule for holds, rule in checks if not holds] for name, checks in rules.items()}
    best = next(name for name in rules if not broken[name])
    if config.attention == "auto":
        return best
    if broken[config.attention]:
        raise ConfigError(
            f"attention={config.attention}: must {broken[config.attention][0]}; works: "
            f"attention=auto (here {best})"
        )
    return config.attention


def implementation_on(config: DecoderConfig, constrain: Constrain) -> Kernel:
    """Returns the implementation on a mesh; the plain one without a mesh, to inspect a model or
    sample from it.
    """
    if constrain.mesh is None:
        return "dot_product"
    return choose_implementation(config, constrain.platform, constrain.mesh.shape.get("context", 1))


def rules_on(config: DecoderConfig, rules: ScoreRules, constrain: Constrain) -> ScoreRules:
    """Returns the rules of scores with the strategy for rows that a mesh splits."""
    if constrain.mesh is None or constrain.mesh.shape.get("context", 1) == 1:
        return rules
    return rules._replace(
        strategy=config.context_parallel_strategy,
        is_balanced=config.context_parallel_load_balance,
    )


def in_ring(shape: tuple[int, ...], scores: ScoreRules, constrain: Constrain) -> bool:
    """Returns whether queries of a shape [M, L, H, h] are attended in a ring.

    Scoring has rows of any length, also of one that the context axis does not divide.
    """
    of_heads = ("batch", "length", "heads", "head_dim")
    return scores.strategy == "ring" and constrain.spec(shape, of_heads)[1] is not None


def attend(
    q_MxLxHxh: jax.Array,
    k_MxLxKxh: jax.Array,
    v_MxLxKxh: jax.Array,
    segments_MxL: jax.Array,
    scores: ScoreRules = PLAIN,
    constrain: Constrain = unconstrained,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns causal attention within segments, [M, L, H, h] in q's dtype, with softmax in float32.

    A token sees itself and the tokens before it of its own segment, and only those; in a local
    layer only the nearest `scores.window`. Query head i reads key head i // (H / K) (Ainslie et al.
    2023, https://arxiv.org/abs/2305.13245). Queries and keys come rotated. With sinks a head may
    attend to a score of its own in place of tokens (Xiao et al. 2023,
    https://arxiv.org/abs/2309.17453; as gpt-oss has it). Values may be narrower than keys, and so
    is the result.
    """
    if in_ring(q_MxLxHxh.shape, scores, constrain):
        return ring_attend(
            q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, segments_MxL, constrain, scores, sinks_H
        )
    if scores.strategy == "ulysses":
        return attend_by_heads(
            q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, segments_MxL, constrain, scores, sinks_H
        )
    if scores.implementation == "splash" and sinks_H is None:
        return splash_attend(q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, segments_MxL, constrain, scores)
    mask = (segments_MxL[:, :, None] == segments_MxL[:, None, :])[:, None, :, :]
    if scores.is_local is not False:
        places_L = jnp.arange(q_MxLxHxh.shape[1])
        mask &= scores.in_window((places_L[:, None] - places_L[None, :])[None, None])
    num_values = v_MxLxKxh.shape[-1]

    if scores.soft_cap or sinks_H is not None:
        return _attend_plainly(q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, mask, scores, sinks_H)
    if scores.implementation == "cudnn":
        # Repeated over the heads, because the batching rule of JAX 0.10 accepts no other mask under
        # `jax.vmap`.
        mask = jnp.repeat(mask, q_MxLxHxh.shape[2], axis=1)
    if num_values < q_MxLxHxh.shape[-1]:  # JAX's function takes one width
        v_MxLxKxh = jnp.pad(v_MxLxKxh, [*[(0, 0)] * 3, (0, q_MxLxHxh.shape[-1] - num_values)])
    return jax.nn.dot_product_attention(
        q_MxLxHxh,
        k_MxLxKxh,
        v_MxLxKxh,
        mask=mask,
        is_causal=True,
        scale=scores.scale,
        implementation="cudnn" if scores.implementation == "cudnn" else "xla",
    )[..., :num_values]


def attend_by_heads(
    q_MxLxHxh: jax.Array,
    k_MxLxKxh: jax.Array,
    v_MxLxKxh: jax.Array,
    segments_MxL: jax.Array,
    constrain: Constrain,
    scores: ScoreRules,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Returns what `attend` does, of rows that are split over the context axis: every device
    attends with some heads of whole rows.

    Two all-to-alls exchange the split of the length for one of the heads, and back (DeepSpeed
    Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509). Key heads that are too few for
    it are repeated.
    """
    assert constrain.mesh is not None, "rows are split over devices"
    shards = num_shards(constrain.mesh, ("tensor", "context"))
    repeats = shards // math.gcd(k_MxLxKxh.shape[2], shards)
    if repeats > 1:
        k_MxLxKxh, v_MxLxKxh = (jnp.repeat(x, repeats, axis=2) for x in (k_MxLxKxh, v_MxLxKxh))

    def exchanged(x_MxLxHxh: jax.Array) -> jax.Array:
        # Named where its rows are, too: the compiler would gather rows to repeat heads, and exchange
        # both parts of a rotation in place of their sum.
        rows = constrain(x_MxLxHxh, ("batch", "length", "heads", "head_dim"))
        return constrain(rows, ("batch", None, OVER_HEADS, "head_dim"))

    q, k, v = map(exchanged, (q_MxLxHxh, k_MxLxKxh, v_MxLxKxh))
    segments = constrain(segments_MxL, ("batch", None))
    whole = scores._replace(strategy="all_gather")
    attended = attend(q, k, v, segments, whole, _of_whole_rows(constrain), sinks_H)
    attended = constrain(attended, ("batch", None, OVER_HEADS, "head_dim"))
    return constrain(attended, ("batch", "length", "heads", "head_dim"))


def _of_whole_rows(constrain: Constrain) -> Constrain:
    """Returns the constraint inside of attention whose heads are split in place of rows."""
    names: dict[str | None, str | None] = {
        "length": None,
        "heads": OVER_HEADS,
        "kv_heads": OVER_HEADS,
    }

    def spec(shape: tuple[int, ...], axes: LogicalAxes) -> PartitionSpec:
        return constrain.spec(shape, tuple(names.get(axis, axis) for axis in axes))

    return Constrain(constrain.mesh, spec)


def _attend_plainly(
    q_MxLxHxh: jax.Array,
    k_MxLxKxh: jax.Array,
    v_MxLxKxh: jax.Array,
    mask_Mx1xLxL: jax.Array,
    scores: ScoreRules,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Returns causal attention with soft-capped scores or sinks, which JAX's own function does not
    know.
    """
    rows, length, heads, head_dim = q_MxLxHxh.shape
    kv_heads = k_MxLxKxh.shape[2]
    q_MxLxKxGxh = q_MxLxHxh.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum(
        "mqkgh,mlkh->mkgql", q_MxLxKxGxh, k_MxLxKxh, preferred_element_type=jnp.float32
    )
    logits = soft_capped(logits * (scores.scale or head_dim**-0.5), scores.soft_cap)
    visible = mask_Mx1xLxL & jnp.tril(jnp.ones((length, length), bool))[None, None]
    weights_MxKxGxLxL = _softmax(jnp.where(visible[:, :, None], logits, -jnp.inf), sinks_H).astype(
        v_MxLxKxh.dtype
    )
    return jnp.einsum("mkgql,mlkh->mqkgh", weights_MxKxGxLxL, v_MxLxKxh).reshape(
        rows, length, heads, -1
    )


def _softmax(logits_MxKxGxLxL: jax.Array, sinks_H: jax.Array | None) -> jax.Array:
    """Returns the softmax over the last axis, to whose sum each head's sink adds."""
    if sinks_H is None:
        return jax.nn.softmax(logits_MxKxGxLxL)
    sinks = sinks_H.astype(jnp.float32).reshape(1, *logits_MxKxGxLxL.shape[1:3], 1, 1)
    # The largest score is taken off against overflow; it cancels, so it needs no gradient.
    peak = jax.lax.stop_gradient(
        jnp.maximum(jnp.max(logits_MxKxGxLxL, axis=-1, keepdims=True), sinks)
    )
    exp = jnp.exp(logits_MxKxGxLxL - peak)
    return exp / (jnp.sum(exp, axis=-1, keepdims=True) + jnp.exp(sinks - peak))


def attend_to_cache(
    q_BxTxHxh: jax.Array,
    cache: Cache,
    positions_BxT: jax.Array,
    scores: ScoreRules = PLAIN,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention of each token to the slots up to its own, as `attend` does: [B, T, H,
    h] in q's dtype.

    The cache is of one layer (`Cache.layer`). The slots of a prompt are read once for all rows
    behind it. Many tokens are processed in blocks, so that only the scores of one block are in
    memory.
    """
    rows, tokens, heads, head_dim = q_BxTxHxh.shape
    if tokens > _BLOCK_TOKENS:
        more = -tokens % _BLOCK_TOKENS

        def blocks(array: jax.Array) -> jax.Array:
            padded = jnp.pad(array, [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)])
            return padded.reshape(rows, -1, _BLOCK_TOKENS, *array.shape[2:]).swapaxes(0, 1)

        def attended_of(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            return attend_to_cache(block[0], cache, block[1], scores, sinks_H)

        blocks_attended: jax.Array = jax.lax.map(
            attended_of, (blocks(q_BxTxHxh), blocks(positions_BxT))
        )
        return blocks_attended.swapaxes(0, 1).reshape(rows, tokens + more, heads, -1)[:, :tokens]

    kv_heads = cache.keys_NxBxKxLxh.shape[1]
    q_BxTxKxGxh = q_BxTxHxh.reshape(rows, tokens, kv_heads, heads // kv_heads, head_dim)
    logits, visible_BxTxL = _cache_logits(q_BxTxKxGxh, cache, positions_BxT, scores)
    logits = soft_capped(logits * (scores.scale or head_dim**-0.5), scores.soft_cap)
    logits = jnp.where(visible_BxTxL[:, None, None], logits, -jnp.inf)
    weights_BxKxGxTxL = _softmax(logits, sinks_H).astype(cache.values_NxBxKxLxh.dtype)
    attended = _cache_values(weights_BxKxGxTxL, cache)
    return attended.reshape(*q_BxTxHxh.shape[:-1], attended.shape[-1])


def _cache_logits(
    q_BxTxKxGxh: jax.Array, cache: Cache, positions_BxT: jax.Array, scores: ScoreRules
) -> tuple[jax.Array, jax.Array]:
    """Returns the products with the keys, float32[B, K, G, T, L], and which slots a token sees,
    bool[B, T, L].

    L are the slots of the prompt, where there is one, and then those of the row.
    """
    k_BxKxLxh = cache.keys_NxBxKxLxh
    logits = jnp.einsum(
        "btkgh,bklh->bkgtl", q_BxTxKxGxh, k_BxKxLxh, preferred_element_type=jnp.float32
    )
    slots_BxL = jnp.arange(k_BxKxLxh.shape[2])[None]
    is_held_BxL = jnp.ones_like(slots_BxL, bool)

    # The slots of a shared prompt come first; those behind a row's own prompt are empty.
    if cache.prompts is not None:
        assert cache.starts_B is not None, "rows behind a prompt have a start"
        k_QxKxPxh, starts_Bx1 = cache.prompts.keys_NxBxKxLxh, cache.starts_B[:, None]
        q_QxSxTxKxGxh = q_BxTxKxGxh.reshape(k_QxKxPxh.shape[0], -1, *q_BxTxKxGxh.shape[1:])
        before = jnp.einsum(
            "qstkgh,qkph->qskgtp", q_QxSxTxKxGxh, k_QxKxPxh, preferred_element_type=jnp.float32
        )
        logits = jnp.concatenate([before.reshape(*logits.shape[:-1], -1), logits], axis=-1)
        slots_1xP = jnp.arange(k_QxKxPxh.shape[2])[None]
        is_held_BxP = slots_1xP < starts_Bx1
        own_BxL = starts_Bx1 + slots_BxL
        slots_BxL = jnp.concatenate(
            [jnp.broadcast_to(slots_1xP, is_held_BxP.shape), own_BxL], axis=1
        )
        is_held_BxL = jnp.concatenate([is_held_BxP, jnp.ones_like(own_BxL, bool)], axis=1)

    distances_BxTxL = positions_BxT[:, :, None] - slots_BxL[:, None]
    visible_BxTxL = is_held_BxL[:, None] & (distances_BxTxL >= 0)
    if scores.is_local is not False:
        visible_BxTxL &= scores.in_window(distances_BxTxL, positions_BxT[:, :, None])
    return logits, visible_BxTxL


def _cache_values(weights_BxKxGxTxL: jax.Array, cache: Cache) -> jax.Array:
    """Returns the weighted sums of values, [B, T, K, G, h]."""
    v_BxKxLxh = cache.values_NxBxKxLxh
    weights_of_row = weights_BxKxGxTxL[..., -v_BxKxLxh.shape[2] :]
    summed = jnp.einsum("bkgtl,bklh->btkgh", weights_of_row, v_BxKxLxh)
    if cache.prompts is not None:
        v_QxKxPxh = cache.prompts.values_NxBxKxLxh
        before = weights_BxKxGxTxL[..., : v_QxKxPxh.shape[2]]
        before = before.reshape(v_QxKxPxh.shape[0], -1, *before.shape[1:])
        summed += jnp.einsum("qskgtp,qkph->qstkgh", before, v_QxKxPxh).reshape(summed.shape)
    return summed


class KeysValues(NamedTuple):
    """The keys of a layer, normalised and rotated, and its values."""

    k_MxLxKxh: jax.Array
    v_MxLxKxh: jax.Array


class Attention(nnx.Module):
    """Causal grouped-query self-attention. Source: LLaMA (Touvron et al. 2023) with the GQA of
    LLaMA 2.

    Queries and keys may be normalised before they are rotated (Henry et al. 2020,
    https://arxiv.org/abs/2010.04245).
    """

    query: nnx.Param[jax.Array]
    key: nnx.Param[jax.Array]  # if the layer has keys and values of its own
    value: nnx.Param[jax.Array]  # if keys are not the values, before their norms and RoPE
    out: nnx.Param[jax.Array]
    sinks: nnx.Param[jax.Array]  # if the family has them
    # if it has one: multiplies the output by the sigmoid of its product
    query_gate: nnx.Param[jax.Array]

    def __init__(self, config: DecoderConfig, name: str, *, rngs: nnx.Rngs, constrain: Constrain):
        add_parameters(self, config, name, rngs=rngs)
        form = FAMILIES[config.decoder_block].attention
        assert isinstance(form, GroupedAttention), "this class computes that form"
        self.query_norm, self.key_norm = (
            norm_of(config, f"{name}.{part}_norm") for part in ("query", "key")
        )
        self.epsilon = config.normalization_layer_epsilon
        self.value_norm = (
            partial(of_unit_size, epsilon=self.epsilon) if form.has_value_norm else unchanged
        )
        scale = config.query_pre_attn_scalar and config.query_pre_attn_scalar**-0.5
        if config.query_weights_scaled:
            scale = 1.0
        rules: type[ScoreRules] = form.scores_class(config)
        self.scores = rules_on(
            config, rules(scale, config.attn_logits_soft_cap, form.window(config)), constrain
        )
        self.rotates_neighbours = form.rotates_neighbours
        self.norms_rotated = config.use_qk_norm and form.qk_norm_over == "rotated"
        self.grows = config.temperature_tuning
        self.constrain, self.quantization = constrain, config.quantization
        self.implementation = implementation_on(config, constrain)

    def __call__(
        self,
        x_MxLxD: jax.Array,
        tokens: Slots | NewTokens,
        rope: Rope | None,
        is_local: jax.Array | bool = False,
        shared: KeysValues | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the attention output, [M, L, D] in x's dtype, and the cache with new tokens in
        it.

        Args:
          tokens: those of whole rows, which have no cache, or new ones.
          shared: the keys and values of whole rows; None: they are made of x.
        """
        if isinstance(tokens, NewTokens):
            attended_MxLxHxh, cache = self._attended_with_cache(x_MxLxD, tokens, rope, is_local)
            return self._joined(attended_MxLxHxh, x_MxLxD), cache
        attended_MxLxHxh = self._attended(x_MxLxD, tokens.segments_MxL, rope, is_local, shared)
        joined_MxLxD = self._joined(attended_MxLxHxh, x_MxLxD)
        return kept(features_last(joined_MxLxD, self.constrain), MATRICES["out"].kept), None

    def _attended(
        self,
        x_MxLxD: jax.Array,
        segments_MxL: jax.Array,
        rope: Rope | None,
        is_local: jax.Array | bool,
        shared: KeysValues | None,
    ) -> jax.Array:
        """Returns the values that the heads of whole rows attend to, [M, L, H, h]."""
        scores = self.scores._replace(is_local=is_local, implementation=self.implementation)
        factor = 1.0
        # its kernel takes scaled queries: rounded once
        if rope is not None and self.implementation == "splash":
            factor, scores = (
                scores.scale or self.query.shape[-1] ** -0.5,
                scores._replace(scale=1.0),
            )
        k, v = self.keys_values(x_MxLxD, rope) if shared is None else shared
        q = self._queries(x_MxLxD, rope, partial(places_in_segments, segments_MxL), factor)
        segments_MxL = scores.seen_by(segments_MxL)
        return attend(q, k, v, segments_MxL, scores, self.constrain, self._sinks)

    def _attended_with_cache(
        self, x_BxTxD: jax.Array, tokens: NewTokens, rope: Rope | None, is_local: jax.Array | bool
    ) -> tuple[jax.Array, Cache]:
        """Returns the values that the heads of T more tokens of each row attend to, [B, T, H, h],
        and the cache with the tokens in it.

        It is the plain implementation, whatever the model was trained with. The tables of the
        positions are [B, T, h/2] each. A layer without keys of its own reads the slots that another
        one wrote.
        """
        positions_BxT, cache, layer = tokens
        assert isinstance(cache, Cache), "attention has slots"
        if hasattr(self, "key"):
            cache = cache.write(layer, positions_BxT, *self.keys_values(x_BxTxD, rope))
        q = self._queries(x_BxTxD, rope, lambda: positions_BxT)
        scores = self.scores._replace(is_local=is_local)
        attended_BxTxHxh = attend_to_cache(
            q, cache.layer(layer), positions_BxT, scores, self._sinks
        )
        return attended_BxTxHxh, cache

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """The heads of keys and values in a cache, and their widths."""
        kv_heads, head_dim = self.key.shape[-2:]
        return kv_heads, head_dim, head_dim

    def empty_cache(self, room: Room, dtype: jnp.dtype, constrain: Constrain) -> Cache:
        """Returns a cache without tokens."""
        kv_heads, *widths = self.cache_shape
        return room.slots(kv_heads, (widths[0], widths[1]), dtype, constrain)

    @property
    def _sinks(self) -> jax.Array | None:
        return self.sinks[...] if hasattr(self, "sinks") else None

    def keys_values(self, x_MxLxD: jax.Array, rope: Rope | None) -> KeysValues:
        """Returns the keys and values that it makes of x."""
        keys_MxLxKxh = self._heads("key", x_MxLxD, rope, self.key_norm)
        values_MxLxKxh = (
            self._heads("value", x_MxLxD, rope, self.value_norm)
            if hasattr(self, "value")
            else keys_MxLxKxh
        )
        k_MxLxKxh = self._rotated("key", keys_MxLxKxh, rope, self.key_norm)
        if self.value_norm is unchanged:
            return KeysValues(k_MxLxKxh, kept(values_MxLxKxh, MATRICES["value"].kept))
        return KeysValues(k_MxLxKxh, self.value_norm(values_MxLxKxh))

    def _queries(
        self,
        x_MxLxD: jax.Array,
        rope: Rope | None,
        places: Callable[[], jax.Array],
        factor: float = 1.0,
    ) -> jax.Array:
        """Returns rotated queries, times `factor`.

        Args:
          places: returns the places of the tokens in their documents, int32[M, L].
        """
        heads_MxLxHxh = self._heads("query", x_MxLxD, rope, self.query_norm)
        q_MxLxHxh = self._rotated("query", heads_MxLxHxh, rope, self.query_norm, factor)
        if self.grows and rope is None:
            q_MxLxHxh = (growth_at(places())[:, :, None, None] * q_MxLxHxh).astype(x_MxLxD.dtype)
        return q_MxLxHxh

    def _heads(self, name: str, x_MxLxD: jax.Array, rope: Rope | None, norm: Norm) -> jax.Array:
        def weight(name: str) -> Any:
            array = getattr(self, name)[...]
            turns = self.rotates_neighbours and rope is not None and not name.startswith("value")
            return neighbours_apart(array, array.shape[-1]) if turns else array

        out = product(x_MxLxD, weight(name), "mld,dnh->mlnh", self.quantization)
        if hasattr(self, f"{name}_bias"):
            bias = weight(f"{name}_bias").astype(x_MxLxD.dtype)
            # It adds one constant to all scores of a query, which softmax ignores. Its gradient is
            # rounding error, which an optimizer such as Adam would turn into whole steps.
            is_shift = norm is unchanged and rope is None  # the key moves by the same everywhere
            blind = name == "key" and is_shift and self._sinks is None and not self.scores.soft_cap
            out += (jax.lax.stop_gradient(bias) if blind else bias)[None, None]
        out = self.constrain(out, ("batch", "length", *MATRICES[name].outputs))
        # The gradient of a norm needs its input: without it the product would be computed again.
        return out if norm is unchanged else kept(out, MATRICES[name].kept)

    def _rotated(
        self, name: str, x_MxLxHxh: jax.Array, rope: Rope | None, norm: Norm, factor: float = 1.0
    ) -> jax.Array:
        x_MxLxHxh = norm(x_MxLxHxh)
        if rope is not None and self.norms_rotated:  # its gradient needs its input
            turned = apply_rope(kept(x_MxLxHxh, MATRICES[name].kept), rope, self.constrain.platform)
            return of_unit_size(turned, self.epsilon, factor)
        if rope is not None:
            x_MxLxHxh = apply_rope(x_MxLxHxh, rope, self.constrain.platform, factor)
        return kept(x_MxLxHxh, MATRICES[name].kept) if norm is unchanged else x_MxLxHxh

    def _joined(self, attended_MxLxHxh: jax.Array, x_MxLxD: jax.Array) -> jax.Array:
        if hasattr(self, "query_gate"):
            gate_MxLxHxh = product(
                x_MxLxD, self.query_gate[...], "mld,dnh->mlnh", self.quantization
            )
            if hasattr(self, "query_gate_bias"):
                gate_MxLxHxh += self.query_gate_bias[...].astype(gate_MxLxHxh.dtype)[None, None]
            gate_MxLxHxh = self.constrain(
                gate_MxLxHxh, ("batch", "length", *MATRICES["query_gate"].outputs)
            )
            attended_MxLxHxh *= jax.nn.sigmoid(kept(gate_MxLxHxh, MATRICES["query_gate"].kept))
        joined_MxLxD = join_heads(
            attended_MxLxHxh, self.out[...], self.constrain.platform, self.quantization
        )
        if hasattr(self, "out_bias"):
            joined_MxLxD += self.out_bias[...].astype(joined_MxLxD.dtype)[None, None]
        return joined_MxLxD
