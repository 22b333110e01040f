"""The decoder: a causal transformer in the standard form of LLaMA, in flax NNX.

Pre-normalised residual blocks (RMSNorm), rotary grouped-query attention, a gated SiLU MLP, tied or untied
embeddings: LLaMA (Touvron et al. 2023, https://arxiv.org/abs/2302.13971).

Shapes: M micro-batch, L length, D model, F MLP, V vocabulary; while sampling, B rows and T new tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from maxbatch.model.attention import Attention, Rope, rope_tables
from maxbatch.model.cache import Cache
from maxbatch.model.parameters import matrix
from maxbatch.model.products import two_products
from maxbatch.parallel.pipeline import Layers
from maxbatch.parallel.sharding import Constrain, unconstrained

REMAT_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class LayerRunner(Protocol):
    """A way to run the layers other than a plain loop over them."""

    @property
    def constrain(self) -> Constrain:
        """The constraint on activations inside of the layers."""

    def __call__(self, layers: Layers, stacked: nnx.State, x_MxLxD: jax.Array, segments_MxL: jax.Array, /) -> jax.Array:
        """Returns x after all layers; `layers` runs as many as are stacked."""


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, in float32 (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

    def __init__(self, config: ConfigDict):
        self.scale = nnx.Param(jnp.ones(config.base_emb_dim, config.weight_dtype), logical_axes=("norm",))
        self.epsilon = config.normalization_layer_epsilon

    def __call__(self, x_MxLxD: jax.Array) -> jax.Array:
        """Returns x normalised over D, in x's dtype."""
        x = x_MxLxD.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return (x * inverse_rms * self.scale[...].astype(jnp.float32)[None, None, :]).astype(x_MxLxD.dtype)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs, constrain: Constrain):
        d, f = config.base_emb_dim, config.base_mlp_dim
        self.gate = matrix(config, rngs, (d, f), ("embed", "mlp"), fan_in=d)
        self.up = matrix(config, rngs, (d, f), ("embed", "mlp"), fan_in=d)
        self.down = matrix(config, rngs, (f, d), ("mlp", "embed"), fan_in=f, residual=True)
        self.constrain = constrain

    def __call__(self, x_MxLxD: jax.Array) -> jax.Array:
        """Returns the MLP's output, [M, L, D], in x's dtype."""
        gate_MxLxF, up_MxLxF = two_products(x_MxLxD, self.gate[...], self.up[...], self.constrain.platform)
        inner_MxLxF = jax.nn.silu(gate_MxLxF) * up_MxLxF
        inner_MxLxF = self.constrain(inner_MxLxF, ("batch", "length", "mlp"))
        return jnp.einsum("mlf,fd->mld", inner_MxLxF, self.down[...].astype(x_MxLxD.dtype))


class DecoderLayer(nnx.Module):
    """One residual block: attention, then the MLP, each on the normalised stream."""

    def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs, constrain: Constrain):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs=rngs, constrain=constrain)
        self.mlp_norm = RMSNorm(config)
        self.mlp = GatedMLP(config, rngs=rngs, constrain=constrain)
        self.constrain = constrain

    def __call__(self, x_MxLxD: jax.Array, segments_MxL: jax.Array, rope: Rope) -> jax.Array:
        """Returns the residual stream after this layer, [M, L, D], in x's dtype."""
        return self._add(x_MxLxD, self.attention(self.attention_norm(x_MxLxD), segments_MxL, rope))

    def with_cache(
        self, x_BxTxD: jax.Array, positions_BxT: jax.Array, rope: Rope, cache: Cache, layer: jax.Array | int
    ) -> tuple[jax.Array, Cache]:
        """Returns the stream of T more tokens of each row, and the cache with them in it; see `Attention`."""
        attended_BxTxD, cache = self.attention.with_cache(
            self.attention_norm(x_BxTxD), positions_BxT, rope, cache, layer
        )
        return self._add(x_BxTxD, attended_BxTxD), cache

    def _add(self, x_MxLxD: jax.Array, attended_MxLxD: jax.Array) -> jax.Array:
        stream = ("batch", "length", "embed")
        x = self.constrain(x_MxLxD + attended_MxLxD, stream)
        return self.constrain(x + self.mlp(self.mlp_norm(x)), stream)


