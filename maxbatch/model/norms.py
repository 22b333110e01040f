"""The norms of a decoder.

Shapes: M micro-batch, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.sections import ModelConfig
from maxbatch.families.matrices import norms_add_one, parameters
from maxbatch.model.parameters import add_parameters

Norm = Callable[[jax.Array], jax.Array]


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, in float32, over as many last axes as the scale has; with a bias
    LayerNorm.

    LayerNorm is (x - mean(x)) / std(x) * scale + bias. References: Zhang and Sennrich 2019
    (https://arxiv.org/abs/1910.07467), Ba et al. 2016 (https://arxiv.org/abs/1607.06450).
    """

    scale: nnx.Param[jax.Array]

    def __init__(self, config: ModelConfig, name: str, epsilon: float, adds_one: bool):
        add_parameters(self, config, name)
        self.adds_one = adds_one
        self.epsilon = epsilon

    def __call__(self, x_MxLxD: jax.Array) -> jax.Array:
        """Returns x, normalised, in its dtype."""
        x, scale = x_MxLxD.astype(jnp.float32), self.scale[...].astype(jnp.float32)
        over = tuple(range(x.ndim - scale.ndim, x.ndim))
        bias = self.bias[...].astype(jnp.float32) if hasattr(self, "bias") else None
        if bias is not None:
            x = x - jnp.mean(x, axis=over, keepdims=True)
        inverse_rms = jax.lax.rsqrt(
            jnp.mean(jnp.square(x), axis=over, keepdims=True) + self.epsilon
        )
        if self.adds_one:
            scale = 1.0 + scale
        normalised = x * inverse_rms * _wide(scale, x)
        return (normalised if bias is None else normalised + _wide(bias, x)).astype(x_MxLxD.dtype)


def norm_of(
    config: ModelConfig, name: str, epsilon: float | None = None, adds_one: bool | None = None
) -> Norm:
    """Returns the norm of that name, by default with the config's epsilon; `unchanged` if the model
    has none.

    Whether it multiplies by 1 + scale is by default the family's.
    """
    if not any(row.module == name for row in parameters(config)):
        return unchanged
    epsilon = config.normalization_layer_epsilon if epsilon is None else epsilon
    return RMSNorm(
        config,
        name,
        epsilon,
        norms_add_one(config) if adds_one is None else adds_one,
    )


def of_unit_size(x_MxLxHxh: jax.Array, epsilon: float, factor: float = 1.0) -> jax.Array:
    """Returns x / rms(x) of each head, without a scale, times `factor`; in float32, and in x's
    dtype.
    """
    x = x_MxLxHxh.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    return (x * (inverse_rms * factor)).astype(x_MxLxHxh.dtype)


def unchanged(x: jax.Array) -> jax.Array:
    """Returns x as it is, where the model has no norm."""
    return x


def _wide(weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight[(None,) * (x.ndim - weight.ndim)]
