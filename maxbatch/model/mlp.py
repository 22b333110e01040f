"""The MLPs of a decoder's layer.

Shapes: M micro-batch, L length, D model, F MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.blocks import BLOCKS
from maxbatch.config.sections import ModelConfig
from maxbatch.model.parameters import bias, matrix
from maxbatch.model.products import two_products
from maxbatch.parallel.remat import kept
from maxbatch.parallel.sharding import Constrain

Activation = Callable[[jax.Array], jax.Array]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
}


def is_gated(config: ModelConfig) -> bool:
    """Returns whether the MLP multiplies an activated projection with a linear one."""
    return config.mlp_activations.endswith(",linear")


def activation_of(config: ModelConfig) -> Activation:
    """Returns the activation function of a config's MLPs."""
    return _ACTIVATIONS[config.mlp_activations.partition(",")[0]]


def has_biases(config: ModelConfig) -> bool:
    """Returns whether the projections of a config's MLPs have biases."""
    return bool(config.mlp_projection_bias or BLOCKS[config.decoder_block].has_biases)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (SwiGLU, GeGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, constrain: Constrain):
        d, f = config.base_emb_dim, config.base_mlp_dim
        self.gate = matrix(config, rngs, (d, f), ("embed", "mlp"), fan_in=d)
        self.up = matrix(config, rngs, (d, f), ("embed", "mlp"), fan_in=d)
        self.down = matrix(config, rngs, (f, d), ("mlp", "embed"), fan_in=f, residual=True)
        self.has_biases = has_biases(config)
        if self.has_biases:
            self.gate_bias, self.up_bias = (bias(config, (f,), ("mlp",)) for _ in range(2))
            self.down_bias = bias(config, (d,), ("norm",))
        self.activation = activation_of(config)
        self.constrain = constrain

    def __call__(self, x_MxLxD: jax.Array) -> jax.Array:
        """Returns the MLP's output, [M, L, D], in x's dtype."""
        gate_MxLxF, up_MxLxF = two_products(x_MxLxD, self.gate[...], self.up[...], self.constrain.platform)
        if self.has_biases:
            gate_MxLxF, up_MxLxF = _plus(gate_MxLxF, self.gate_bias), _plus(up_MxLxF, self.up_bias)
        inner_MxLxF = self.activation(kept(gate_MxLxF, "mlpwi_0")) * kept(up_MxLxF, "mlpwi_1")
        inner_MxLxF = self.constrain(inner_MxLxF, ("batch", "length", "mlp"))
        out_MxLxD = jnp.einsum("mlf,fd->mld", inner_MxLxF, self.down[...].astype(x_MxLxD.dtype))
        return kept(_plus(out_MxLxD, self.down_bias) if self.has_biases else out_MxLxD, "mlpwo")


class PlainMLP(nnx.Module):
    """down(activation(up(x))), with biases where the family has them (Radford et al. 2019, GPT-2)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, constrain: Constrain):
        d, f = config.base_emb_dim, config.base_mlp_dim
        self.up = matrix(config, rngs, (d, f), ("embed", "mlp"), fan_in=d)
        self.down = matrix(config, rngs, (f, d), ("mlp", "embed"), fan_in=f, residual=True)
        self.has_biases = has_biases(config)
        if self.has_biases:
            self.up_bias, self.down_bias = bias(config, (f,), ("mlp",)), bias(config, (d,), ("norm",))
        self.activation = activation_of(config)
        self.constrain = constrain

    def __call__(self, x_MxLxD: jax.Array) -> jax.Array:
        """Returns the MLP's output, [M, L, D], in x's dtype."""
        dtype = x_MxLxD.dtype
        inner_MxLxF = jnp.einsum("mld,df->mlf", x_MxLxD, self.up[...].astype(dtype))
        if self.has_biases:
            inner_MxLxF = _plus(inner_MxLxF, self.up_bias)
        inner_MxLxF = self.activation(kept(inner_MxLxF, "mlpwi_0"))
        inner_MxLxF = self.constrain(inner_MxLxF, ("batch", "length", "mlp"))
        out_MxLxD = jnp.einsum("mlf,fd->mld", inner_MxLxF, self.down[...].astype(dtype))
        return kept(_plus(out_MxLxD, self.down_bias) if self.has_biases else out_MxLxD, "mlpwo")


def _plus(x_MxLxF: jax.Array, own: nnx.Param) -> jax.Array:
    return x_MxLxF + own[...].astype(x_MxLxF.dtype)[None, None]
