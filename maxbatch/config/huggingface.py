"""The `config.json` of a Hugging Face model as config keys, read as transformers 4 and 5 write it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from maxbatch.config.values import shown, shown_path
from maxbatch.system.errors import ConfigError, cannot_read

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

Json = dict[str, Any]


def is_huggingface_folder(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a folder with a `config.json`, as Hugging Face's models have one."""
    return (Path(path).expanduser() / CONFIG_FILE).is_file()


def read_config_json(path: str | os.PathLike[str]) -> Json:
    """Returns the `config.json` of a folder; raises ConfigError if it cannot be read or is no object."""
    file = Path(path).expanduser() / CONFIG_FILE
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise cannot_read(file, error) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{shown_path(file)}: is not JSON") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{shown_path(file)}: must be a JSON object")
    return found


def keys_of_folder(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the texts of the keys that a Hugging Face folder states: those of the model, and its tokenizer's.

    Raises:
      ConfigError: a family, or a setting of one, that is not supported.
    """
    folder = Path(path).expanduser().absolute()
    keys = model_keys(read_config_json(folder), str(folder))
    if (folder / TOKENIZER_FILE).is_file():
        keys |= {"tokenizer_type": "huggingface", "tokenizer_path": str(folder)}
    return keys


def model_keys(stated: Json, where: str) -> dict[str, str]:
    """Returns the texts of the model keys that a `config.json` states; `where` names it in messages."""
    family = stated.get("model_type")
    if family != "llama":
        raise ConfigError(f"{shown_path(where)}: model_type={shown(str(family))} is not supported; works: llama")
    width, heads = stated["hidden_size"], stated["num_attention_heads"]
    rope = stated.get("rope_parameters") or {}
    return {
        "base_emb_dim": str(width),
        "base_num_query_heads": str(heads),
        "base_num_kv_heads": str(stated.get("num_key_value_heads") or heads),
        "head_dim": str(stated.get("head_dim") or width // heads),
        "base_mlp_dim": str(stated["intermediate_size"]),
        "base_num_decoder_layers": str(stated["num_hidden_layers"]),
        "vocab_size": str(stated["vocab_size"]),
        "logits_via_embedding": str(stated.get("tie_word_embeddings", False)).lower(),
        "rope_max_timescale": str(rope.get("rope_theta") or stated.get("rope_theta") or 10000),
        "normalization_layer_epsilon": str(stated.get("rms_norm_eps", 1e-6)),
        "scan_layers": "true",
    }
