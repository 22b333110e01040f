"""Files of other programs: what they are, their text, and the words and values of YAML and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from maxbatch.commands.import_config.translation import Stated
from maxbatch.config.values import shown_path
from maxbatch.config.yaml_file import compose
from maxbatch.system.errors import ConfigError


def is_yaml(path: Path) -> bool:
    """Returns whether a file is YAML or JSON by its name, or a mapping by its text."""
    if path.suffix.lower() in (".yml", ".yaml", ".json"):
        return True
    if path.suffix.lower() in (".sh", ".bash"):
        return False
    return not re.search(r"^\s*(--|python|export |torchrun)|^[\w.\-]+=", text_of(path), re.M)


def text_of(path: Path) -> str:
    """Returns the text of a file; raises ConfigError for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown_path(path)}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def read_yaml(path: Path) -> dict[str, Stated]:
    """Returns the words of a YAML or JSON file; those of a nested mapping are joined by dots."""
    node = compose(path)
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{shown_path(path)}: must be lines of `key: value`")
    try:
        return dict(_flat(_plain(node)))
    except RecursionError:
        raise ConfigError(f"{shown_path(path)}: cannot be read (nested too deeply)") from None


def _plain(node: yaml.Node) -> object:
    """Returns a tree of nodes as dicts, lists and texts; no type is guessed."""
    if isinstance(node, yaml.MappingNode):
        return {str(getattr(name, "value", name)): _plain(value) for name, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    return str(node.value)


def _flat(value: object, path: str = "") -> Iterator[tuple[str, Stated]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        yield path, value
    else:
        yield path, "" if isinstance(value, dict) else str(value)
