"""Files of other programs: kinds, text, and the words and values of YAML and JSON."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from maxbatch.around.importers.translation import Merged, Stated
from maxbatch.config.values import shown, shown_path
from maxbatch.config.yaml_file import MERGED, MOST_BYTES, compose, refuse_tag
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.bounded import read_text

_MOST_WORDS = 2_000


def is_yaml(path: Path) -> bool:
    """Returns whether a file is YAML or JSON, by its name, or by a mapping in its text."""
    if path.suffix.lower() in (".yml", ".yaml", ".json", ".toml"):
        return True
    if path.suffix.lower() in (".sh", ".bash", ".py"):
        return False
    return not re.search(r"^[ \t]*(--|python|export |torchrun)|^[\w.\-]+=", text_of(path), re.M)


def text_of(path: Path) -> str:
    """Reads a text file; raises ConfigError if it is unreadable or larger than MOST_BYTES."""
    with reading(shown_path(path)):
        return (
            read_text(path, shown_path(path), MOST_BYTES)
            .removeprefix("\ufeff")
            .replace("\r\n", "\n")
        )


def read_yaml(path: Path) -> dict[str, Stated]:
    """Reads the words of a YAML, JSON or TOML file; nested names are joined by dots.

    Raises:
      ConfigError: the file is unreadable, exceeds a bound, or states a word with two values.
    """
    if path.suffix.lower() == ".toml":
        return _read_toml(path)
    node = compose(path)
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{shown_path(path)}: must be lines of `key: value`")
    words: dict[str, Stated] = {}
    for word, value in _flat(node, shown_path(path)):
        state(words, word, value, shown_path(path))
    return words


def _read_toml(path: Path) -> dict[str, Stated]:
    words: dict[str, Stated] = {}
    try:
        for word, value in _flat_table(tomllib.loads(text_of(path), parse_float=str)):
            state(words, word, value, shown_path(path))
    except (ValueError, RecursionError) as error:  # also numbers of too many digits
        raise ConfigError(f"{shown_path(path)}: is not TOML: {shown(str(error))}") from None
    return words


def _flat_table(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Stated]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat_table(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", value
        else:
            yield (
                f"{prefix}{name}",
                str(value).lower()
                if isinstance(value, bool)
                else ""
                if value == {}
                else str(value),
            )


def state(words: dict[str, Stated], word: str, value: Stated, where: str) -> None:
    """Adds a word to `found`; raises ConfigError, with `where` in front, for too many words or a
    repeated one.
    """
    if word in words and words[word] != value:
        raise _two_values(where, word, words[word], value)
    words[word] = value
    if len(words) > _MOST_WORDS:
        raise ConfigError(
            f"{where}: states more than {_MOST_WORDS:,} words, the most that are read"
        )


def _two_values(where: str, word: str, *values: object) -> ConfigError:
    texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
    both = " and ".join(shown(text, 40) or '""' for text in texts)
    return ConfigError(f"{where}: {shown(word)} is stated twice, as {both}; works: one of the two")


def renamed(words: Mapping[str, Stated], where: str) -> dict[str, Stated]:
    """Replaces `-` by `_` in words; raises ConfigError if that gives a word two values."""
    new_words: dict[str, Stated] = {}
    for word, value in words.items():
        state(new_words, word.replace("-", "_"), value, where)
    return new_words


def _flat(
    node: yaml.MappingNode, where: str, prefix: str = "", merged: bool = False
) -> Iterator[tuple[str, Stated]]:
    text = Merged if merged else str
    for name, value in _pairs(node, where):
        word = f"{prefix}{name}"
        if isinstance(value, yaml.MappingNode) and value.value:
            refuse_tag(value, word, _line(where, value))
            yield from _flat(value, where, f"{word}.", merged or value.tag == MERGED)
        else:
            plain = _plain(value, where)
            yield word, plain if isinstance(plain, list) else text("" if plain == {} else plain)


def _plain(node: yaml.Node, where: str) -> object:
    """Converts nodes to dicts, lists and texts, without guessing types."""
    refuse_tag(node, "a value", _line(where, node))
    if isinstance(node, yaml.MappingNode):
        return {name: _plain(value, where) for name, value in _pairs(node, where)}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, where) for item in node.value]
    return str(node.value)


def _pairs(node: yaml.MappingNode, where: str) -> Iterator[tuple[str, yaml.Node]]:
    """Yields the keys and values of a mapping; raises ConfigError for a key with two values."""
    seen: dict[str, yaml.Node] = {}
    for name_node, value in node.value:
        if not isinstance(name_node, yaml.ScalarNode):
            raise ConfigError(f"{_line(where, name_node)}: must be lines of `key: value`")
        name = name_node.value
        if name not in seen:
            seen[name] = value
            yield name, value
        elif (values := (_plain(seen[name], where), _plain(value, where))) and values[0] != values[
            1
        ]:
            raise _two_values(_line(where, name_node), name, *values)


def _line(where: str, node: yaml.Node) -> str:
    return f"{where}:{node.start_mark.line + 1}"
