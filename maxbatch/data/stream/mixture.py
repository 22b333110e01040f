"""Mixtures in a config: `PATH,WEIGHT;PATH,WEIGHT`, or a mixture file.

A mixture file (`*.yml`, `*.yaml`, `*.json`) maps the name of each source to its fields:

    web:  {path: web/*.jsonl, weight: 0.7}
    code: {path: code.parquet, weight: 0.3, dataset_type: parquet, text_field: content}

Relative paths are relative to the file. A source that does not state `dataset_type`, `text_field` or `record_format`
takes the config's. A source of `dataset_type: python_stdlib` has no path. Weights are exact decimals or fractions in
any unit: only their ratios count.

Names are for people (in the one-line form, the path is the name): the stream depends on the contents, weights and order
of the sources.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import yaml
from ml_collections import ConfigDict

from maxbatch.config.keys import Fixes, names_fixing
from maxbatch.config.loading import keys
from maxbatch.config.paths import is_mixture_file
from maxbatch.config.rules import check_data_paths
from maxbatch.config.values import Scalar, exact, nearest_name, shown, shown_path
from maxbatch.config.yaml_file import compose
from maxbatch.system.errors import ConfigError

# Fields of a source in a mixture file that are config keys as well.
SOURCE_KEYS = names_fixing(Fixes.RECORDS)
_FIELDS = ("path", "weight", *SOURCE_KEYS)
_WEIGHT = Scalar("weight", "exact", default="1")
_PATH = Scalar("path", "text")


class MixtureSource(NamedTuple):
    """One source of a mixture.

    Attributes:
      name: its name in the mixture.
      weight: its share of the samples; the weights of all sources add up to 1.
      config: the config with this source as its dataset.
    """

    name: str
    weight: Fraction
    config: ConfigDict


class _Item(NamedTuple):
    where: str  # for messages
    name: str
    path: str
    weight: str
    settings: dict[str, str]


def read_mixture(config: ConfigDict) -> tuple[MixtureSource, ...] | None:
    """Returns the sources of `dataset_path` in order, or None if it is not a mixture; opens no data.

    Raises:
      ConfigError: a mixture that cannot be read or that breaks a rule, or weights in `eval_dataset_path`.
    """
    check_data_paths(config)
    _check_eval_path(config)
    value = config.dataset_path
    if is_mixture_file(value):
        items = list(_file_items(value))
    else:
        items = list(_line_items(value))
        if not items:
            return None
    weights = [_weight(item) for item in items]
    _refuse_same_paths(items)
    return tuple(
        MixtureSource(item.name, weight / sum(weights), _source_config(config, item))
        for item, weight in zip(items, weights, strict=True)
    )


def _check_eval_path(config: ConfigDict) -> None:
    value = config.eval_dataset_path
    paths = [_split_weight(part) for part in value.split(";")]
    if any(weight for _, weight in paths):
        plain = ";".join(path for path, _ in paths)
        raise ConfigError(
            f"eval_dataset_path={shown(repr(value))}: held-out data have no weights, since all of them are used; "
            f"works: eval_dataset_path={plain!r}"
        )
    for path, _ in paths:
        _refuse_mixture_file(f"eval_dataset_path={shown(repr(value))}", path)


def _refuse_mixture_file(where: str, path: str) -> None:
    if is_mixture_file(path):
        raise ConfigError(
            f"{where}: {shown(path)} names a mixture file, and must name data; to read data from a file of that name, "
            f"give a glob: {_as_glob(path)}"
        )


def _as_glob(path: str) -> str:
    """Returns a pattern that only this path matches."""
    return f"{glob.escape(path[:-1])}[{path[-1]}]"


def _split_weight(part: str) -> tuple[str, str]:
    """Returns the path and the weight of `PATH,WEIGHT`; the weight is "" if the part after the comma is no number."""
    path, _, weight = part.rpartition(",")
    try:
        _WEIGHT.read(weight)
    except ConfigError:
        return part, ""
    return path, weight.strip()


def _line_items(value: str) -> Iterator[_Item]:
    """Yields the sources of the one-line form; none if no path has a weight."""
    pairs = [_split_weight(part) for part in value.split(";")]
    if not any(weight for _, weight in pairs):
        return
    where = f"dataset_path={shown(repr(value))}"
    for path, weight in pairs:
        path = path.strip()
        if not path or not weight:
            works = ";".join(f"{p or 'PATH'},{w or 1}" for p, w in pairs)
            what = f"{shown(path)} has no weight" if path else "a source has no path"
            raise ConfigError(f"{where}: {what}; works: dataset_path={works!r}")
        _refuse_mixture_file(where, path)
        yield _Item(where, path, path, weight, {})


def _file_items(path: str) -> Iterator[_Item]:
    """Yields the sources of a mixture file."""
    file = Path(os.path.expanduser(path))
    root = _parsed(path, file)
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise ConfigError(
            f"{shown(path)}: must map names to sources, as in `web: {{path: web.jsonl, weight: 0.7}}`; "
            f"if it holds data: dataset_path={_as_glob(path)!r}"
        )
    seen: set[str] = set()
    for name_node, fields_node in root.value:
        where = f"{shown(path)}:{name_node.start_mark.line + 1}"
        name = name_node.value if isinstance(name_node, yaml.ScalarNode) else ""
        if not name or not name.isprintable():
            raise ConfigError(f"{where}: the name of a source must be one line of text")
        if name in seen:
            raise ConfigError(f"{where}: source {shown(name)} is stated twice")
        seen.add(name)
        where = f"{where}: source {shown(name)}"
        fields = _fields(where, fields_node)
        settings = {key: fields[key] for key in SOURCE_KEYS if key in fields}
        _check_settings(where, settings)
        has_no_path = settings.get("dataset_type") == "python_stdlib"
        for field, works in (("path", "path: web.jsonl"), ("weight", "weight: 0.5")):
            if not fields.get(field) and not (field == "path" and has_no_path):
                raise ConfigError(f"{where}: has no {field}; works: {works}")
        if "path" in fields and has_no_path:
            raise ConfigError(f"{where}: dataset_type=python_stdlib reads no path; leave out path")
        _refuse_mixture_file(where, fields.get("path", ""))
        yield _Item(where, name, _below(file.parent, fields.get("path", "")), fields["weight"], settings)


def _parsed(path: str, file: Path) -> yaml.Node | None:
    try:
        # The nodes keep the text of scalars, so that 0.7 is exactly seven tenths.
        return compose(file, "mixture file")
    except ConfigError as error:
        raise ConfigError(
            f"dataset_path={shown(repr(path))}: {error} (seen from {shown_path(os.getcwd())}); "
            f"if it holds data: dataset_path={_as_glob(path)!r}"
        ) from None


def _fields(where: str, node: yaml.Node) -> dict[str, str]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}: must have fields, as in {{path: web.jsonl, weight: 0.7}}")
    fields: dict[str, str] = {}
    for name_node, value_node in node.value:
        name = name_node.value if isinstance(name_node, yaml.ScalarNode) else "a list or mapping"
        if name not in _FIELDS:
            nearest = nearest_name(name, _FIELDS, least_like=0) or "path"
            raise ConfigError(f"{where}: unknown field {shown(name)}; nearest: {nearest}")
        if name in fields:
            raise ConfigError(f"{where}: field {name} is stated twice")
        if not isinstance(value_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: field {name} takes one value, not a list or a mapping")
        fields[name] = value_node.value
    try:
        _PATH.read(fields.get("path", ""))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return fields


def _check_settings(where: str, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        choices = [choice for choice in keys()[name].choices if choice != "synthetic"]
        if choices and value not in choices:
            works = nearest_name(value, choices) or choices[-1]
            raise ConfigError(
                f"{where}: {name}={shown(value)}: must be one of {', '.join(choices)}; works: {name}: {works}"
            )
        if not value:
            raise ConfigError(f"{where}: {name} is empty; works: leave {name} out")


def _below(folder: Path, paths: str) -> str:
    """Returns paths that are relative to a folder as seen from here; `;` separates them."""
    return ";".join(
        part if "://" in part or os.path.isabs(os.path.expanduser(part)) else str(folder / part)
        for part in (part.strip() for part in paths.split(";"))
        if part
    )


def _weight(item: _Item) -> Fraction:
    try:
        weight = exact(_WEIGHT.read(item.weight))  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{item.where}: {error}") from None
    if weight <= 0:
        raise ConfigError(f"{item.where}: {_WEIGHT.fault(item.weight, 'greater than 0', 1)}")
    return weight


def _refuse_same_paths(items: list[_Item]) -> None:
    first: dict[str, str] = {}
    for item in items:
        for path in {part if "://" in part else _real(part) for part in item.path.split(";")}:
            if path in first:
                raise ConfigError(
                    f"{item.where}: {shown(item.path) or 'python_stdlib'} is in source {shown(first[path])} as well; "
                    "works: once, with the sum of the weights"
                )
            first[path] = item.name


def _real(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path)) if path else ""


def _source_config(config: ConfigDict, item: _Item) -> ConfigDict:
    source = config.copy_and_resolve_references()
    source.dataset_path = item.path
    for key, value in item.settings.items():
        source[key] = value
    if source.dataset_type != config.dataset_type:
        # Held-out paths have the config's own type, so that none of their files is in this source.
        source.eval_dataset_path = ""
    return source
