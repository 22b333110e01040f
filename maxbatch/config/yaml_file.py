"""YAML files as texts by key; no type is guessed and no object is made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from maxbatch.config.keys import Entry
from maxbatch.config.sections import FORMER_KEYS, KEYS
from maxbatch.config.values import shown, shown_path
from maxbatch.system.errors import ConfigError, TrainingError, reason
from maxbatch.system.storage.bounded import read_text
from maxbatch.system.storage.bounded_yaml import compose_yaml
from maxbatch.system.storage.storage import AnyPath

MOST_BYTES = 2**20  # of a config file
_MOST_NODES = 20_000  # keys and values: one or two seconds of parsing
_PROBLEMS: dict[type[Exception], str] = {
    FileNotFoundError: "does not exist",
    IsADirectoryError: "is a folder, not a YAML file",
}
_STRING_OR_COMMENT = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\Z)|//[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/|\Z)', re.S
)
_MERGE = "tag:yaml.org,2002:merge"
MERGED = "tag:maxbatch,2026:merged"  # marks a mapping whose keys `<<` has merged into another
_TAGS = frozenset([MERGED]) | frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value")
)
# Keys that may be lists in a file: [a, b] is "a;b", [{path: a, weight: 0.7}, ...] is "a,0.7;...".
_LISTS = frozenset(name for name, key in KEYS.items() if key.kind == "paths")
# Keys that may be lists in a file and keep their brackets, because [] differs from null.
_BRACKETED = frozenset({"adamw_mask"})
# Keys that may be mappings of names in a file: {a: b} is "{a: b}".
_FIELD_NAMES = frozenset(name for name, key in KEYS.items() if key.kind == "fields")
# Keys that may be lists of words in a file: [a, b] is "a,b".
_WORD_LISTS = {
    "mlp_activations",
    "attention_type",
    *(name for name, key in KEYS.items() if key.kind == "choices"),
}


def entries(path: AnyPath) -> Iterator[Entry]:
    """Yields the keys of a config file, without former keys that change nothing.

    Raises:
      ConfigError: the file cannot be read, or its lines are not `key: value`.
    """
    node = compose(path)
    if node is not None:
        for name, value_node, where in pairs(path, node):
            if name not in KEYS and _is_mapping(value_node) and value_node.value:
                yield from _block(path, name, value_node)
            elif (entry := _entry(name, value_node, where)).text != FORMER_KEYS.get(name):
                yield entry


def quoted(text: str) -> str:
    """Returns a text as double-quoted YAML on one line."""
    return yaml.safe_dump(text, default_style='"', width=float("inf"), allow_unicode=True).strip()


def compose(path: AnyPath, label: str = "config file") -> yaml.Node | None:
    """Parses a YAML or JSON file into nodes; None for an empty file; `label` names the file in
    messages.

    Raises:
      ConfigError: the file cannot be read, or is not YAML.
    """
    where = f"{label} {shown_path(path)}"
    try:
        text = read_text(path, where, MOST_BYTES).removeprefix("\ufeff")
        return compose_text(_as_yaml(text) if path.suffix.lower() == ".json" else text, where, path)
    except yaml.MarkedYAMLError as error:
        why = ", ".join(filter(None, (error.context, error.problem)))
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{shown_path(path)}{line}: is not valid YAML ({why})") from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{shown_path(path)}: is not valid YAML ({getattr(error, 'reason', '')})"
        ) from None
    except (ConfigError, TrainingError):
        raise
    except (OSError, ValueError) as error:
        problem = _PROBLEMS.get(type(error), f"cannot be read ({reason(error)})")
        raise ConfigError(f"{where}: {problem}") from None


def _as_yaml(text: str) -> str:
    """Returns JSON as YAML, which includes it except for tabs, and for HJSON's comments, which
    become blanks.

    Trailing commas are YAML.
    """

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return _STRING_OR_COMMENT.sub(blank, text.replace("\t", " "))


def compose_text(text: str, label: str, path: AnyPath) -> yaml.Node | None:
    """Parses YAML into nodes, with merge keys (`<<`) resolved; `path` names the file in messages.

    Raises:
      ConfigError: the text exceeds a bound, or a merge key holds anything but mappings.
      yaml.YAMLError: the text is not YAML.
    """
    root = compose_yaml(text, label, most_nodes=_MOST_NODES)
    if root is not None:
        _merge(path, root, set())
    return root


def _merge(path: AnyPath, node: yaml.Node, done: set[int]) -> None:
    """Replaces every merge key below a node by its keys that are not stated beside it."""
    if id(node) in done or isinstance(node, yaml.ScalarNode):
        return
    done.add(id(node))
    for child in node.value:
        for part in child if isinstance(node, yaml.MappingNode) else (child,):
            _merge(path, part, done)
    merges = (
        [(name, value) for name, value in node.value if name.tag == _MERGE]
        if _is_mapping(node)
        else []
    )
    if not merges:
        return
    lines = [name.start_mark.line + 1 for name, _ in merges]
    if len(merges) > 1:
        rule = f"<< is stated twice (first in line {lines[0]}); works: <<: [*a, *b]"
        raise ConfigError(f"{shown_path(path)}:{lines[1]}: {rule}")
    ((_, value),) = merges
    sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if not all(map(_is_mapping, sources)):
        raise ConfigError(
            f"{shown_path(path)}:{lines[0]}: << takes a mapping or a list of them; works: <<: "
            "*anchor"
        )
    pairs = [pair for pair in node.value if pair[0].tag != _MERGE]
    seen = {name.value for name, _ in pairs if isinstance(name, yaml.ScalarNode)}
    for source in sources:
        source.tag = MERGED
        added = [
            pair
            for pair in source.value
            if not isinstance(pair[0], yaml.ScalarNode) or pair[0].value not in seen
        ]
        pairs += added
        seen |= {name.value for name, _ in added if isinstance(name, yaml.ScalarNode)}
    node.value = pairs


def _is_mapping(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode)


def pairs(path: AnyPath, node: yaml.Node) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yields the keys of a mapping, their values, and their file and line.

    Raises:
      ConfigError: the node is not a mapping of texts, or states a key twice.
    """
    seen: dict[str, int] = {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{shown_path(path)}:{node.start_mark.line + 1}: must be lines of `key: value`"
        )
    for name_node, value_node in node.value:
        line = name_node.start_mark.line + 1
        where = f"{shown_path(path)}:{line}"
        if not isinstance(name_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: must be lines of `key: value`")
        name = name_node.value
        if name in seen:
            raise ConfigError(
                f"{where}: {shown(name)} is stated twice (first in line {seen[name]})"
            )
        seen[name] = line
        yield name, value_node, where


def refuse_tag(node: yaml.Node, name: str, where: str) -> None:
    """Raises ConfigError for a value with a tag that changes its meaning."""
    if node.tag not in _TAGS:
        raise ConfigError(f"{where}: {shown(name)} takes no tag such as {shown(node.tag)}")


def _block(path: AnyPath, block: str, node: yaml.Node) -> Iterator[Entry]:
    """Yields the keys of an unknown block as paths, a.b, to refuse them with all other unknown
    keys.
    """
    for name, value_node, where in pairs(path, node):
        if _is_mapping(value_node) and value_node.value:
            yield from _block(path, f"{block}.{name}", value_node)
        else:
            text = (
                value_node.value
                if isinstance(value_node, yaml.ScalarNode)
                else _as_json(value_node)
            )
            yield Entry(f"{block}.{name}", text, True, where)


def _entry(name: str, node: yaml.Node, where: str) -> Entry:
    if name in _LISTS and isinstance(node, yaml.SequenceNode):
        return Entry(name, ";".join(_path_item(item, name) for item in node.value), False, where)
    if name in _WORD_LISTS and isinstance(node, yaml.SequenceNode):
        return Entry(name, ",".join(str(item.value) for item in node.value), False, where)
    if name in _BRACKETED and isinstance(node, yaml.SequenceNode):
        return Entry(name, f"[{','.join(str(item.value) for item in node.value)}]", False, where)
    if name == "dataset_path" and isinstance(node, yaml.MappingNode):
        return Entry(name, _in_braces(node, where), False, where)
    if name in _FIELD_NAMES and isinstance(node, yaml.MappingNode):
        return Entry(name, field_names_text(node, name, where), False, where)
    if name not in KEYS and not isinstance(node, yaml.ScalarNode):
        return Entry(name, _as_json(node), False, where)  # refused later, with all unknown keys
    if not isinstance(node, yaml.ScalarNode):
        rule = (
            "a path or a list of paths" if name in _LISTS else "one value, not a list or a mapping"
        )
        raise ConfigError(f"{where}: {shown(name)} takes {rule}")
    refuse_tag(node, name, where)
    return Entry(name, node.value, node.style is None, where)


def _as_json(node: yaml.Node) -> str:
    """Returns a list of scalars and flat mappings in one line, for the answer to an unknown key; ""
    for others.
    """
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    values: list[object] = []
    for item in items:
        pairs_of = item.value if isinstance(item, yaml.MappingNode) else []
        if not all(isinstance(part, yaml.ScalarNode) for pair in pairs_of for part in pair):
            return ""
        values.append(
            {name.value: value.value for name, value in pairs_of} if pairs_of else item.value
        )
    return json.dumps(values, ensure_ascii=False, default=str) if values else ""


def _in_braces(node: yaml.Node, where: str) -> str:
    """Returns nested mappings of scalars as one line of JSON; scalars keep their text."""

    def plain(value: yaml.Node) -> object:
        return value.value if isinstance(value, yaml.ScalarNode) else dict(texts(value))

    def texts(value: yaml.Node) -> Iterator[tuple[str, object]]:
        if not isinstance(value, yaml.MappingNode):
            raise ConfigError(f"{where}: a mixture by positions must be mappings of texts")
        return (
            (name, plain(below)) for name, below, _ in pairs(Path(where.rpartition(":")[0]), value)
        )

    return json.dumps(dict(texts(node)), ensure_ascii=False)


def field_names_text(node: yaml.MappingNode, name: str, where: str) -> str:
    """Returns a mapping of names to names on one line."""
    if not all(isinstance(part, yaml.ScalarNode) for pair in node.value for part in pair):
        raise ConfigError(
            f"{where}: {name} must map names to names; works: {name}: {{prompt: question}}"
        )
    return (
        "{"
        + ", ".join(f"{field.value}: {their_name.value}" for field, their_name in node.value)
        + "}"
    )


def _path_item(node: yaml.Node, name: str) -> str:
    """Returns an item of a list of paths on one line: `PATH`, or `PATH,WEIGHT` in a mixture."""
    where = f"{name}, line {node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        item: dict[str, str] = {"path": node.value}
    else:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        plain = all(isinstance(part, yaml.ScalarNode) for pair in pairs for part in pair)
        item = {key.value: value.value for key, value in pairs} if plain else {}
        if set(item) != {"path", "weight"} or len(pairs) > len(item):
            raise ConfigError(
                f"{where}: an item must be a path or {{path: ..., weight: ...}}; "
                "works: {path: a.jsonl, weight: 0.7}"
            )
    path, weight = item["path"], item.get("weight")
    if not path or ";" in path:
        raise ConfigError(
            f"{where}: {shown(path)!r} must be a path without ';', which separates paths"
        )
    return path if weight is None else f"{path},{weight}"
