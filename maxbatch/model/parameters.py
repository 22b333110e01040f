"""The creation of parameters: their logical axes, dtype and first values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.sections import ModelConfig

# Standard deviation of a unit normal that is truncated at two.
_TRUNCATED_STDDEV = 0.87962566103423978


def matrix(
    config: ModelConfig,
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    logical_axes: tuple[str, ...],
    *,
    fan_in: int,
    residual: bool = False,
) -> nnx.Param:
    """Returns a weight in `weight_dtype`, drawn in float32 for every dtype, so that one seed gives one model.

    The values are normal, truncated at two standard deviations of 1 / sqrt(fan_in): the product keeps the variance of
    its input (LeCun et al. 1998, Efficient BackProp, section 4.6). A weight that adds to the residual stream is also
    divided by the root of their number, two per layer, so that the variance of the stream does not grow with depth
    (Radford et al. 2019, GPT-2, section 2.3).
    """
    summed = fan_in * 2 * config.base_num_decoder_layers if residual else fan_in
    unit = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    value = (unit * (1 / math.sqrt(summed) / _TRUNCATED_STDDEV)).astype(config.weight_dtype)
    return nnx.Param(value, logical_axes=logical_axes)


def bias(config: ModelConfig, shape: tuple[int, ...], logical_axes: tuple[str, ...]) -> nnx.Param:
    """Returns a bias in `weight_dtype`, 0 at first."""
    return nnx.Param(jnp.zeros(shape, config.weight_dtype), logical_axes=logical_axes)
