"""The tensors of Hugging Face's models, by the parameters of a `Decoder`: their names, and the order of their axes.

Names and layouts are those of the transformers library (https://github.com/huggingface/transformers, `models/`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

Array = TypeVar("Array", np.ndarray, jax.Array)
ParameterPath = tuple[str, ...]
Axes = tuple[tuple[int, ...], ...]


def parameter_path(path: Any) -> ParameterPath:
    """Returns the names that lead to a parameter, from its path in a tree of `jax.tree_util`."""
    return tuple(str(entry.key) for entry in path if hasattr(entry, "key"))


class Layout(NamedTuple):
    """One parameter's place in a tensor; {layer} in the name stands for the number of a stacked parameter's layer."""

    name: str
    axes: Axes  # for each axis of the tensor the parameter's axes that it joins, the outer first
    joined: tuple[ParameterPath, ...] = ()  # the parameters that the tensor holds one after another, if several
    joined_axis: int = 0  # the tensor's axis along which they follow each other

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a parameter's part of the tensor, from the parameter's own (of one layer)."""
        return tuple(math.prod(shape[axis] for axis in group) for group in self.axes)

    def to_parameter(self, part: Array, shape: tuple[int, ...]) -> Array:
        """Returns a part of the tensor as the parameter, whose shape it is given; of NumPy's a view."""
        order = [axis for group in self.axes for axis in group]
        return part.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))

    def from_parameter(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the parameter as its part of the tensor."""
        order = [axis for group in self.axes for axis in group]
        return parameter.transpose(order).reshape(self.shape(parameter.shape))


Layouts = dict[ParameterPath, Layout]

_ATTENTION, _MLP = ("layers", "attention"), ("layers", "mlp")
_VECTOR: Axes = ((0,),)
_BIAS: Axes = ((0, 1),)  # of heads, or the scale of a norm over all heads
_TRANSPOSED: Axes = ((1,), (0,))
_AS_IS: Axes = ((0,), (1,))
_TO_HEADS: Axes = ((1, 2), (0,))
_FROM_HEADS: Axes = ((2,), (0, 1))


def _llama(**norms: str) -> Layouts:
    """Returns the layouts of a family that is named as llama, but for the norms of the stream in a layer."""
    layer = "model.layers.{layer}"
    layouts = {
        ("embedding",): Layout("model.embed_tokens.weight", _AS_IS),
        ("output",): Layout("lm_head.weight", _TRANSPOSED),
        ("final_norm", "scale"): Layout("model.norm.weight", _VECTOR),
        (*_ATTENTION, "out"): Layout(f"{layer}.self_attn.o_proj.weight", _FROM_HEADS),
        (*_MLP, "gate"): Layout(f"{layer}.mlp.gate_proj.weight", _TRANSPOSED),
        (*_MLP, "up"): Layout(f"{layer}.mlp.up_proj.weight", _TRANSPOSED),
        (*_MLP, "down"): Layout(f"{layer}.mlp.down_proj.weight", _TRANSPOSED),
    }
    layouts[*_ATTENTION, "out_bias"] = Layout(f"{layer}.self_attn.o_proj.bias", _VECTOR)
    for name in ("gate", "up", "down"):
        layouts[*_MLP, f"{name}_bias"] = Layout(f"{layer}.mlp.{name}_proj.bias", _VECTOR)
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
        layouts[*_ATTENTION, ours] = Layout(f"{layer}.self_attn.{theirs}_proj.weight", _TO_HEADS)
        layouts[*_ATTENTION, f"{ours}_bias"] = Layout(f"{layer}.self_attn.{theirs}_proj.bias", _BIAS)
        layouts[*_ATTENTION, f"{ours}_norm", "scale"] = Layout(f"{layer}.self_attn.{theirs}_norm.weight", _VECTOR)
    for ours, theirs in norms.items():
        layouts["layers", ours, "scale"] = Layout(f"{layer}.{theirs}.weight", _VECTOR)
    return layouts


def _joined(layouts: Layouts, joined: tuple[ParameterPath, ...], name: str, axes: Axes, axis: int) -> Layouts:
    """Returns layouts in which some parameters lie in one tensor."""
    return layouts | {parameter: Layout(name, axes, joined, axis) for parameter in joined}


_QKV = tuple((*_ATTENTION, name) for name in ("query", "key", "value"))
_QKV_BIASES = tuple((*_ATTENTION, f"{name}_bias") for name in ("query", "key", "value"))
_GATE_UP = ((*_MLP, "gate"), (*_MLP, "up"))

_LLAMA = _llama(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
_GEMMA = _llama(
    attention_norm="input_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_OLMO2 = _llama(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
for _name in ("query_norm", "key_norm"):
    _OLMO2[*_ATTENTION, _name, "scale"] = _OLMO2[*_ATTENTION, _name, "scale"]._replace(axes=_BIAS)
_PHI3 = _joined(_LLAMA, _QKV, "model.layers.{layer}.self_attn.qkv_proj.weight", _TO_HEADS, 0)
_PHI3 = _joined(_PHI3, _GATE_UP, "model.layers.{layer}.mlp.gate_up_proj.weight", _TRANSPOSED, 0)


def _gpt2() -> Layouts:
    layer = "transformer.h.{layer}"
    layouts = {
        ("embedding",): Layout("transformer.wte.weight", _AS_IS),
        ("positions",): Layout("transformer.wpe.weight", _AS_IS),
        ("output",): Layout("lm_head.weight", _TRANSPOSED),
        (*_ATTENTION, "out"): Layout(f"{layer}.attn.c_proj.weight", ((0, 1), (2,))),
        (*_ATTENTION, "out_bias"): Layout(f"{layer}.attn.c_proj.bias", _VECTOR),
        (*_MLP, "up"): Layout(f"{layer}.mlp.c_fc.weight", _AS_IS),
        (*_MLP, "up_bias"): Layout(f"{layer}.mlp.c_fc.bias", _VECTOR),
        (*_MLP, "down"): Layout(f"{layer}.mlp.c_proj.weight", _AS_IS),
        (*_MLP, "down_bias"): Layout(f"{layer}.mlp.c_proj.bias", _VECTOR),
    }
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        layouts["final_norm", ours] = Layout(f"transformer.ln_f.{theirs}", _VECTOR)
        layouts["layers", "attention_norm", ours] = Layout(f"{layer}.ln_1.{theirs}", _VECTOR)
        layouts["layers", "mlp_norm", ours] = Layout(f"{layer}.ln_2.{theirs}", _VECTOR)
    layouts = _joined(layouts, _QKV, f"{layer}.attn.c_attn.weight", ((0,), (1, 2)), 1)
    return _joined(layouts, _QKV_BIASES, f"{layer}.attn.c_attn.bias", _BIAS, 0)


LAYOUTS: dict[str, Layouts] = {
    "llama2": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "olmo2": _OLMO2,
    "phi3": _PHI3,
    "gpt2": _gpt2(),
}

# What files hold besides parameters: tables and masks that follow from the config.
NOT_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
TIED_OUTPUT = "lm_head.weight"
PREFIX = "transformer."  # of GPT-2's names, which its first files lack
