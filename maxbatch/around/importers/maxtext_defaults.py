"""MaxText's defaults as of 0.2.5: the config file of each module, and its values.

`tests/helpers/maxtext_defaults.py` writes the table, `maxtext_defaults.txt`, from an installed
MaxText.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from maxbatch.around.importers.table import sections, settings
from maxbatch.around.importers.translation import Stated

BASE = "base.yml"
_MODULES, _TYPES, _MODELS = "modules", "types", "models"
# Words of a resolved config that MaxText computes from others.
_FOLLOW = re.compile(
    r"(ici|dcn)_parallelism|(global|micro)_batch_size_to_\w+|rampup_(end_step|samples_per_increment_to_load)"
    r"|num_(target_devices|diloco_replicas)|metrics_dir|tensors_(on_device|to_offload)|pipeline_parallel_layers"
    r"|(eval_)?local_\w+|padded_base_moe_mlp_dim|quantization_local_shard_count"
    r"|using_pipeline_parallelism"
)
_NOTHING = ("", "null", "none", "~", "[]", "{}")


def file_of_module(program: str) -> str:
    """Returns the default config file of a MaxText program, given by module or path."""
    module = re.sub(r"^.*?(?=maxtext\.)", "", program.removesuffix(".py").replace("/", "."))
    return str(_table()[_MODULES].get(module, BASE))


def values_of(file: str) -> Mapping[str, Stated] | None:
    """Returns the words of a module's config file, without base.yml's; None for another file."""
    name = re.sub(r"^.*configs/", "", re.sub("/+", "/", file))
    known = {place: place for place in _table()} | {Path(place).name: place for place in _table()}
    place = known.get(name) if name.endswith(".yml") else None
    return None if place is None else {} if place == BASE else _table()[place]


def is_known(word: str) -> bool:
    """Returns whether base.yml has a word."""
    return word in _table()[BASE]


def default_of(word: str) -> str:
    """Returns the value of a word in base.yml, as a config states it: 32000 for 32_000."""
    text = str(_table()[BASE][word])
    if text == "None":
        return "null"
    number = re.fullmatch(r"(-?[\d_]+)(\.\d*)?(e-?\d+)?", text)
    if number is None:
        return text
    whole, part, exponent = (group or "" for group in number.groups())
    return f"{whole.replace('_', '')}{part.rstrip('.')}{re.sub('(?<=e-)0', '', exponent)}"


def is_default(word: str, value: Stated) -> bool:
    """Returns whether a word has its default, from base.yml, else a module's file, else its
    type.
    """
    files = [
        words
        for section, words in _table().items()
        if section.endswith((".yml", _TYPES)) and word in words
    ]
    if word.endswith("_soft_cap") and _plain(value) == "":
        return True  # as 0.0
    return bool(files) and _plain(files[0][word]) == _plain(value)


def follows(word: str) -> bool:
    """Returns whether MaxText computes a word of a resolved config from others."""
    return _FOLLOW.fullmatch(word) is not None


def words_of_model(name: str) -> frozenset[str]:
    """Returns the words in a model's file; empty if there is none."""
    return frozenset(str(_table()[_MODELS].get(name.replace("-Instruct", ""), "")).split())


@functools.cache
def _table() -> Mapping[str, dict[str, Stated]]:
    """Returns the sections of the table, each with its words and values."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    table: dict[str, dict[str, Stated]] = {}
    for name, lines in sections(text):
        if name == _MODELS:
            models = (line.partition(" ") for line in lines.split("\n"))
            table[name] = {model: words for model, _, words in models}
        else:
            values: dict[str, Stated] = {
                word: re.findall(r"[^,]+", text[1:-1]) if text.startswith("[") else text
                for word, text in settings(lines).items()
            }
            table[name] = {
                word: value for word, value in values.items() if word != "base_config" or not value
            }
    return table


def _plain(value: object) -> object:
    """Normalises a value, so that its spellings compare equal."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    text = str(value).strip()
    if text.lower() in _NOTHING:
        return ""
    if text.startswith("["):
        return [_plain(item) for item in re.findall(r"[^\s\[\],'\"]+", text)]
    try:
        return float(text.replace("_", ""))
    except ValueError:
        return text.lower() if text.lower() in ("true", "false") else text
