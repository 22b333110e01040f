"""YAML files, environment and overrides to one typed, locked config.

Layers, later ones win: base.yml < the `base_config:` chain of CONFIG < the preset that `model_name` names <
CONFIG < environment variables MAXBATCH_KEY < `key=value` overrides. Of keys that are alternatives to each
other (how long, how the batch is stated) the highest layer that states one displaces those below.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from ml_collections import ConfigDict

from maxbatch.config.keys import ROWS, Key
from maxbatch.config.rules import PRETRAINING_BATCH, check_rules, displaced, refuse_pairs_without_prompts
from maxbatch.config.values import NULLS, TEXTS, Value, nearest_name, shown, shown_path
from maxbatch.config.yaml_file import Entry, entries
from maxbatch.system.errors import ConfigError

_ENVIRONMENT = "MAXBATCH_"


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
      layer: base.yml, base_config, preset, config file, environment or override.
      where: file and line, or the environment variable; "" for an override.
      displaced_by: the alternative in that layer which takes the value's place, "" if nothing does.
    """

    layer: str
    where: str = ""
    displaced_by: str = ""


class Resolved(NamedTuple):
    """A config, and where the value of each key comes from."""

    config: ConfigDict
    origins: Mapping[str, Origin]


@dataclasses.dataclass(frozen=True)
class _Layer:
    values: Mapping[str, Value]
    origins: Mapping[str, Origin]


