"""The creation of parameters: their logical axes, dtype and first values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

# Standard deviation of a unit normal that is truncated at two.
_TRUNCATED_STDDEV = 0.87962566103423978


def normal_parameter(
    config: ConfigDict, rngs: nnx.Rngs, shape: tuple[int, ...], logical_axes: tuple[str, ...], stddev: float
) -> nnx.Param:
    """Returns a parameter in `weight_dtype`, from a normal truncated at two standard deviations.

    Values are drawn in float32 for every dtype, so that one seed gives one model.
    """
    unit = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    value = (unit * (stddev / _TRUNCATED_STDDEV)).astype(config.weight_dtype)
    return nnx.Param(value, logical_axes=logical_axes)


def matrix(
    config: ConfigDict, rngs: nnx.Rngs, shape: tuple[int, ...], logical_axes: tuple[str, ...], *, fan_in: int
) -> nnx.Param:
    """Returns a weight whose product keeps the variance of its input: standard deviation 1 / sqrt(fan_in).

    Reference: LeCun et al. 1998, Efficient BackProp, section 4.6.
    """
    return normal_parameter(config, rngs, shape, logical_axes, 1 / math.sqrt(fan_in))


def residual_matrix(
    config: ConfigDict, rngs: nnx.Rngs, shape: tuple[int, ...], logical_axes: tuple[str, ...], *, fan_in: int
) -> nnx.Param:
    """Returns a weight that adds to the residual stream, divided by the root of their number, two per layer.

    So the variance of the stream does not grow with depth. Reference: Radford et al. 2019 (GPT-2), section 2.3.
    """
    writers = 2 * config.base_num_decoder_layers
    return normal_parameter(config, rngs, shape, logical_axes, 1 / math.sqrt(fan_in * writers))
