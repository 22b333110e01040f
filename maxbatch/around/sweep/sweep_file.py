"""A sweep file: its settings, and the config keys that it sweeps."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from maxbatch.around.sweep.folder import SWEEP_METRICS
from maxbatch.around.sweep.space import Choices, Parameter, Range
from maxbatch.config.keys import Key
from maxbatch.config.loading import load_config
from maxbatch.config.own_parts import refuse_own_parts
from maxbatch.config.paths import configs_dir
from maxbatch.config.sections import KEYS
from maxbatch.config.unknown import hint
from maxbatch.config.values import Bounds, Scalar, Value, nearest_or_all, shown, value_text
from maxbatch.config.yaml_file import compose, pairs
from maxbatch.plan.batch import check_batch_keys
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath, as_typed

_SETTINGS = (
    Scalar("sampler", "choice", choices=("grid", "random", "optuna"), default="grid"),
    Scalar("metric", "choice", choices=tuple(SWEEP_METRICS), default=Metric.EVAL_LOSS),
    Scalar("pruner", "choice", choices=("none", "median"), default="none"),
    Scalar("sweep_dir", "path"),
    Scalar("parallel", "int", Bounds(1, 1024), default="1"),
    Scalar("trials", "int", Bounds(1, 100_000), default="20"),
    Scalar("seed", "int", Bounds(0, 2**32 - 1), default="0"),
)
_KEYS = (*(setting.name for setting in _SETTINGS), "base", "parameters")
_SHARED = "storage"  # of sweep files of maxbatch 0.4
_RANGE_KEYS = ("low", "high", "log", "step")
Overrides = dict[str, str]
_Nodes = Mapping[str, tuple[yaml.Node, str]]  # key to its value, and to file and line


@dataclasses.dataclass(frozen=True)
class SweepFile:
    """The settings of a sweep file."""

    path: Path
    sampler: str
    metric: str  # lower is better
    pruner: str  # "median" ends trials whose evals are above the others' median
    base: str  # YAML text of the config keys that all trials share
    sweep_dir: AnyPath
    parallel: int  # trials at a time, of this command
    trials: int | None  # in total; None for a grid
    seed: int  # of the random sampler and of TPE
    parameters: tuple[Parameter, ...]  # the swept keys

    @classmethod
    def read(cls, name: str) -> SweepFile:
        """Reads a sweep file, or one of configs/sweeps by its name; raises ConfigError for an
        invalid one.
        """
        path = _find(name)
        root = compose(path, "sweep file")
        if root is None:
            raise ConfigError(f"sweep file {path}: is empty; it takes {', '.join(_KEYS)}")
        nodes = {key: (node, where) for key, node, where in pairs(path, root)}
        for key, (_, where) in nodes.items():
            if key == _SHARED:
                raise ConfigError(
                    f"{where}: {_SHARED}: is a database that several machines shared with maxbatch "
                    "0.4, which this version does not read; maxbatch==0.5.0 still reads it; "
                    f"without {_SHARED}, the trials in sweep_dir and new ones are the sweep"
                )
            if key not in _KEYS:
                rule = "is a config key, which belongs under base or parameters"
                rule = rule if key in KEYS else f"unknown key; {nearest_or_all(key, _KEYS)}"
                raise ConfigError(f"{where}: {shown(key)}: {rule}")
        values: dict[str, Any] = {
            setting.name: _read(setting, nodes.get(setting.name)) for setting in _SETTINGS
        }
        if (
            "pruner" not in nodes
            and values["sampler"] == "optuna"
            and values["metric"] == Metric.EVAL_LOSS
        ):
            values["pruner"] = "median"
        _check_sampler(path, nodes, values)
        return cls(
            **values
            | {
                "path": path,
                "base": _base(path, nodes.get("base")),
                "sweep_dir": as_typed(values["sweep_dir"] or f"runs/{path.stem}"),
                "trials": None if values["sampler"] == "grid" else values["trials"],
                "parameters": _parameters(path, nodes.get("parameters")),
            }
        )

    def resolved(self, overrides: Overrides) -> dict[str, str]:
        """Returns the config of a combination, every key but run_dir as text, for comparing
        trials.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "base.yml"
            path.write_text(self.base, encoding="utf-8")
            try:
                config = load_config(path, [f"{key}={text}" for key, text in overrides.items()])
                refuse_own_parts(config.own_parts)
                check_batch_keys(config.plan)
            except ConfigError as error:
                place = rf"(config file )?{re.escape(str(path))}(:\d+)?"
                raise ConfigError(re.sub(place, f"{self.path}, base", str(error))) from None
        if self.metric == Metric.EVAL_LOSS and config.eval_interval == -1:
            raise ConfigError(
                f"{self.path}: metric=eval_loss needs evals, but eval_interval=-1; works: metric: "
                "loss"
            )
        return {name: value_text(value) for name, value in config.items() if name != "run_dir"}


