"""Grouped-query attention with rotary positions: causal, and within the documents of a packed row.

Shapes: M micro-batch, L length, D model, H query heads, K key and value heads, h head_dim; while sampling, B rows,
T new tokens, G = H / K.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from maxbatch.model.cache import Cache
from maxbatch.model.parameters import matrix
from maxbatch.model.splash import splash_attend
from maxbatch.parallel.sharding import Constrain, unconstrained
from maxbatch.plan.program import Kernel, attention_rules
from maxbatch.system.errors import ConfigError

Rope = tuple[jax.Array, jax.Array]
Implementation = Kernel


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

    The tables are of their positions: [L, h/2], or [M, L, h/2] if every row has its own positions.
    """
    cos, sin = (table.reshape(-1, *table.shape[-2:])[:, :, None, :] for table in rope)
    first, second = jnp.split(x_MxLxHxh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_MxLxHxh.dtype)


def choose_implementation(config: ConfigDict, platform: str, context: int) -> Implementation:
    """Returns the implementation on a platform ("cpu", "gpu" or "tpu") whose context axis has that size.

    Raises:
      ConfigError: the platform or the shapes do not allow what `attention` states.
    """
    platforms: dict[Kernel, tuple[str, str]]
    platforms = {"splash": ("tpu", "run on TPUs"), "cudnn": ("gpu", "run on NVIDIA GPUs")}
    rules = {name: list(own) for name, own in attention_rules(config, context).items()}
    for name, (needed, words) in platforms.items():
        rules[name].insert(0, (platform == needed, f"{words}, and the devices are {platform}"))
    broken = {name: [rule for holds, rule in own if not holds] for name, own in rules.items()}
    best = next(name for name in rules if not broken[name])
    if config.attention == "auto":
        return best
    if broken[config.attention]:
        raise ConfigError(
            f"attention={config.attention}: must {broken[config.attention][0]}; works: attention=auto (here {best})"
        )
    return config.attention


def attend(
    q_MxLxHxh: jax.Array,
    k_MxLxKxh: jax.Array,
    v_MxLxKxh: jax.Array,
    segments_MxL: jax.Array,
    implementation: Implementation = "dot_product",
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """Returns causal attention within segments, [M, L, H, h] in q's dtype, with softmax in float32.

    A token sees itself and the tokens before it of its own segment, and only those. Query head i reads key head
    i // (H / K) (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245). Queries and keys come rotated.
    """
    if implementation == "splash":
        return splash_attend(q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, segments_MxL, constrain)
    mask = (segments_MxL[:, :, None] == segments_MxL[:, None, :])[:, None, :, :]
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
        out_axes = ("heads", "head_dim", "embed")
        self.out = matrix(config, rngs, (heads, h, d), out_axes, fan_in=heads * h, residual=True)
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

        It is the plain implementation, whatever the model was trained with. Positions are int32, the tokens' places in
        their rows and their slots; the tables of these positions are [B, T, h/2] each.
        """
        q, k, v = self._queries_keys_values(x_BxTxD, rope)
        cache = cache.write(layer, positions_BxT, k, v)
        k_BxKxLxh, v_BxKxLxh = (array[layer] for array in cache)
        return self._joined(attend_to_cache(q, k_BxKxLxh, v_BxKxLxh, positions_BxT)), cache

    def _queries_keys_values(self, x_MxLxD: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array, jax.Array]:
        def heads(weight: nnx.Param, name: str) -> jax.Array:
            out = jnp.einsum("mld,dnh->mlnh", x_MxLxD, weight[...].astype(x_MxLxD.dtype))
            return self.constrain(out, ("batch", "length", name, "head_dim"))

        q_MxLxHxh = apply_rope(heads(self.query, "heads"), rope)
        k_MxLxKxh = apply_rope(heads(self.key, "kv_heads"), rope)
        return q_MxLxHxh, k_MxLxKxh, heads(self.value, "kv_heads")

    def _joined(self, attended_MxLxHxh: jax.Array) -> jax.Array:
        return jnp.einsum("mlnh,nhd->mld", attended_MxLxHxh, self.out[...].astype(attended_MxLxHxh.dtype))
