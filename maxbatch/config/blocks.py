"""The forms of a decoder's layer, by the names of `decoder_block`: facts of a family that no other key states."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Block:
    """The form of a layer; the defaults are those of LLaMA (Touvron et al. 2023)."""

    norm: Literal["rms", "layer"] = "rms"  # RMSNorm, or LayerNorm with a bias
    norm_adds_one: bool = False  # a norm multiplies by 1 + scale
    norms_before: bool = True  # the input of attention and of the MLP is normalised
    norms_after: bool = False  # their output is normalised before it joins the stream
    qk_norm_over: Literal["head", "heads"] = "head"  # what `use_qk_norm` normalises: each head, or all heads together
    scales_embedding: bool = False  # the embedding is multiplied by the root of its width
    has_biases: bool = False  # forces attention_out_bias and mlp_projection_bias


_GEMMA = Block(norm_adds_one=True, norms_after=True, scales_embedding=True)

BLOCKS: dict[str, Block] = {
    "llama2": Block(),
    "mistral": Block(),
    "qwen2": Block(),
    "qwen3": Block(),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "olmo2": Block(norms_before=False, norms_after=True, qk_norm_over="heads"),
    "phi3": Block(),
    "gpt2": Block(norm="layer", has_biases=True),
}

LOCAL, GLOBAL = "local_sliding", "global"


def is_local_layer(attention_type: str, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer attends to a window only; the pattern repeats over the layers."""
    pattern = attention_type.split(",")
    return tuple(pattern[layer % len(pattern)].strip() == LOCAL for layer in range(num_layers))
