"""Mixtures in a config: `PATH,WEIGHT;PATH,WEIGHT`, a mapping of positions to them, or a mixture
file.

A mixture file (`*.yml`, `*.yaml`, `*.json`) maps the name of each source to its fields:

    web:  {path: web/*.jsonl, weight: 0.7}
    code: {path: code.parquet, weight: 0.3, dataset_type: parquet, text_field: content}

Relative paths are relative to the file. Defaults of `dataset_type`, `text_field` and
`record_format` are the config's. A source with `dataset_type: python_stdlib` has no path. Weights
are exact decimals or fractions; only their ratios count. A weight may change at positions of the
stream: `weight: {0: 0.9, 1Bt: 0.5}` (`maxbatch.data.stream.mixture_order`).

Names are for people (in the one-line form, the path is the name); the stream depends only on
contents, weights and order of the sources.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import yaml

from maxbatch.config.combined import StreamConfig
from maxbatch.config.keys import Fixes
from maxbatch.config.paths import is_mixture_file, is_staged
from maxbatch.config.recipes import slots_per_sample
from maxbatch.config.rules import check_data_paths
from maxbatch.config.sections import KEYS, names_fixing
from maxbatch.config.values import (
    SUFFIXES,
    Bounds,
    Scalar,
    exact,
    nearest_name,
    nearest_or_all,
    refuse_no_text,
    shown,
    shown_path,
)
from maxbatch.config.yaml_file import compose, compose_text, field_names_text, pairs
from maxbatch.data.stream.mixture_order import MixtureStage
from maxbatch.system.errors import ConfigError

# Fields of a source that are also config keys.
_SOURCE_KEYS = names_fixing(Fixes.RECORDS)
_FIELDS = ("path", "weight", *_SOURCE_KEYS)
_NUMBER = Scalar("weight", "exact")
_WEIGHT = Scalar("weight", "exact", Bounds(above=0), default="1")
# 0: the source rests in this stage
_WEIGHT_OR_NONE = Scalar("weight", "exact", Bounds(at_least=0), default="1")
_MOST_WEIGHTS = 1_000_000  # over all sources and positions
_POSITION = Scalar("position", "quantity", Bounds(at_least=0), default="0")


class MixtureSource(NamedTuple):
    """One source of a mixture."""

    name: str
    weight: Fraction  # its share of the samples; all weights add up to 1
    config: StreamConfig  # the config with this source as its dataset
    # its share from later positions on, which all sources have in common
    later: tuple[tuple[int, Fraction], ...] = ()

    @property
    def weights_text(self) -> str:
        """Its share, as text for the identity of a stream."""
        return " ".join([str(self.weight), *(f"{start}:{weight}" for start, weight in self.later)])


def stages_of(mixture: Sequence[MixtureSource]) -> list[MixtureStage]:
    """Returns the weights of a mixture, stage by stage."""
    starts = [0, *(start for start, _ in mixture[0].later)]
    of_source = [(source.weight, *(weight for _, weight in source.later)) for source in mixture]
    return [
        MixtureStage(start, weights)
        for start, weights in zip(starts, zip(*of_source, strict=True), strict=True)
    ]


def read_mixture(config: StreamConfig) -> tuple[MixtureSource, ...] | None:
    """Returns the sources of `dataset_path` in order, or None if it is not a mixture; opens no
    data.

    Raises:
      ConfigError: an unreadable or invalid mixture, or weights in `eval_dataset_path`.
    """
    check_data_paths(config)
    _check_eval_path(config.eval_dataset_path, config.dataset_type)
    if is_staged(config.dataset_path):
        read = _staged_sources
    else:
        read = (
            _file_sources
            if is_mixture_file(config.dataset_path, config.dataset_type)
            else _line_sources
        )
    sources = []
    name_of_path: dict[str, str] = {}
    for where, source in read(config):
        paths = source.config.dataset_path
        for path in {_real(part) for part in paths.split(";")}:
            if path in name_of_path:
                raise ConfigError(
                    f"{where}: {shown(paths) or 'python_stdlib'} is in source "
                    f"{shown(name_of_path[path])} as well; works: once, with the sum of the "
                    "weights"
                )
            name_of_path[path] = source.name
        sources.append(source)
    if sources and config.deduplicate and config.eval_fraction:
        raise ConfigError(
            f"deduplicate=true: eval_fraction={config.eval_fraction} of a mixture may hold out a "
            "record of one source that another source trains on; eval_dataset_path holds out "
            "records that no source trains on; works: eval_fraction=0"
        )
    return _shares(sources) if sources else None


def _shares(sources: Sequence[MixtureSource]) -> tuple[MixtureSource, ...]:
    """Normalises the sources' weights, stage by stage."""
    starts = sorted({start for source in sources for start, _ in source.later})
    _check_weights("dataset_path", len(sources), len(starts) + 1)
    weights_of = {source.name: dict([(0, source.weight), *source.later]) for source in sources}
    for weights in weights_of.values():
        for before, start in zip([0, *starts], starts, strict=False):
            weights.setdefault(start, weights[before])
    totals = {
        start: sum(weights[start] for weights in weights_of.values()) for start in (0, *starts)
    }
    for start, total in totals.items():
        if not total:
            raise ConfigError(
                f"dataset_path: no source has a weight from sample {start} on; works: a weight of 1"
            )
    return tuple(
        source._replace(
            weight=weights_of[source.name][0] / totals[0],
            later=tuple(
                (start, weights_of[source.name][start] / totals[start]) for start in starts
            ),
        )
        for source in sources
    )