def _find(name: str) -> Path:
    path, folder = Path(name), configs_dir() / "sweeps"
    if path.exists():
        return path
    ready = {file.stem: file for file in sorted(folder.glob("*.yml"))}
    known = ready.get(name.removeprefix("configs/sweeps/").removesuffix(".yml"))
    if known is None:
        raise ConfigError(
            f"sweep file {shown(name)}: does not exist; a ready one: {', '.join(ready)}"
        )
    return known


def _read(setting: Scalar, entry: tuple[yaml.Node, str] | None) -> Value:
    if entry is None:
        return setting.read(setting.default)
    node, where = entry
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where}: {setting.name} takes one value, not a list or a mapping")
    is_null = node.style is None and node.value.lower() in ("", "~", "null")
    try:
        return setting.read(setting.default if is_null else node.value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_sampler(path: Path, nodes: _Nodes, values: Mapping[str, object]) -> None:
    sampler = values["sampler"]
    if sampler == "grid" and "trials" in nodes:
        raise ConfigError(
            f"{nodes['trials'][1]}: trials={values['trials']}: must not be given for a grid, "
            "which has one trial per combination; works: sampler: random"
        )
    if sampler != "grid" and "trials" not in nodes:
        raise ConfigError(
            f"{path}: trials must be a number, since sampler is {sampler}; works: trials: 20"
        )
    if values["pruner"] == "median" and values["metric"] != Metric.EVAL_LOSS:
        raise ConfigError(
            f"{nodes['pruner'][1]}: pruner=median: compares evals, which "
            f"metric={values['metric']} does not count; works: pruner: none"
        )


def _base(path: Path, entry: tuple[yaml.Node, str] | None) -> str:
    """Returns the keys under `base` as the text of a config file."""
    if entry is None or (isinstance(entry[0], yaml.ScalarNode) and not entry[0].value):
        return ""
    for name, value, where in pairs(path, entry[0]):
        if name == "run_dir":
            raise ConfigError(
                f"{where}: run_dir: each trial has its own; works: sweep_dir, without run_dir"
            )
        if name == "base_config" and isinstance(value, yaml.ScalarNode) and value.value:
            beside = path.parent / value.value
            if os.path.exists(beside):  # no error for an impossible file name
                value.value = str(beside.absolute())  # the text is read in sweep_dir
    return yaml.serialize(entry[0], allow_unicode=True)


def _parameters(path: Path, entry: tuple[yaml.Node, str] | None) -> tuple[Parameter, ...]:
    example = "works: parameters: {learning_rate: [1e-3, 3e-3]}"
    if entry is None:
        raise ConfigError(f"{path}: parameters must name the swept config keys; {example}")
    parameters = []
    for name, node, where in pairs(path, entry[0]):
        if name not in KEYS:
            raise ConfigError(f"{where}: unknown config key {shown(name)}{hint(name)}")
        if name == "run_dir":
            raise ConfigError(f"{where}: run_dir cannot be swept: each trial has its own")
        try:
            parameters.append(_parameter(path, KEYS[name], node))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if not parameters:
        raise ConfigError(f"{entry[1]}: parameters must hold at least one config key; {example}")
    return tuple(parameters)


def _parameter(path: Path, key: Key, node: yaml.Node) -> Parameter:
    if isinstance(node, yaml.MappingNode):
        return _range(path, key, node)
    if isinstance(node, yaml.ScalarNode):
        value = shown(node.value)
        raise ConfigError(
            f"{key.name}={value}: must be a list of values or {{low, high, log}}; works: [{value}]"
        )
    if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
        raise ConfigError(f"{key.name}: must be a list of single values; works: [{key.default}]")
    return Choices.read(key, [(item.value, item.style is None) for item in node.value])


def _range(path: Path, key: Key, node: yaml.Node) -> Range:
    texts = {"log": "false"}
    for part, value, _ in pairs(path, node):
        if part not in _RANGE_KEYS:
            works = nearest_or_all(part, _RANGE_KEYS)
            raise ConfigError(f"{key.name}: unknown key {shown(part)} of a range; {works}")
        texts[part] = value.value if isinstance(value, yaml.ScalarNode) else ""
    low, high, log = texts.get("low"), texts.get("high"), texts["log"].lower()
    if not low or not high:
        rule = "a range must state low and high, one number each"
        raise ConfigError(f"{key.name}: {rule}; works: {{low: 1, high: 2}}")
    if log not in ("true", "false"):
        raise ConfigError(f"{key.name}: log={shown(log)} must be true or false; works: log: true")
    return Range.read(key, low, high, log == "true", texts.get("step"))
