"""A tiny llama as a Hugging Face folder, written without torch, and whether two folders hold the
same tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from maxbatch.system.storage.safetensors import DTYPES, stored_tensors, write_tensors

HEADS, KV_HEADS, WIDTH, HEAD, MLP, LAYERS, VOCABULARY = 4, 2, 16, 4, 24, 2, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def tiny_llama_tensors() -> dict[str, np.ndarray]:
    """Returns random tensors by their names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        of_layer = {
            "input_layernorm": (WIDTH,),
            "self_attn.q_proj": (HEADS * HEAD, WIDTH),
            "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
            "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * HEAD),
            "post_attention_layernorm": (WIDTH,),
            "mlp.gate_proj": (MLP, WIDTH),
            "mlp.up_proj": (MLP, WIDTH),
            "mlp.down_proj": (WIDTH, MLP),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path, tensors: dict[str, np.ndarray] | None = None, *, dtype: str = "F32", **fields: Any
) -> Path:
    """Writes a tiny llama with some fields of its `config.json` replaced; returns the folder."""
    tensors = tiny_llama_tensors() if tensors is None else tensors
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    arrays = (tensor.astype(DTYPES[dtype]) for tensor in tensors.values())
    write_tensors(folder / "model.safetensors", dtype, shapes, arrays)
    return folder


def assert_same_tensors(folder: Path, other: Path) -> None:
    ours, theirs = stored_tensors(folder), stored_tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert tensor.array().tobytes() == theirs[name].array().tobytes(), name
