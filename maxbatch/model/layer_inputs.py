"""The inputs that layers have besides the stream: of each token, one for each layer.

Shapes: M micro-batch, L length, D model, V vocabulary, N layers, P width of an input.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.sections import ModelConfig
from maxbatch.model.mlp import ACTIVATIONS
from maxbatch.model.norms import norm_of
from maxbatch.model.parameters import add_parameters
from maxbatch.model.products import product
from maxbatch.parallel.sharding import Constrain


class LayerInputs(nnx.Module):
    """An embedding of the token for each layer, plus a normalised projection of its embedding in
    the stream.

    Source: "per-layer embeddings" of Gemma 3n and Gemma 4 (transformers, `models/gemma4`).
    """

    embedding: nnx.Param[jax.Array]
    projection: nnx.Param[jax.Array]

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, constrain: Constrain):
        add_parameters(self, config, "layer_inputs", rngs=rngs)
        self.norm = norm_of(config, "layer_inputs.norm")
        self.constrain = constrain

    def __call__(self, tokens_MxL: jax.Array, x_MxLxD: jax.Array) -> jax.Array:
        """Returns the inputs of all layers, [N, M, L, P] in x's dtype; x is the stream before the
        first layer.
        """
        embedding_VxNxP = self.embedding[...]
        width = embedding_VxNxP.shape[-1]
        # Each device looks up all tokens in its columns of the table, which is larger than its rows
        # for a micro-batch.
        rows_MxLxNxP = embedding_VxNxP[self.constrain(tokens_MxL, (None, "length"))]
        rows_MxLxNxP = self.constrain(rows_MxLxNxP, (None, "length", "input_layers", "layer_input"))
        rows_MxLxNxP = self.constrain(rows_MxLxNxP, ("batch", "length", None, None)).astype(
            x_MxLxD.dtype
        )
        made_MxLxNxP = product(x_MxLxD, self.projection[...], "mld,dnp->mlnp")
        made_MxLxNxP = self.constrain(made_MxLxNxP, ("batch", "length", None, None))
        made_MxLxNxP = self.norm(
            made_MxLxNxP * jnp.asarray(x_MxLxD.shape[-1] ** -0.5, x_MxLxD.dtype)
        )
        both_MxLxNxP = rows_MxLxNxP * jnp.asarray(width**0.5, x_MxLxD.dtype) + made_MxLxNxP
        return jnp.moveaxis(both_MxLxNxP * jnp.asarray(2**-0.5, x_MxLxD.dtype), 2, 0)


def joined(layer: Any, x_MxLxD: jax.Array, input_MxLxP: jax.Array | None) -> jax.Array:
    """Returns the stream with a layer's input, which the stream gates and the layer projects.

    Args:
      layer: a layer with `input_gate`, `input_out` and `input_norm`.
    """
    assert input_MxLxP is not None, "the layer has an input"
    config, constrain = layer.config, layer.constrain
    activation = ACTIVATIONS[config.mlp_activations.partition(",")[0]]
    gate_MxLxP = activation(
        product(x_MxLxD, layer.input_gate[...], "mld,dp->mlp", config.quantization)
    )
    gated_MxLxP = constrain(gate_MxLxP * input_MxLxP, ("batch", "length", "gated_input"))
    projected_MxLxD = product(gated_MxLxP, layer.input_out[...], "mlp,pd->mld", config.quantization)
    normalised_MxLxD: jax.Array = layer.input_norm(projected_MxLxD)
    return x_MxLxD + normalised_MxLxD