def _check_weights(where: str, num_sources: int, num_positions: int) -> None:
    if num_sources * num_positions > _MOST_WEIGHTS:
        raise ConfigError(
            f"{where}: states weights of {num_sources:,} sources at {num_positions:,} positions, "
            f"more than {_MOST_WEIGHTS:,} in all; works: fewer positions"
        )


def _check_eval_path(value: str, dataset_type: str) -> None:
    where = f"eval_dataset_path={shown(repr(value))}"
    paths, weights = zip(*map(_split_weight, value.split(";")), strict=True)
    if any(weights):
        rule = "held-out data have no weights, since all of them are used"
        raise ConfigError(f"{where}: {rule}; works: eval_dataset_path={';'.join(paths)!r}")
    for path in paths:
        _refuse_mixture_file(where, path, dataset_type)


def _refuse_mixture_file(where: str, path: str, dataset_type: str) -> None:
    if is_mixture_file(path, dataset_type):
        raise ConfigError(
            f"{where}: {shown(path)} names a mixture file, and must name data; to read data from "
            f"a file of that name, give a glob: {_as_glob(path)}"
        )


def _as_glob(path: str) -> str:
    """Returns a pattern that only this path matches."""
    return f"{glob.escape(path[:-1])}[{path[-1]}]"


def _real(path: str) -> str:
    return path if not path or "://" in path else os.path.realpath(os.path.expanduser(path))


def _split_weight(part: str) -> tuple[str, str]:
    """Returns the path and the weight of `PATH,WEIGHT`; the weight is "" if the part after the
    comma is no number.
    """
    path, _, weight = part.rpartition(",")
    try:
        _NUMBER.read(weight)
    except ConfigError:
        return part, ""
    return path, weight.strip()


def _line_sources(config: StreamConfig) -> Iterator[tuple[str, MixtureSource]]:
    """Yields the sources of the one-line form, and its name in messages; none if no path has a
    weight.
    """
    parts = [_split_weight(part) for part in config.dataset_path.split(";")]
    if not any(weight for _, weight in parts):
        return
    where = f"dataset_path={shown(repr(config.dataset_path))}"
    for path, weight in parts:
        path = path.strip()
        if not path or not weight:
            works = ";".join(f"{p or 'PATH'},{w or 1}" for p, w in parts)
            problem = f"{shown(path)} has no weight" if path else "a source has no path"
            raise ConfigError(f"{where}: {problem}; works: dataset_path={works!r}")
        _refuse_mixture_file(where, path, config.dataset_type)
        yield where, MixtureSource(path, _weight(where, weight), _source_config(config, path, {}))


