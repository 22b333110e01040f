"""A sweep file, read and checked: its keys, and the config keys that it sweeps."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from maxbatch.commands.sweep.space import Choices, Parameter, Range
from maxbatch.config.loading import configs_dir, keys
from maxbatch.config.paths import local_fault
from maxbatch.config.values import nearest_name, shown
from maxbatch.config.yaml_file import file_text
from maxbatch.runs.sweep_folder import METRICS
from maxbatch.system.errors import ConfigError

SAMPLERS = ("grid", "random", "optuna")
_KEYS = ("sampler", "metric", "base", "sweep_dir", "parallel", "trials", "seed", "storage", "parameters")
_RANGE_KEYS = ("low", "high", "log", "step")
_MOST_TRIALS = 100_000


@dataclasses.dataclass(frozen=True)
class SweepFile:
    """What a sweep file says.

    Attributes:
      path: the file.
      sampler: `grid`, `random` or `optuna`.
      metric: `eval_loss` or `loss`; lower is better.
      base: YAML text of the config keys that all trials share.
      sweep_dir: folder of the sweep.
      parallel: trials at a time, of this command.
      trials: trials in all; None for a grid.
      seed: of the random and the Optuna sampler.
      storage: Optuna storage URL; None: an SQLite file in sweep_dir.
      parameters: the swept keys.
    """

    path: Path
    sampler: str
    metric: str
    base: str
    sweep_dir: Path
    parallel: int
    trials: int | None
    seed: int
    storage: str | None
    parameters: tuple[Parameter, ...]

    @classmethod
    def read(cls, name: str) -> SweepFile:
        """Read a sweep file, or a ready one of configs/sweeps by its name.

        Raises:
          ConfigError: it cannot be read, a key is unknown or missing, a value breaks its rule.
        """
        path = _find(name)
        nodes = _entries(path, _compose(path))
        for key, (_, where) in nodes.items():
            if key not in _KEYS:
                nearest = nearest_name(key, _KEYS, least_like=0)
                rule = (
                    "is a config key, which belongs under base or parameters"
                    if key in keys()
                    else "unknown key"
                )
                raise ConfigError(f"{where}: {shown(key)}: {rule}; nearest: {nearest}")
        values = _Values(path, nodes)
        sampler = values.choice("sampler", SAMPLERS, "grid")
        if sampler == "grid" and "trials" in nodes:
            raise values.fault("trials", "must not be given for a grid, which has one trial per combination",
                               "sampler: random")  # fmt: skip
        if sampler != "grid" and "trials" not in nodes:
            raise ConfigError(
                f"{path}: trials must say how many, since sampler is {sampler}; works: trials: 20"
            )
        if sampler != "optuna" and "storage" in nodes:
            raise values.fault("storage", f"must not be given where sampler is {sampler}", "sampler: optuna")
        return cls(
            path=path,
            sampler=sampler,
            metric=values.choice("metric", tuple(METRICS), "eval_loss"),
            base=_base(path, nodes.get("base")),
            sweep_dir=values.folder("sweep_dir") or Path(f"runs/{path.stem}"),
            parallel=values.whole("parallel", 1, 1, 1024),
            trials=None if sampler == "grid" else values.whole("trials", 20, 1, _MOST_TRIALS),
            seed=values.whole("seed", 0, 0, 2**32 - 1),
            storage=values.text("storage") or None,
            parameters=_parameters(path, nodes.get("parameters")),
        )


_Nodes = Mapping[str, tuple[yaml.Node, str]]  # key: its value, and where it stands


@dataclasses.dataclass(frozen=True)
class _Values:
    path: Path
    nodes: _Nodes

    def text(self, name: str) -> str:
        """The text of a scalar, "" where it is not given or null."""
        if name not in self.nodes:
            return ""
        node, where = self.nodes[name]
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{where}: {name} takes one value, not a list or a mapping")
        is_null = node.style is None and node.value.lower() in ("", "~", "null")
        return "" if is_null else node.value

    def folder(self, name: str) -> Path | None:
        text = self.text(name)
        if rule := local_fault(text):
            raise self.fault(name, f"must be {rule}", f"{name}: runs/{self.path.stem}")
        return Path(text) if text else None

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        text = self.text(name) or default
        if text not in choices:
            raise self.fault(name, f"must be one of {', '.join(choices)}",
                             f"{name}: {nearest_name(text, choices) or default}")  # fmt: skip
        return text

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        text = self.text(name) or str(default)
        if not re.fullmatch(r"\d{1,18}", text) or not least <= int(text) <= most:
            near = (
                min(max(int(text), least), most) if re.fullmatch(r"\d{1,18}", text) else max(default, least)
            )
            raise self.fault(name, f"must be a whole number from {least} to {most}", f"{name}: {near}")
        return int(text)

    def fault(self, name: str, rule: str, works: str) -> ConfigError:
        where = self.nodes[name][1]
        return ConfigError(f"{where}: {name}={shown(self.text(name))}: {rule}; works: {works}")


def _find(name: str) -> Path:
    path = Path(name)
    ready = configs_dir() / "sweeps"
    if not path.exists() and (ready / f"{name}.yml").is_file() and os.sep not in name:
        return ready / f"{name}.yml"
    return path


def _compose(path: Path) -> yaml.Node:
    try:
        node = yaml.compose(file_text(path), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        ready = ", ".join(sorted(file.stem for file in (configs_dir() / "sweeps").glob("*.yml")))
        raise ConfigError(f"sweep file {path}: does not exist; a ready one: {ready}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"sweep file {path}: cannot be read ({error})") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: is no valid YAML ({getattr(error, 'problem', None) or error})") from None
    if node is None:
        raise ConfigError(f"sweep file {path}: is empty; it takes {', '.join(_KEYS)}")
    return node


def _entries(path: Path, node: yaml.Node) -> _Nodes:
    """Return a mapping's values by key, each with the line that it stands in."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: must be lines of `key: value`")
    entries: dict[str, tuple[yaml.Node, str]] = {}
    for key, value in node.value:
        line = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{line}: must be lines of `key: value`")
        if key.value in entries:
            raise ConfigError(f"{line}: {shown(key.value)} is stated twice")
        entries[key.value] = value, line
    return entries