def configs_dir() -> Path:
    """Returns the folder of base.yml and models/: inside an installed package, at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "configs"
    return checkout if (checkout / "base.yml").is_file() else package / "configs"


def load_config(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> ConfigDict:
    """Reads the config of a run.

    Args:
      path: a YAML file of keys; None: the packaged base.yml alone.
      overrides: "key=value" texts, the highest layer.

    Returns:
      A locked ConfigDict with every key of base.yml. Of the keys that are alternatives, those that were not
      stated or were displaced are None (the ramp: `enable_rampup_batch_size` is False).

    Raises:
      ConfigError: a file that cannot be read, an unknown key, a value of the wrong type or outside its rule,
        alternatives stated together.
    """
    return resolve(path, overrides).config


def resolve(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Resolved:
    """Reads the config of a run as `load_config` does, and says which layer each value comes from."""
    files = _chain(Path(path)) if path is not None else []
    above = [*files[-1:], _environment_layer(), _override_layer(overrides)]
    below = [_base_layer(), *files[:-1]]
    named_models = [layer.values["model_name"] for layer in [*below, *above] if "model_name" in layer.values]
    values: dict[str, Value] = {}
    origins: dict[str, Origin] = {}
    for layer in [*below, *_preset_layers(str(named_models[-1])), *above]:
        _apply(values, origins, layer)
    check_rules(values, keys())
    if not any("batch_size" in layer.values for layer in [*below[1:], *above]):
        refuse_pairs_without_prompts(values, _base_layer().values)
    return Resolved(ConfigDict({name: values[name] for name in keys()}).lock(), origins)


def dump_config(config: ConfigDict) -> str:
    """Returns the config as YAML that `load_config` reads back as an equal config."""
    lines = []
    left_out = () if config.batch_size is None else PRETRAINING_BATCH
    for name, key in keys().items():
        if name in left_out:
            continue
        text = key.write(config[name])
        is_text = key.kind in TEXTS and config[name] is not None
        lines.append(f"{name}: {_quoted(text) if is_text else text}\n")
    return "".join(lines)


@functools.cache
def keys() -> Mapping[str, Key]:
    """Returns every config key by name, with its default, in the order of base.yml."""
    defaults = {entry.name: entry.text for entry in entries(_base_path())}
    return {key.name: dataclasses.replace(key, default=defaults[key.name]) for key in ROWS}


def _base_path() -> Path:
    return configs_dir() / "base.yml"


@functools.cache
def _base_layer() -> _Layer:
    return _layer("base.yml", entries(_base_path()))


def _chain(path: Path) -> list[_Layer]:
    """Returns the layers of the file and of the files that it builds on, the lowest first."""
    layers: list[_Layer] = []
    seen: list[Path] = []
    while (real := _real(path)) != _base_path():
        if real in seen:
            loop = " -> ".join(p.name for p in [*seen, path])
            raise ConfigError(
                f"base_config={shown_path(path)}: must not lead back to a file of its own chain ({shown(loop)})"
            )
        seen.append(real)
        stated = list(entries(path))
        base = next((entry for entry in stated if entry.name == "base_config"), None)
        kind = "base_config" if layers else "config file"
        layers.insert(0, _layer(kind, (entry for entry in stated if entry is not base)))
        if base is None or (base.plain and base.text.lower() in NULLS) or not base.text:
            break
        below = path.parent / base.text
        # MaxText's files say `base_config: base.yml`; without such a file beside them, ours is meant.
        path = _base_path() if base.text == "base.yml" and not below.exists() else below
    return layers


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise ConfigError(f"config file {shown_path(path)}: is no path ({error})") from None


def _preset_layers(model_name: str) -> list[_Layer]:
    if model_name == "default":
        return []
    presets = {p.stem: p for p in sorted((configs_dir() / "models").glob("*.yml"))}
    if model_name not in presets:
        nearest = nearest_name(model_name, presets) or "default"
        raise ConfigError(
            f"model_name={shown(model_name)}: must be default or one of {', '.join(presets)}; "
            f"works: model_name={nearest}"
        )
    return [_layer("preset", entries(presets[model_name]))]


def _environment_layer() -> _Layer:
    stated = []
    for variable, text in sorted(os.environ.items()):
        if variable.startswith(_ENVIRONMENT):
            name = variable.removeprefix(_ENVIRONMENT)
            if name != name.upper() or name.lower() not in keys():
                nearest = f"{_ENVIRONMENT}{nearest_key(name.lower()).upper()}"
                raise ConfigError(
                    f"environment variable {shown(variable)}: names no config key; nearest: {nearest}"
                )
            stated.append(Entry(name.lower(), text, True, f"environment variable {variable}"))
    return _layer("environment", stated)


def _override_layer(overrides: Sequence[str]) -> _Layer:
    if isinstance(overrides, str):
        text = shown(overrides)
        raise ConfigError(f'overrides="{text}": must be a list of texts; works: overrides=["{text}"]')
    stated = []
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{shown(override)}: an override is key=value; works: steps=100")
        stated.append(Entry(name.strip(), text, True, ""))
    return _layer("override", stated)


def _layer(kind: str, stated: Iterable[Entry]) -> _Layer:
    values: dict[str, Value] = {}
    origins: dict[str, Origin] = {}
    for entry in stated:
        values[entry.name], origins[entry.name] = _read(entry), Origin(kind, entry.where)
    return _Layer(values, origins)


def _read(entry: Entry) -> Value:
    where = f"{entry.where}: " if entry.where else ""
    if entry.name not in keys():
        if entry.name == "base_config":
            raise ConfigError(f"{where}base_config={shown(entry.text)}: is a key of config files only")
        nearest = nearest_key(entry.name)
        raise ConfigError(f"{where}unknown key {shown(entry.name)}; nearest: {nearest}")
    try:
        return keys()[entry.name].read(entry.text, entry.plain)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def nearest_key(name: str) -> str:
    """Returns the key that is most like a name, however little it is."""
    return nearest_name(name, keys(), least_like=0) or next(iter(keys()))


def _apply(values: dict[str, Value], origins: dict[str, Origin], layer: _Layer) -> None:
    """Puts a layer over the values below it: its alternatives displace theirs."""
    values.update(layer.values)
    origins.update(layer.origins)
    stated = {name for name, value in layer.values.items() if value is not None}
    for name, by, to_default in list(displaced(values, stated)):
        nothing = False if name == "enable_rampup_batch_size" else None
        value = _base_layer().values[name] if to_default else nothing
        if to_default or values[name] != value:
            values[name], origins[name] = value, origins[by]._replace(displaced_by=by)


def _quoted(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', width=float("inf"), allow_unicode=True).strip()
