"""The norms of a decoder.

Shapes: M micro-batch, L length, D model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.blocks import BLOCKS
from maxbatch.config.sections import ModelConfig


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, in float32 (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

    Args:
      shape: of the scale: the last axes of x, over all of which it is normalised; by default (D,).
      logical_axes: the names of these axes.
    """

    def __init__(
        self, config: ModelConfig, shape: tuple[int, ...] | None = None, logical_axes: tuple[str, ...] = ("norm",)
    ):
        self.adds_one = BLOCKS[config.decoder_block].norm_adds_one
        first = jnp.zeros if self.adds_one else jnp.ones
        shape = shape or (config.base_emb_dim,)
        self.scale = nnx.Param(first(shape, config.weight_dtype), logical_axes=logical_axes)
        self.epsilon = config.normalization_layer_epsilon

    def __call__(self, x_MxLxD: jax.Array) -> jax.Array:
        """Returns x, normalised, in its dtype."""
        x, scale = x_MxLxD.astype(jnp.float32), self.scale[...].astype(jnp.float32)
        over = tuple(range(x.ndim - scale.ndim, x.ndim))
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=over, keepdims=True) + self.epsilon)
        if self.adds_one:
            scale = 1.0 + scale
        return (x * inverse_rms * _wide(scale, x)).astype(x_MxLxD.dtype)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) * scale + bias, in float32 (Ba et al. 2016, https://arxiv.org/abs/1607.06450)."""

    def __init__(self, config: ModelConfig):
        d = config.base_emb_dim
        self.scale = nnx.Param(jnp.ones(d, config.weight_dtype), logical_axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(d, config.weight_dtype), logical_axes=("norm",))
        self.epsilon = config.normalization_layer_epsilon

    def __call__(self, x_MxLxD: jax.Array) -> jax.Array:
        """Returns x, normalised over D, in its dtype."""
        x = x_MxLxD.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        inverse_std = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        scale, bias = (_wide(weight[...].astype(jnp.float32), x) for weight in (self.scale, self.bias))
        return (x * inverse_std * scale + bias).astype(x_MxLxD.dtype)


def stream_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """Returns a norm of the residual stream, in the form of the config's `decoder_block`."""
    return LayerNorm(config) if BLOCKS[config.decoder_block].norm == "layer" else RMSNorm(config)


def _wide(weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight[(None,) * (x.ndim - weight.ndim)]
