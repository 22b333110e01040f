"""The tensors of Hugging Face's models, by the parameters of a `Decoder`: their names, and the order of their axes.

Names and layouts are those of the transformers library (https://github.com/huggingface/transformers, `models/`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

ParameterPath = tuple[str, ...]


class Layout(NamedTuple):
    """One parameter's place in a tensor: {layer} in the name stands for the number of a stacked parameter's layer."""

    name: str
    axes: tuple[tuple[int, ...], ...]  # for each axis of the tensor the parameter's axes that it joins, the outer first
    joined: tuple[ParameterPath, ...] = ()  # the parameters that the tensor holds one after another, if several
    joined_axis: int = 0  # the tensor's axis along which they follow each other

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a parameter's part of the tensor, from the parameter's own (of one layer)."""
        return tuple(math.prod(shape[axis] for axis in group) for group in self.axes)

    def to_parameter(self, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a view of a part of the tensor as the parameter, whose shape it is given."""
        order = [axis for group in self.axes for axis in group]
        return part.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))

    def from_parameter(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the parameter as its part of the tensor."""
        order = [axis for group in self.axes for axis in group]
        return parameter.transpose(order).reshape(self.shape(parameter.shape))


_LLAMA: dict[ParameterPath, Layout] = {
    ("embedding",): Layout("model.embed_tokens.weight", ((0,), (1,))),
    ("output",): Layout("lm_head.weight", ((1,), (0,))),
    ("final_norm", "scale"): Layout("model.norm.weight", ((0,),)),
    ("layers", "attention_norm", "scale"): Layout("model.layers.{layer}.input_layernorm.weight", ((0,),)),
    ("layers", "attention", "query"): Layout("model.layers.{layer}.self_attn.q_proj.weight", ((1, 2), (0,))),
    ("layers", "attention", "key"): Layout("model.layers.{layer}.self_attn.k_proj.weight", ((1, 2), (0,))),
    ("layers", "attention", "value"): Layout("model.layers.{layer}.self_attn.v_proj.weight", ((1, 2), (0,))),
    ("layers", "attention", "out"): Layout("model.layers.{layer}.self_attn.o_proj.weight", ((2,), (0, 1))),
    ("layers", "mlp_norm", "scale"): Layout("model.layers.{layer}.post_attention_layernorm.weight", ((0,),)),
    ("layers", "mlp", "gate"): Layout("model.layers.{layer}.mlp.gate_proj.weight", ((1,), (0,))),
    ("layers", "mlp", "up"): Layout("model.layers.{layer}.mlp.up_proj.weight", ((1,), (0,))),
    ("layers", "mlp", "down"): Layout("model.layers.{layer}.mlp.down_proj.weight", ((1,), (0,))),
}  # fmt: skip

LAYOUTS: dict[str, dict[ParameterPath, Layout]] = {"llama2": _LLAMA}
# What files hold besides parameters: tables and masks that follow from the config.
NOT_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
TIED_OUTPUT = "lm_head.weight"