def _staged_sources(config: StreamConfig) -> Iterator[tuple[str, MixtureSource]]:
    """Yields the sources of a mapping of positions to mixtures, in the order in which they first
    appear.
    """
    text = config.dataset_path
    where = f"dataset_path={shown(text)}"
    works = (
        "works: dataset_path='{0: {web.jsonl: 0.9, code.jsonl: 0.1}, 1Bt: {web.jsonl: 0.5, "
        "code.jsonl: 0.5}}'"
    )
    try:
        root = compose_text(text, where, Path("dataset_path"))
    except yaml.YAMLError:
        raise ConfigError(f"{where}: is not a mapping of positions to mixtures; {works}") from None
    assert root is not None, "begins with a brace"
    stages: list[tuple[int, dict[str, Fraction]]] = []
    for position, node, _ in pairs(Path("dataset_path"), root):
        start = _position(f"dataset_path: {shown(position)}", position, slots_per_sample(config))
        if not stages and start:
            raise ConfigError(
                f"{where}: the first position must be 0, and is {shown(position)}; {works}"
            )
        if stages and start <= stages[-1][0]:
            raise ConfigError(
                f"{where}: positions must rise, and {shown(position)} does not; {works}"
            )
        stages.append((start, _stage_weights(f"dataset_path: {shown(position)}", node)))
    if not stages:
        raise ConfigError(f"{where}: has no position; {works}")
    (_, first), *others = stages
    paths = dict.fromkeys(path for _, weights in stages for path in weights)
    _check_weights(where, len(paths), len(stages))
    for path in paths:
        _refuse_mixture_file(where, path, config.dataset_type)
        later = tuple((start, weights.get(path, Fraction(0))) for start, weights in others)
        yield (
            where,
            MixtureSource(
                path, first.get(path, Fraction(0)), _source_config(config, path, {}), later
            ),
        )


def _stage_weights(where: str, node: yaml.Node) -> dict[str, Fraction]:
    """Returns the weight of each path from a position on; a single path has the whole weight."""
    if isinstance(node, yaml.ScalarNode) and node.value:
        return {node.value: Fraction(1)}
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise ConfigError(
            f"{where}: must map paths to weights, as in {{web.jsonl: 0.9, code.jsonl: 0.1}}"
        )
    weights = {}
    for path, weight, _ in pairs(Path("dataset_path"), node):
        if not isinstance(weight, yaml.ScalarNode):
            raise ConfigError(f"{where}: {shown(path)} takes one weight, not a list or a mapping")
        weights[path.strip()] = _weight(f"{where}: {shown(path)}", weight.value, _WEIGHT_OR_NONE)
    return weights


