"""A YAML file as the texts of its keys: no type is guessed and no object is made."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from maxbatch.config.keys import ROWS
from maxbatch.config.values import shown, shown_path
from maxbatch.system.errors import ConfigError

_MOST_BYTES = 2**20
# Keys that a file may state as a list: [a, b] is "a;b", [{path: a, weight: 0.7}, ...] is "a,0.7;...".
_LISTS = frozenset(key.name for key in ROWS if key.kind == "paths")


class Entry(NamedTuple):
    """One key as it is stated.

    Attributes:
      name: the key.
      text: its value, unread.
      plain: whether the value is written without quotes.
      where: file and line, or what else states it, for messages.
    """

    name: str
    text: str
    plain: bool
    where: str


def entries(path: Path) -> Iterator[Entry]:
    """Yields the keys of a config file.

    Raises:
      ConfigError: the file cannot be read, or is not lines of `key: value`.
    """
    node = compose(path)
    if node is not None:
        for name, value_node, where in pairs(path, node):
            yield _entry(name, value_node, where)


def compose(path: Path, what: str = "config file") -> yaml.Node | None:
    """Returns a YAML file as a tree of nodes, None for an empty one; `what` names it in messages.

    Raises:
      ConfigError: the file cannot be read, or is no YAML.
    """
    where = f"{what} {shown_path(path)}"
    try:
        return yaml.compose(file_text(path), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{where}: {_reason(error)}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
        raise ConfigError(f"{shown_path(path)}{line}: is no valid YAML ({problem})") from None
    except (ValueError, RecursionError) as error:
        known = {RecursionError: "nested too deeply", UnicodeDecodeError: "not UTF-8 text"}
        problem = known.get(type(error), str(error))
        raise ConfigError(f"{where}: cannot be read ({problem})") from None


def file_text(path: Path) -> str:
    """Returns the text of a YAML file; a pipe or a device, which may never end, is not opened.

    Raises:
      OSError: it cannot be read, or is not a regular file.
      ValueError: it is larger than 1 MB, or not UTF-8 text.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(0, "not a regular file")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES // 2**20} MB")
    return content.decode("utf-8")


def pairs(path: Path, node: yaml.Node) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yields the keys of a mapping, their values, and where they stand: file and line.

    Raises:
      ConfigError: the node is not a mapping of texts, or states a key twice.
    """
    file = shown_path(path)
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{file}:{node.start_mark.line + 1}: must be lines of `key: value`")
    seen: dict[str, int] = {}
    for name_node, value_node in node.value:
        line = name_node.start_mark.line + 1
        where = f"{file}:{line}"
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
    if not isinstance(node, yaml.ScalarNode):
        rule = "a path or a list of paths" if name in _LISTS else "one value, not a list or a mapping"
        raise ConfigError(f"{where}: {shown(name)} takes {rule}")
    if not node.tag.startswith("tag:yaml.org,2002:"):
        raise ConfigError(f"{where}: {shown(name)} takes no tag such as {shown(node.tag)}")
    return Entry(name, node.value, node.style is None, where)


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
            raise ConfigError(
                f"{where}: an item must be a path or {{path: ..., weight: ...}}; "
                "works: {path: a.jsonl, weight: 0.7}"
            )
    path, weight = item["path"], item.get("weight")
    if not path or ";" in path:
        raise ConfigError(f"{where}: {shown(path)!r} must be a path without ';', which separates paths")
    return path if weight is None else f"{path},{weight}"


def _reason(error: OSError) -> str:
    return {FileNotFoundError: "does not exist", IsADirectoryError: "is a folder, not a YAML file"}.get(
        type(error), f"cannot be read ({error.strerror})"
    )
