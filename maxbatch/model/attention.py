"""Grouped-query attention with rotary positions: causal, and within the documents of a packed row.

Shapes: M micro-batch, L length, D model, H query heads, K key and value heads, h head_dim; while sampling, B rows,
T new tokens, G = H / K.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from maxbatch.model.cache import Cache
from maxbatch.model.parameters import matrix, residual_matrix
from maxbatch.model.splash import LANES, splash_attend
from maxbatch.parallel.sharding import Constrain, unconstrained
from maxbatch.system.errors import ConfigError

Rope = tuple[jax.Array, jax.Array]
Implementation = Literal["dot_product", "cudnn", "splash"]


def rope_tables(length: int, head_dim: int, max_timescale: float) -> Rope:
    """Returns the float32 cosines and sines, each [L, h/2], of positions 0 to L - 1.

    Positions count from the start of the row. A rotated query and key depend only on the difference of their positions,
    so the documents of a packed row need no restart. The tables are constants of the program, computed in float64: in
    float32 the angles of late positions are off by thousandths, and XLA would compute them again in every layer.

    Reference: Su et al. 2021, RoFormer (https://arxiv.org/abs/2104.09864), section 3.2.
    """
    frequencies = max_timescale ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(length), frequencies)
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def apply_rope(x_MxLxHxh: jax.Array, rope: Rope) -> jax.Array:
    """Returns the heads with each pair (i, i + h/2) rotated by its position's angle, in float32, in x's dtype.

    Args:
      x_MxLxHxh: the heads.
      rope: the tables of their positions, [L, h/2], or [M, L, h/2] if every row has its own positions.
    """
    cos, sin = (table.reshape(-1, *table.shape[-2:])[:, :, None, :] for table in rope)
    first, second = jnp.split(x_MxLxHxh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_MxLxHxh.dtype)


def same_segment_mask(segments_MxL: jax.Array) -> jax.Array:
    """Returns bool[M, 1, L, L]: true where query and key belong to one document (or both to the padding)."""
    return (segments_MxL[:, :, None] == segments_MxL[:, None, :])[:, None, :, :]


def choose_implementation(config: ConfigDict, platform: str, context: int) -> Implementation:
    """Returns the implementation of attention.

    Args:
      config: `attention`, `dtype`, `max_target_length`, `head_dim`.
      platform: "cpu", "gpu" or "tpu".
      context: size of the context axis.

    Raises:
      ConfigError: the platform or the shapes do not allow what `attention` states.
    """
    wanted = config.attention
    if wanted == "dot_product":
        return "dot_product"
    reasons: dict[Implementation, str | None] = {
        "splash": _why_not_splash(config, platform, context),
        "cudnn": _why_not_cudnn(config, platform, context),
    }
    possible: list[Implementation] = [name for name, reason in reasons.items() if reason is None]
    best: Implementation = possible[0] if possible else "dot_product"
    if wanted == "auto":
        return best
    if reasons[wanted] is not None:
        raise ConfigError(f"attention={wanted}: {reasons[wanted]}; works: attention=auto (here {best})")
    return wanted


def _why_not_splash(config: ConfigDict, platform: str, context: int) -> str | None:
    if platform != "tpu":
        return f"must run on TPUs, and the devices are {platform}"
    if config.max_target_length % (LANES * context):
        each = f"{LANES} x {context} context shards" if context > 1 else LANES
        return f"must have max_target_length={config.max_target_length} divisible by {each}"
    return None


def _why_not_cudnn(config: ConfigDict, platform: str, context: int) -> str | None:
    # Every cuDNN from 9 on has a masked kernel, backward too, for these dtypes and shapes.
    if platform != "gpu":
        return f"must run on NVIDIA GPUs, and the devices are {platform}"
    if config.dtype != "bfloat16":
        return f"must have dtype=bfloat16, and dtype={config.dtype}"
    if config.head_dim > 128 or config.head_dim % 8:
        return f"must have head_dim={config.head_dim} at most 128 and divisible by 8"
    if config.max_target_length % 2:
        return f"must have max_target_length={config.max_target_length} even"
    if context > 1:
        return f"must have the whole length on a device, and the context axis has {context}"
    return None


def attend(
    q_MxLxHxh: jax.Array,
    k_MxLxKxh: jax.Array,
    v_MxLxKxh: jax.Array,
    segments_MxL: jax.Array,
    implementation: Implementation = "dot_product",
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """Returns causal attention within segments, [M, L, H, h] in q's dtype, with softmax in float32.

    Query head i reads key head i // (H / K) (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).

    Args:
      q_MxLxHxh: queries, rotated; likewise keys and values.
      segments_MxL: int32; a token sees the tokens before it of its own segment, and only those.
      implementation: from `choose_implementation`.
      constrain: places the arrays.
    """
    if implementation == "splash":
        return splash_attend(q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, segments_MxL, constrain)
    mask = same_segment_mask(segments_MxL)
    if implementation == "cudnn":
        # Repeated over the heads, because the batching rule of JAX 0.10 accepts no other mask under `jax.vmap`.
        mask = jnp.repeat(mask, q_MxLxHxh.shape[2], axis=1)
    return jax.nn.dot_product_attention(
        q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, mask=mask, is_causal=True,
        implementation="cudnn" if implementation == "cudnn" else "xla",
    )  # fmt: skip


def attend_to_cache(
    q_BxTxHxh: jax.Array, k_BxKxLxh: jax.Array, v_BxKxLxh: jax.Array, positions_BxT: jax.Array
) -> jax.Array:
    """Returns the attention of each token to the slots up to its own, as `attend` does: [B, T, H, h] in q's dtype."""
    rows, tokens, heads, head_dim = q_BxTxHxh.shape
    kv_heads, length = k_BxKxLxh.shape[1:3]
    q_BxTxKxGxh = q_BxTxHxh.reshape(rows, tokens, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("btkgh,bklh->bkgtl", q_BxTxKxGxh, k_BxKxLxh, preferred_element_type=jnp.float32)
    visible_BxTxL = jnp.arange(length)[None, None, :] <= positions_BxT[:, :, None]
    logits = jnp.where(visible_BxTxL[:, None, None], logits * head_dim**-0.5, -jnp.inf)
    weights_BxKxGxTxL = jax.nn.softmax(logits).astype(v_BxKxLxh.dtype)
    return jnp.einsum("bkgtl,bklh->btkgh", weights_BxKxGxTxL, v_BxKxLxh).reshape(q_BxTxHxh.shape)


class Attention(nnx.Module):
    """Causal grouped-query self-attention. Source: LLaMA (Touvron et al. 2023) with the GQA of LLaMA 2."""

    def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs, constrain: Constrain):
        d, h = config.base_emb_dim, config.head_dim
        heads, kv_heads = config.base_num_query_heads, config.base_num_kv_heads
        self.query = matrix(config, rngs, (d, heads, h), ("embed", "heads", "head_dim"), fan_in=d)
        self.key = matrix(config, rngs, (d, kv_heads, h), ("embed", "kv_heads", "head_dim"), fan_in=d)
        self.value = matrix(config, rngs, (d, kv_heads, h), ("embed", "kv_heads", "head_dim"), fan_in=d)
        self.out = residual_matrix(
            config, rngs, (heads, h, d), ("heads", "head_dim", "embed"), fan_in=heads * h
        )
        self.constrain = constrain
        # Without a mesh (to inspect a model or sample from it) it is the plain one, whatever the run was trained with.
        self.implementation: Implementation = "dot_product"
        if constrain.mesh is not None:
            context = constrain.mesh.shape.get("context", 1)
            self.implementation = choose_implementation(config, constrain.platform, context)

    def __call__(self, x_MxLxD: jax.Array, segments_MxL: jax.Array, rope: Rope) -> jax.Array:
        """Returns the attention output, [M, L, D], in x's dtype."""
        q, k, v = self._queries_keys_values(x_MxLxD, rope)
        return self._joined(attend(q, k, v, segments_MxL, self.implementation, self.constrain))

    def with_cache(
        self, x_BxTxD: jax.Array, positions_BxT: jax.Array, rope: Rope, cache: Cache, layer: jax.Array | int
    ) -> tuple[jax.Array, Cache]:
        """Returns the attention output of T more tokens of each row, [B, T, D], and the cache with them in it.

        It is the plain implementation, whatever the model was trained with.

        Args:
          x_BxTxD: the tokens.
          positions_BxT: int32, their places in their rows, which are their slots.
          rope: tables of these positions, each [B, T, h/2].
          cache: the cache of all layers.
          layer: the index of this layer.
        """
        q, k, v = self._queries_keys_values(x_BxTxD, rope)
        cache = cache.write(layer, positions_BxT, k, v)
        return self._joined(attend_to_cache(q, *cache.of_layer(layer), positions_BxT)), cache

    def _queries_keys_values(self, x_MxLxD: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values: [M, L, H, h] and twice [M, L, K, h], the first two rotated."""

        def heads(weight: nnx.Param, name: str) -> jax.Array:
            out = jnp.einsum("mld,dnh->mlnh", x_MxLxD, weight[...].astype(x_MxLxD.dtype))
            return self.constrain(out, ("batch", "length", name, "head_dim"))

        q_MxLxHxh = apply_rope(heads(self.query, "heads"), rope)
        k_MxLxKxh = apply_rope(heads(self.key, "kv_heads"), rope)
        return q_MxLxHxh, k_MxLxKxh, heads(self.value, "kv_heads")

    def _joined(self, attended_MxLxHxh: jax.Array) -> jax.Array:
        """Returns the projection of the heads' outputs, [M, L, D]."""
        return jnp.einsum("mlnh,nhd->mld", attended_MxLxHxh, self.out[...].astype(attended_MxLxHxh.dtype))
