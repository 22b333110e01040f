"""A YAML file as the texts of its keys: no type is guessed and no object is made."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from maxbatch.config.sections import KEYS
from maxbatch.config.values import shown, shown_path
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage import AnyPath

_MOST_BYTES = 2**20
_PROBLEMS: dict[type[Exception], str] = {
    FileNotFoundError: "does not exist",
    IsADirectoryError: "is a folder, not a YAML file",
    RecursionError: "cannot be read (nested too deeply)",
    UnicodeDecodeError: "cannot be read (not UTF-8 text)",
}
# Keys that a file may state as a list: [a, b] is "a;b", [{path: a, weight: 0.7}, ...] is "a,0.7;...".
_LISTS = frozenset(key.name for key in KEYS if key.kind == "paths")
# Keys that a file may state as a list of words: [a, b] is "a,b".
_WORD_LISTS = frozenset(key.name for key in KEYS if key.kind == "choices") | {"mlp_activations", "attention_type"}
_NAMES = frozenset(key.name for key in KEYS)


class Entry(NamedTuple):
    """One key as it is stated."""

    name: str
    text: str  # its value, unread
    plain: bool  # whether the value is written without quotes
    where: str  # file and line, or what else states it, for messages


def entries(path: AnyPath) -> Iterator[Entry]:
    """Yields the keys of a config file.

    Raises:
      ConfigError: the file cannot be read, or is not lines of `key: value`.
    """
    node = compose(path)
    if node is not None:
        for name, value_node, where in pairs(path, node):
            yield _entry(name, value_node, where)


def compose(path: AnyPath, what: str = "config file") -> yaml.Node | None:
    """Returns a YAML or JSON file as a tree of nodes, None for an empty one; `what` names it in messages.

    Raises:
      ConfigError: the file cannot be read, or is no YAML.
    """
    try:
        return yaml.compose(_text(path), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{shown_path(path)}{line}: is no valid YAML ({error.problem})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{shown_path(path)}: is no valid YAML ({getattr(error, 'reason', '')})") from None
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = _PROBLEMS.get(type(error), f"cannot be read ({reason})")
        raise ConfigError(f"{what} {shown_path(path)}: {problem}") from None


def _text(path: AnyPath) -> str:
    if isinstance(path, Path):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe or a device may never end
            raise OSError(0, "not a regular file")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES // 2**20} MB")
    text = content.decode("utf-8")
    # Apart from tabs, YAML allows everything that JSON does.
    return text.replace("\t", " ") if path.suffix.lower() == ".json" else text


def pairs(path: AnyPath, node: yaml.Node) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yields the keys of a mapping, their values, and where they stand: file and line.

    Raises:
      ConfigError: the node is not a mapping of texts, or states a key twice.
    """
    seen: dict[str, int] = {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{shown_path(path)}:{node.start_mark.line + 1}: must be lines of `key: value`")
    for name_node, value_node in node.value:
        line = name_node.start_mark.line + 1
        where = f"{shown_path(path)}:{line}"
        if not isinstance(name_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: must be lines of `key: value`")
        name = name_node.value
        if name in seen:
            raise ConfigError(f"{where}: {shown(name)} is stated twice (first in line {seen[name]})")
        seen[name] = line
        yield name, value_node, where


def _entry(name: str, node: yaml.Node, where: str) -> Entry:
    if name in _LISTS and isinstance(node, yaml.SequenceNode):
        return Entry(name, ";".join(_path_item(item, name) for item in node.value), False, where)
    if name in _WORD_LISTS and isinstance(node, yaml.SequenceNode):
        return Entry(name, ",".join(str(item.value) for item in node.value), False, where)
    if name == "dataset_path" and isinstance(node, yaml.MappingNode):
        return Entry(name, _in_braces(node, where), False, where)
    if name not in _NAMES and not isinstance(node, yaml.ScalarNode):
        return Entry(name, "", False, where)  # an unknown key is refused as such, with all others
    if not isinstance(node, yaml.ScalarNode):
        rule = "a path or a list of paths" if name in _LISTS else "one value, not a list or a mapping"
        raise ConfigError(f"{where}: {shown(name)} takes {rule}")
    if not node.tag.startswith("tag:yaml.org,2002:"):
        raise ConfigError(f"{where}: {shown(name)} takes no tag such as {shown(node.tag)}")
    return Entry(name, node.value, node.style is None, where)


def _in_braces(node: yaml.Node, where: str) -> str:
    """Returns a mapping, of scalars or of mappings again, in one line of JSON, its scalars as they are written."""

    def plain(value: yaml.Node) -> Any:
        return value.value if isinstance(value, yaml.ScalarNode) else dict(texts(value))

    def texts(value: yaml.Node) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, yaml.MappingNode):
            raise ConfigError(f"{where}: a mixture by positions must be mappings of texts")
        return ((name, plain(below)) for name, below, _ in pairs(Path(where), value))

    return json.dumps(dict(texts(node)), ensure_ascii=False)


def _path_item(node: yaml.Node, name: str) -> str:
    """Returns an item of a list of paths as it is written in one line: `PATH`, or `PATH,WEIGHT` of a mixture."""
    where = f"{name}, line {node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        item: dict[str, str] = {"path": node.value}
    else:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        plain = all(isinstance(part, yaml.ScalarNode) for pair in pairs for part in pair)
        item = {key.value: value.value for key, value in pairs} if plain else {}
        if set(item) != {"path", "weight"}:
            raise ConfigError(f"{where}: an item must be a path or {{path: ..., weight: ...}}; "
                              "works: {path: a.jsonl, weight: 0.7}")  # fmt: skip
    path, weight = item["path"], item.get("weight")
    if not path or ";" in path:
        raise ConfigError(f"{where}: {shown(path)!r} must be a path without ';', which separates paths")
    return path if weight is None else f"{path},{weight}"