def _base(path: Path, entry: tuple[yaml.Node, str] | None) -> str:
    """Return the keys under `base` as a config file of their own."""
    if entry is None or (isinstance(entry[0], yaml.ScalarNode) and not entry[0].value):
        return ""
    node = entry[0]
    below = _entries(path, node)
    if "run_dir" in below:
        raise ConfigError(
            f"{below['run_dir'][1]}: run_dir: each trial has its own; works: sweep_dir, without run_dir"
        )
    for name, (value, _) in below.items():
        beside = path.parent / value.value if isinstance(value, yaml.ScalarNode) and value.value else None
        if name == "base_config" and beside is not None and beside.exists():
            value.value = str(beside.absolute())  # it is read from sweep_dir
    return yaml.serialize(node, allow_unicode=True)


def _parameters(path: Path, entry: tuple[yaml.Node, str] | None) -> tuple[Parameter, ...]:
    example = "works: parameters: {learning_rate: [1e-3, 3e-3]}"
    if entry is None:
        raise ConfigError(f"{path}: parameters must say which config keys are swept; {example}")
    parameters = []
    for name, (node, where) in _entries(path, entry[0]).items():
        if name not in keys():
            nearest = nearest_name(name, keys(), least_like=0)
            raise ConfigError(f"{where}: unknown config key {shown(name)}; nearest: {nearest}")
        if name == "run_dir":
            raise ConfigError(f"{where}: run_dir cannot be swept: each trial has its own")
        try:
            parameters.append(_parameter(path, name, node))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if not parameters:
        raise ConfigError(f"{entry[1]}: parameters must hold at least one config key; {example}")
    return tuple(parameters)


def _parameter(path: Path, name: str, node: yaml.Node) -> Parameter:
    key = keys()[name]
    if isinstance(node, yaml.SequenceNode):
        items = [item for item in node.value if isinstance(item, yaml.ScalarNode)]
        if len(items) < len(node.value):
            raise ConfigError(f"{name}: must be a list of single values; works: [{key.default}]")
        return Choices.read(key, [(item.value, item.style is None) for item in items])
    if not isinstance(node, yaml.MappingNode):
        value = node.value if isinstance(node, yaml.ScalarNode) else ""
        raise ConfigError(
            f"{name}={shown(value)}: must be a list of values or {{low, high, log}}; works: [{value}]"
        )
    entries = _entries(path, node)
    for part in entries:
        if part not in _RANGE_KEYS:
            nearest = nearest_name(part, _RANGE_KEYS, least_like=0)
            raise ConfigError(f"{name}: unknown key {shown(part)} of a range; nearest: {nearest}")
    texts = {part: value.value for part, (value, _) in entries.items() if isinstance(value, yaml.ScalarNode)}
    if len(texts) < len(entries) or not {"low", "high"} <= set(texts):
        raise ConfigError(
            f"{name}: a range must state low and high, one number each; works: {{low: 1, high: 2}}"
        )
    log = texts.get("log", "false").lower()
    if log not in ("true", "false"):
        raise ConfigError(f"{name}: log={shown(log)} must be true or false; works: log: true")
    return Range.read(key, texts["low"], texts["high"], log == "true", texts.get("step"))
