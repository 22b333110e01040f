"""The parameters of a decoder: their paths, their logical axes, dtype and first values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.families import FAMILIES
from maxbatch.config.matrices import Parameter, ParameterPath, parameters, weight_factor
from maxbatch.config.sections import ModelConfig
from maxbatch.parallel.trees import KeyPath

# Standard deviation of a unit normal that is truncated at two.
_TRUNCATED_STDDEV = 0.87962566103423978
_DECAYS = (0.01, 16.0)  # per token, before the softplus that a token scales them by


def parameter_path(path: KeyPath) -> ParameterPath:
    """Returns the names that lead to a parameter, from its path in a tree of `jax.tree_util`."""
    return tuple(str(entry.key) for entry in path if hasattr(entry, "key"))


def add_parameters(module: nnx.Module, config: ModelConfig, *names: str, rngs: nnx.Rngs | None = None) -> None:
    """Gives a module its parameters, in `weight_dtype` or float32, as attributes of their names.

    Args:
      module: a part of the decoder.
      names: of parameters, or of the module; those that the model does not have are left out.
      rngs: the stream `params` seeds the values of matrices.
    """
    for row in parameters(config):
        if row.name in names or row.module in names:
            value = _first_value(config, row, rngs)
            if (factor := weight_factor(config, row.path)) != 1.0:
                value = value * factor
            value = value if row.is_float32 else value.astype(config.weight_dtype)
            setattr(module, row.path[-1], nnx.Param(value, logical_axes=row.axes))


def _first_value(config: ModelConfig, row: Parameter, rngs: nnx.Rngs | None) -> jax.Array:
    """Returns a parameter of one layer, made in float32 for every dtype, so that one seed gives one model.

    Biases are 0, and norms multiply by 1. Matrices are normal with a standard deviation of 1 / sqrt(inputs), truncated
    at two of them: the product keeps the variance of its input (LeCun et al. 1998, Efficient BackProp, section 4.6). A
    matrix that adds to the residual stream is also divided by the root of their number, two per layer, so that the
    variance of the stream does not grow with depth (Radford et al. 2019, GPT-2, section 2.3). Depthwise convolutions
    are uniform up to 1 / sqrt(width), and the logarithms of decays are those of uniform numbers (Yang et al. 2024).
    """
    shape = row.shape(config)
    if not (row.inputs or row.is_convolution or row.first == "decays"):
        is_scale = row.path[-1].endswith("scale") and not FAMILIES[config.decoder_block].norm_adds_one
        return jnp.full(shape, float(is_scale or row.first == "ones"), jnp.float32)
    assert rngs is not None, "matrices are random"
    if row.first == "decays":
        return jnp.log(jax.random.uniform(rngs.params(), shape, jnp.float32, *_DECAYS))
    if row.is_convolution:
        bound = shape[-1] ** -0.5
        return jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
    adds_to_stream = row.is_stacked and row.outputs == ("embed",)
    summed = shape[-1] if row.is_lookup else math.prod(shape[axis] for axis in row.groups[0])
    summed *= 2 * config.base_num_decoder_layers if adds_to_stream else 1
    unit = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    return unit * (1 / math.sqrt(summed) / _TRUNCATED_STDDEV)
