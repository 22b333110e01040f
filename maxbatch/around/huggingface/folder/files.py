"""The files of a Hugging Face folder beside its tensors, as an export writes them."""

from __future__ import annotations

import json
import re

from maxbatch.around.huggingface.folder.config_json import (
    CONFIG_FILE,
    GENERATION_FILE,
    has_generation_file,
    is_huggingface_folder,
    read_config_json,
)
from maxbatch.around.huggingface.folder.model_fields import TOKEN_IDS, config_json
from maxbatch.config.combined import DecoderConfig, StreamConfig
from maxbatch.config.hub import folder_of
from maxbatch.config.sections import DataConfig
from maxbatch.data.tokenizers.tokenizers import tokenizer_of
from maxbatch.families.record import Json
from maxbatch.system.errors import reading

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_WRITTEN = re.compile(
    r"(model(-\d{5}-of-\d{5})?|adapter_model)\.safetensors|model\.safetensors\.index\.json|(generation_|adapter_)?config\.json"
)


def is_exported(name: str) -> bool:
    """Returns whether a file of this name is one that an export writes."""
    return bool(_WRITTEN.fullmatch(name)) or name in _TOKENIZER_FILES


def model_files(config: DecoderConfig, stream: StreamConfig, dtype: str) -> dict[str, bytes]:
    """Returns the contents of a model's files by name, `config.json` last, which marks a folder as
    whole.

    A model that was imported keeps what its folder states and no key does: ids of tokens, and the
    rules of generation.

    Args:
      config: the keys of the model.
      stream: the keys of its tokenizer, and of the folder that it was imported from.
      dtype: of the tensors, as `float32`.

    Raises:
      ConfigError: the model's family cannot express a key, or a file cannot be read.
    """
    path = stream.load_parameters_path
    kept = read_config_json(path) if path and is_huggingface_folder(path) else {}
    fields = config_json(config, dtype, kept or _token_ids(stream))
    if path and has_generation_file(path):
        generation = read_config_json(path, GENERATION_FILE)
    else:
        generation = {name: fields.get(name) for name in TOKEN_IDS}
    return {
        **tokenizer_files(stream),
        GENERATION_FILE: _json(generation),
        CONFIG_FILE: _json(fields),
    }


def tokenizer_files(config: DataConfig) -> dict[str, bytes]:
    """Returns the contents of a tokenizer's files by name; none for a tokenizer without files."""
    if not config.tokenizer_path:
        return {}
    path = folder_of(config.tokenizer_path)
    folder = path if path.is_dir() else path.parent
    files = {name: folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()}
    if config.tokenizer_type == "sentencepiece" and path.is_file():
        files["tokenizer.model"] = path
    contents = {}
    for name, file in files.items():
        with reading(file):
            contents[name] = file.read_bytes()
    return contents


def _token_ids(stream: StreamConfig) -> Json:
    tokenizer = tokenizer_of(stream)
    return dict(zip(TOKEN_IDS, (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id), strict=True))


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