class Decoder(nnx.Module):
    """A causal language model up to its last projection, which the loss fuses with the cross-entropy.

    Every parameter is an `nnx.Param` in `weight_dtype` with metadata `logical_axes`, one name per axis, of
    {"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "norm"}. Those of the layers are stacked on a leading
    axis "layers", whether the layers then run in a loop or unrolled (`scan_layers`).

    Args:
      config: the model keys, `dtype`, `weight_dtype`, `remat_policy`, `scan_layers`.
      rngs: the stream `params` seeds the values; the same seed gives the same values under any sharding.
      constrain: places activations by their logical axes: "batch", "length", "embed" (that of activations, which the
        mesh does not split), "heads", "kv_heads", "head_dim", "mlp", "vocab".
      layer_runner: runs the layers in place of a plain loop over them; it sees to their rematerialisation.
    """

    def __init__(
        self,
        config: ConfigDict,
        *,
        rngs: nnx.Rngs,
        constrain: Constrain = unconstrained,
        layer_runner: LayerRunner | None = None,
    ):
        d, v = config.base_emb_dim, config.vocab_size
        # The logits of a tied model start at a variance of about 1, so its loss starts at most half a nat above ln V.
        # Smaller tables start nearer to it and learn slower (0.1 to 0.35 nats after 100 updates of the default model).
        self.embedding = matrix(config, rngs, (v, d), ("vocab", "embed"), fan_in=d)

        @nnx.split_rngs(splits=config.base_num_decoder_layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> DecoderLayer:
            inside = layer_runner.constrain if layer_runner else constrain
            return DecoderLayer(config, rngs=rngs, constrain=inside)

        self.layers = stacked(rngs)
        for _, parameter in nnx.iter_graph(self.layers):
            if isinstance(parameter, nnx.Param):
                parameter.set_metadata(logical_axes=("layers", *parameter.get_metadata("logical_axes")))
        self.final_norm = RMSNorm(config)
        if not config.logits_via_embedding:
            self.output = matrix(config, rngs, (d, v), ("embed", "vocab"), fan_in=d)
        self.constrain = constrain
        self.dtype = jnp.dtype(config.dtype)
        self.head_dim = config.head_dim
        self.rope_max_timescale = config.rope_max_timescale
        self.scan_layers = config.scan_layers
        self.remat_policy = config.remat_policy
        self.layer_runner = layer_runner

    def __call__(self, tokens_MxL: jax.Array, segments_MxL: jax.Array) -> jax.Array:
        """Returns the logits of the token after each, float32[M, L, V]; `hidden` has the arguments."""
        x_MxLxD = self.hidden(tokens_MxL, segments_MxL)
        w_DxV = self.output_projection().astype(x_MxLxD.dtype)
        return jnp.einsum("mld,dv->mlv", x_MxLxD, w_DxV, preferred_element_type=jnp.float32)

    def hidden(self, tokens_MxL: jax.Array, segments_MxL: jax.Array) -> jax.Array:
        """Returns the stream after the final norm, [M, L, D] in `dtype`.

        Tokens are in [0, V). A token sees the tokens before it of its own segment, and only those.
        """
        x_MxLxD = self._embedded(tokens_MxL)
        rope = rope_tables(tokens_MxL.shape[-1], self.head_dim, self.rope_max_timescale)
        layerdef, stacked = nnx.split(self.layers)

        def layer(x_MxLxD: jax.Array, segments_MxL: jax.Array, parameters: nnx.State) -> jax.Array:
            return nnx.merge(layerdef, parameters)(x_MxLxD, segments_MxL, rope)

        if self.layer_runner is not None:
            run = partial(_run_layers, layer, self.scan_layers)
            x_MxLxD = self.layer_runner(run, stacked, x_MxLxD, segments_MxL)
            return self.final_norm(self.constrain(x_MxLxD, ("batch", "length", "embed")))
        if self.remat_policy != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.remat_policy])
        return self.final_norm(_run_layers(layer, self.scan_layers, x_MxLxD, segments_MxL, stacked))

    def empty_cache(self, num_rows: int, length: int) -> Cache:
        """Returns a cache in the compute dtype with room for `length` tokens in each of B rows."""
        num_layers, _, kv_heads, head_dim = self.layers.attention.key.shape
        zeros = jnp.zeros((num_layers, num_rows, kv_heads, length, head_dim), self.dtype)
        zeros = self.constrain(zeros, (None, "batch", "kv_heads", None, "head_dim"))
        return Cache(zeros, zeros)

    def hidden_with_cache(
        self, tokens_BxT: jax.Array, positions_BxT: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Returns `hidden` of T more tokens of each row, [B, T, D], and the cache with them in it.

        A token sees those before it in its row, which is one document from its start and whose slots are in the cache.
        Positions are the tokens' neighbouring places in their rows, in [0, L). The layers run in a plain loop.
        """
        x_BxTxD = self._embedded(tokens_BxT)
        cos_Lxh, sin_Lxh = rope_tables(cache.length, self.head_dim, self.rope_max_timescale)
        rope = cos_Lxh[positions_BxT], sin_Lxh[positions_BxT]
        layerdef, stacked = nnx.split(self.layers)

        def layer(carried: tuple[jax.Array, Cache], numbered: tuple[jax.Array | int, nnx.State]) -> Any:
            (x_BxTxD, cache), (index, parameters) = carried, numbered
            module = nnx.merge(layerdef, parameters)
            return module.with_cache(x_BxTxD, positions_BxT, rope, cache, index), None

        carried = (x_BxTxD, cache)
        if self.scan_layers:
            layers_N = jnp.arange(cache.keys_NxBxKxLxh.shape[0])
            carried, _ = jax.lax.scan(layer, carried, (layers_N, stacked))
        else:
            for numbered in enumerate(_unstack(stacked)):
                carried, _ = layer(carried, numbered)
        x_BxTxD, cache = carried
        return self.final_norm(x_BxTxD), cache

    def _embedded(self, tokens_MxL: jax.Array) -> jax.Array:
        # Whole in D for the lookup, so that the batch places the rows, and not the split of the parameter.
        table_VxD = self.constrain(self.embedding[...].astype(self.dtype), ("vocab", "embed"))
        return self.constrain(table_VxD[tokens_MxL], ("batch", "length", "embed"))

    def output_projection(self) -> jax.Array:
        """Returns the matrix from the stream to the logits, [D, V], in `weight_dtype`."""
        return self.output[...] if hasattr(self, "output") else self.embedding[...].T


def _run_layers(
    layer: Layers, scanned: bool, x_MxLxD: jax.Array, segments_MxL: jax.Array, stacked: nnx.State
) -> jax.Array:
    """Returns x after all stacked layers, which run in a loop or one by one."""
    if scanned and jax.tree.leaves(stacked)[0].shape[0] > 1:
        return jax.lax.scan(lambda x, one: (layer(x, segments_MxL, one), None), x_MxLxD, stacked)[0]
    for parameters in _unstack(stacked):
        x_MxLxD = layer(x_MxLxD, segments_MxL, parameters)
    return x_MxLxD


def _unstack(stacked: nnx.State) -> list[nnx.State]:
    """Returns the parameters of each layer, by one split per array, whose gradient is one concatenation."""
    arrays, treedef = jax.tree.flatten(stacked)
    num_layers = arrays[0].shape[0]
    split = [[part[0] for part in jax.lax.split(array, (1,) * num_layers, axis=0)] for array in arrays]
    return [jax.tree.unflatten(treedef, parts) for parts in zip(*split, strict=True)]


def model_flops_per_token(config: ConfigDict) -> int:
    """Returns the floating-point operations of training per token, forward and backward, without recomputation.

    They are 6 per parameter that multiplies (2 forward, 4 backward; the embedding lookup multiplies nothing), and
    6 * N * L * H * h for attention, half of the full square's 12, because it is causal.

    Reference: Chowdhery et al. 2022, PaLM (https://arxiv.org/abs/2204.02311), appendix B.
    """
    d, h = config.base_emb_dim, config.head_dim
    heads, kv_heads = config.base_num_query_heads, config.base_num_kv_heads
    per_layer = 2 * d * h * (heads + kv_heads) + 3 * d * config.base_mlp_dim
    matrices = config.base_num_decoder_layers * per_layer + d * config.vocab_size
    attention = config.base_num_decoder_layers * config.max_target_length * heads * h
    return 6 * (matrices + attention)