def _position(where: str, text: str, length: int) -> int:
    """Returns the first sample at or after a position, which counts samples, or tokens with the
    suffix t.
    """
    in_tokens = text.endswith("t")
    try:
        number = _POSITION.read(text.removesuffix("t"))
    except ConfigError:
        rule = (
            f"a position must be a number of samples, or of tokens with the suffix t ({SUFFIXES})"
        )
        raise ConfigError(f"{where}: {rule}; works: 1Bt") from None
    assert isinstance(number, int), "a quantity is whole"
    return -(-number // length) if in_tokens else number


def _file_sources(config: StreamConfig) -> Iterator[tuple[str, MixtureSource]]:
    """Yields the sources of a mixture file, and the place of each in it."""
    path = config.dataset_path
    file = Path(os.path.expanduser(path))
    works = f"if it holds data: dataset_path={_as_glob(path)!r}"
    if path.lower().endswith(".json"):
        works += "; if it holds an array of records: dataset_type=json"
    try:
        # The nodes keep the text of scalars, so that 0.7 is exactly seven tenths.
        root = compose(file, "mixture file")
    except ConfigError as error:
        where = f"dataset_path={shown(repr(path))}"
        raise ConfigError(
            f"{where}: {error} (seen from {shown_path(os.getcwd())}); {works}"
        ) from None
    if not isinstance(root, yaml.MappingNode) or not root.value:
        rule = "must map names to sources, as in `web: {path: web.jsonl, weight: 0.7}`"
        raise ConfigError(f"{shown_path(file)}: {rule}; {works}")
    for name, node, where in pairs(file, root):
        if not name or not name.isprintable():
            raise ConfigError(f"{where}: the name of a source must be one line of text")
        where = f"{where}: source {shown(name)}"
        fields = _fields(file, where, node)
        _check_fields(where, fields, config.dataset_type)
        settings = {key: str(KEYS[key].read(fields[key])) for key in _SOURCE_KEYS if key in fields}
        paths = _below(file.parent, fields.get("path", ""))
        weight, *later = _weights_of(where, node, fields["weight"], slots_per_sample(config))
        source = _source_config(config, paths, settings)
        yield where, MixtureSource(name, weight[1], source, tuple(later))


def _weights_of(where: str, node: yaml.Node, text: str, length: int) -> list[tuple[int, Fraction]]:
    """Returns the positions and weights of a source in a mixture file: one, or a mapping."""
    assert isinstance(node, yaml.MappingNode), "has fields"
    value = next(value for name, value in node.value if name.value == "weight")
    if not isinstance(value, yaml.MappingNode):
        return [(0, _weight(where, text))]
    weights: list[tuple[int, Fraction]] = []
    for position, weight, _ in pairs(Path("weight"), value):
        start = _position(where, position, length)
        if (start <= weights[-1][0]) if weights else start:
            raise ConfigError(
                f"{where}: positions of weight must begin at 0 and rise; works: weight: {{0: 0.9, "
                "1Bt: 0.5}"
            )
        number = weight.value if isinstance(weight, yaml.ScalarNode) else ""
        weights.append((start, _weight(where, number, _WEIGHT_OR_NONE)))
    return weights


def _fields(file: Path, where: str, node: yaml.Node) -> dict[str, str]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}: must have fields, as in {{path: web.jsonl, weight: 0.7}}")
    fields: dict[str, str] = {}
    for name, value, _ in pairs(file, node):
        if name not in _FIELDS:
            raise ConfigError(
                f"{where}: unknown field {shown(name)}; {nearest_or_all(name, _FIELDS)}"
            )
        if name == "weight" and isinstance(value, yaml.MappingNode) and value.value:
            fields[name] = "by position"
            continue
        if name == "record_fields" and isinstance(value, yaml.MappingNode):
            fields[name] = field_names_text(value, name, where)
            continue
        if not isinstance(value, yaml.ScalarNode):
            raise ConfigError(f"{where}: field {name} takes one value, not a list or a mapping")
        fields[name] = value.value
    return fields


def _check_fields(where: str, fields: Mapping[str, str], default_type: str) -> None:
    path = fields.get("path", "")
    refuse_no_text(path, f"{where}: path={shown(path)}")
    for name in [name for name in _SOURCE_KEYS if name in fields]:
        choices = [choice for choice in KEYS[name].choices if choice != "synthetic"]
        if choices and fields[name] not in choices:
            works = nearest_name(fields[name], choices) or choices[-1]
            rule = f"must be one of {', '.join(choices)}; works: {name}: {works}"
            raise ConfigError(f"{where}: {name}={shown(fields[name])}: {rule}")
        if not fields[name]:
            raise ConfigError(f"{where}: {name} is empty; works: leave {name} out")
    has_no_path = fields.get("dataset_type") == "python_stdlib"
    if not path and not has_no_path:
        raise ConfigError(f"{where}: has no path; works: path: web.jsonl")
    if not fields.get("weight"):
        raise ConfigError(f"{where}: has no weight; works: weight: 0.5")
    if "path" in fields and has_no_path:
        raise ConfigError(f"{where}: dataset_type=python_stdlib reads no path; leave out path")
    _refuse_mixture_file(where, path, fields.get("dataset_type", default_type))


def _below(folder: Path, paths: str) -> str:
    """Returns paths that are relative to a folder as seen from here; `;` separates them."""
    return ";".join(
        part if "://" in part or os.path.isabs(os.path.expanduser(part)) else str(folder / part)
        for part in map(str.strip, paths.split(";"))
        if part
    )


def _weight(where: str, text: str, rule: Scalar = _WEIGHT) -> Fraction:
    try:
        return exact(rule.read(text))  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _source_config(config: StreamConfig, paths: str, settings: Mapping[str, str]) -> StreamConfig:
    source = config.replaced({**settings, "dataset_path": paths})
    # Held-out paths have the config's own type: none of their files is in a source of another type.
    return (
        source
        if source.dataset_type == config.dataset_type
        else source.replaced({"eval_dataset_path": ""})
    )
