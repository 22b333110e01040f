"""The small files of a Hugging Face folder: the keys that it states, the ids that end a text, and
the length of its context.
"""

from __future__ import annotations

import os

from maxbatch.around.huggingface.folder.model_fields import model_keys
from maxbatch.config.hub import folder_of, hub_name, hub_problem
from maxbatch.config.values import shown, shown_path
from maxbatch.families.record import Json
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.bounded import read_json

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"

_DEFAULT_LENGTH = 256  # max_target_length of base.yml


def is_huggingface_folder(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path, or a name of the hub, is a folder with a `config.json`, as Hugging
    Face's models have.
    """
    return not hub_problem(path) and (folder_of(path) / CONFIG_FILE).is_file()


def read_config_json(path: str | os.PathLike[str], name: str = CONFIG_FILE) -> Json:
    """Returns the `config.json` of a folder; raises ConfigError if it cannot be read or is no
    object.
    """
    file = folder_of(path) / name
    with reading(file):
        content = read_json(file, shown_path(file))
    if not isinstance(content, dict):
        raise ConfigError(f"{shown_path(file)}: must be a JSON object")
    return content


def has_generation_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether a Hugging Face folder has a `generation_config.json`."""
    return is_huggingface_folder(path) and (folder_of(path) / GENERATION_FILE).is_file()


def stated_end_tokens(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Returns the ids that end a text, from a folder's `generation_config.json`, else from its
    `config.json`.

    Raises:
      ConfigError: the file cannot be read, or its value is not ids.
    """
    has_own = has_generation_file(path)
    name = GENERATION_FILE if has_own else CONFIG_FILE
    value = read_config_json(path, name).get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        where = f"{shown_path(folder_of(path))}/{name}"
        raise ConfigError(
            f"{where}: eos_token_id={shown(repr(value))}: must be the id of a token, or a list "
            "of ids"
        )
    return tuple(tokens)


def stated_length(path: str | os.PathLike[str]) -> int:
    """Returns the context length that a folder's `config.json` states; 0 if it states none.

    Raises:
      ConfigError: the file cannot be read.
    """
    fields = read_config_json(path)
    length = fields.get("max_position_embeddings", fields.get("n_positions"))
    return length if type(length) is int else 0


def keys_of_folder(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the texts of the keys that a Hugging Face folder states, for the model and for its
    tokenizer.

    Raises:
      ConfigError: a family, or a setting of one, that is not supported.
    """
    folder = folder_of(path)
    keys = model_keys(read_config_json(path), f"{shown_path(folder)}/{CONFIG_FILE}") | {
        "scan_layers": "true"
    }
    if 0 < int(keys.get("trainable_position_size", 0)) < _DEFAULT_LENGTH:
        keys["max_target_length"] = keys["trainable_position_size"]
    if (folder / TOKENIZER_FILE).is_file():
        keys |= {"tokenizer_type": "huggingface", "tokenizer_path": hub_name(path) or str(folder)}
    return keys
