"""The number of a model's parameters, from its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxbatch.config.blocks import BLOCKS


def num_parameters(keys: Mapping[str, Any]) -> int:
    """Returns the parameters of a `Decoder` of these keys, without adapters."""
    d, layers, vocabulary = (int(keys[name]) for name in ("base_emb_dim", "base_num_decoder_layers", "vocab_size"))
    block = BLOCKS[keys["decoder_block"]]
    norm = d * (2 if block.norm == "layer" else 1)
    norms = 2 * (block.norms_before + block.norms_after)
    tables = vocabulary + max(int(keys["trainable_position_size"]), 0)
    tables += 0 if keys["logits_via_embedding"] else vocabulary
    return tables * d + layers * (_of_attention(keys) + _of_mlp(keys) + norms * norm) + norm


def _of_attention(keys: Mapping[str, Any]) -> int:
    names = ("base_emb_dim", "head_dim", "base_num_query_heads", "base_num_kv_heads")
    d, h, heads, kv_heads = (int(keys[name]) for name in names)
    block = BLOCKS[keys["decoder_block"]]
    count = 2 * d * h * (heads + kv_heads)
    count += h * (heads + 2 * kv_heads) if keys["attention_bias"] else 0
    count += d if keys["attention_out_bias"] or block.has_biases else 0
    if keys["use_qk_norm"]:
        count += h * (heads + kv_heads if block.qk_norm_over == "heads" else 2)
    return count


def _of_mlp(keys: Mapping[str, Any]) -> int:
    d, f = int(keys["base_emb_dim"]), int(keys["base_mlp_dim"])
    inner = 2 if keys["mlp_activations"].endswith(",linear") else 1
    has_biases = keys["mlp_projection_bias"] or BLOCKS[keys["decoder_block"]].has_biases
    return (inner + 1) * d * f + (inner * f + d if has_biases else 0)
