"""The MLP of a decoder's layer.

Shapes: M micro-batch, L length, D model, F MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.sections import ModelConfig
from maxbatch.families.matrices import MATRICES
from maxbatch.model.parameters import add_parameters
from maxbatch.model.products import gradients_together, product, two_products
from maxbatch.parallel.remat import kept
from maxbatch.parallel.sharding import Constrain

Activation = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
}


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x))); biases where
    the model has them.

    References: SwiGLU and GeGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202); GPT-2 (Radford et
    al. 2019).
    """

    gate: nnx.Param[jax.Array]
    up: nnx.Param[jax.Array]
    down: nnx.Param[jax.Array]
    # if shared experts have one: multiplies the output by its product's sigmoid
    shared_gate: nnx.Param[jax.Array]

    def __init__(self, config: ModelConfig, name: str, *, rngs: nnx.Rngs, constrain: Constrain):
        add_parameters(self, config, name, rngs=rngs)
        self.activation = ACTIVATIONS[config.mlp_activations.partition(",")[0]]
        self.constrain, self.quantization = constrain, config.quantization

    def __call__(self, x_MxLxD: jax.Array) -> jax.Array:
        """Returns the MLP's output, [M, L, D], in x's dtype."""
        if hasattr(self, "gate"):
            gate_MxLxF, up_MxLxF = two_products(
                x_MxLxD, self.gate[...], self.up[...], self.constrain.platform, self.quantization
            )
            gate_MxLxF, up_MxLxF = self._biased(gate_MxLxF, "gate"), self._biased(up_MxLxF, "up")
            gate_MxLxF, up_MxLxF = _kept(gate_MxLxF, "gate"), _kept(up_MxLxF, "up")
            if not self.quantization:
                gate_MxLxF, up_MxLxF = gradients_together(
                    gate_MxLxF, up_MxLxF, self.constrain.platform
                )
            inner_MxLxF = self.activation(gate_MxLxF) * up_MxLxF
        else:
            inner_MxLxF = self._biased(
                product(x_MxLxD, self.up[...], "mld,df->mlf", self.quantization), "up"
            )
            # MaxText's name of the first product
            inner_MxLxF = self.activation(_kept(inner_MxLxF, "gate"))
        inner_MxLxF = self.constrain(inner_MxLxF, ("batch", "length", "mlp"))
        out_MxLxD = product(inner_MxLxF, self.down[...], "mlf,fd->mld", self.quantization)
        out_MxLxD = _kept(self._biased(out_MxLxD, "down"), "down")
        if hasattr(self, "shared_gate"):
            gate_MxLx1 = product(
                x_MxLxD, self.shared_gate[...], "mld,df->mlf", out_dtype=jnp.float32
            )
            out_MxLxD *= jax.nn.sigmoid(gate_MxLx1).astype(out_MxLxD.dtype)
        return out_MxLxD

    def _biased(self, x_MxLxF: jax.Array, name: str) -> jax.Array:
        bias_F = getattr(self, f"{name}_bias", None)
        return (
            x_MxLxF if bias_F is None else x_MxLxF + bias_F[...].astype(x_MxLxF.dtype)[None, None]
        )


def _kept(x: jax.Array, name: str) -> jax.Array:
    return kept(x, MATRICES[name].kept)
