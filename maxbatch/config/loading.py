"""YAML files, environment and overrides to one typed, locked config.

Layers, later ones win: base.yml < the `base_config:` chain of CONFIG < the preset that `model_name` names <
CONFIG < environment variables MAXBATCH_KEY < `key=value` overrides. Of keys that are alternatives to each
other (how long, how the batch is stated) the highest layer that states one displaces those below.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from ml_collections import ConfigDict

from maxbatch.config.keys import LISTS, NULLS, Key, Value, nearest_name, shown
from maxbatch.system.errors import ConfigError

LENGTH_KEYS = ("steps", "train_samples", "train_tokens", "num_epochs")
RAMP_KEYS = (
    "enable_rampup_batch_size",
    "per_device_batch_size_start",
    "per_device_batch_size_increment",
    "global_rampup_samples",
)
# What says more of a batch of prompts, and nothing of any other.
RL_BATCH_KEYS = (
    "num_generations",
    "micro_batch_size",
    "train_micro_batch_size",
    "rollout_micro_batch_size",
    "num_iterations",
)
# What batch_size stands in place of: in reinforcement learning the batch is stated in prompts.
PRETRAINING_BATCH_KEYS = (
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "batch_size_schedule",
    *RAMP_KEYS,
)
_ENVIRONMENT = "MAXBATCH_"

_Layer = Mapping[str, Value]


def configs_dir() -> Path:
    """Return the folder of base.yml and models/: inside an installed package, at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "configs"
    return checkout if (checkout / "base.yml").is_file() else package / "configs"


def load_config(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> ConfigDict:
    """Read the config of a run.

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
    files = _chain(Path(path)) if path is not None else []
    above = [*files[-1:], _environment_layer(), _override_layer(overrides)]
    below = [_base_layer(), *files[:-1]]
    named_models = [layer["model_name"] for layer in [*below, *above] if "model_name" in layer]
    values: dict[str, Value] = {}
    for layer in [*below, *_preset_layers(str(named_models[-1])), *above]:
        _apply(values, layer)
    _check_rules(values)
    _refuse_pairs_without_prompts(values, [*below[1:], *above])
    return ConfigDict({name: values[name] for name in keys()}).lock()


def dump_config(config: ConfigDict) -> str:
    """Return the config as YAML that `load_config` reads back as an equal config."""
    lines = []
    left_out = () if config.batch_size is None else PRETRAINING_BATCH_KEYS
    for name, key in keys().items():
        if name in left_out:
            continue
        text = key.write(config[name])
        is_text = key.kind == "text" and config[name] is not None
        lines.append(f"{name}: {_quoted(text) if is_text else text}\n")
    return "".join(lines)


@functools.cache
def keys() -> Mapping[str, Key]:
    """Return every config key by name, in the order of base.yml."""
    defaults = _entries(_base_path())
    return {entry.name: Key.from_default(entry.name, entry.text, entry.plain) for entry in defaults}


@dataclasses.dataclass(frozen=True)
class _Entry:
    name: str
    text: str
    plain: bool
    where: str


def _base_path() -> Path:
    return configs_dir() / "base.yml"


@functools.cache
def _base_layer() -> _Layer:
    return _layer(_entries(_base_path()))


def _chain(path: Path) -> list[_Layer]:
    """Return the layers of the file and of the files that it builds on, the lowest first."""
    layers: list[_Layer] = []
    seen: list[Path] = []
    while (real := _real(path)) != _base_path():
        if real in seen:
            loop = " -> ".join(p.name for p in [*seen, path])
            raise ConfigError(f"base_config={path}: must not lead back to a file of its own chain ({loop})")
        seen.append(real)
        entries = list(_entries(path))
        base = next((entry for entry in entries if entry.name == "base_config"), None)
        layers.insert(0, _layer(entry for entry in entries if entry is not base))
        if base is None or (base.plain and base.text.lower() in NULLS) or not base.text:
            break
        below = path.parent / base.text
        # MaxText's files say `base_config: base.yml`; where there is none beside them, ours is meant.
        path = _base_path() if base.text == "base.yml" and not below.exists() else below
    return layers


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise ConfigError(f"config file {shown(str(path), 400)}: is no path ({error})") from None


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
    return [_layer(_entries(presets[model_name]))]


def _layer(entries: Iterable[_Entry]) -> _Layer:
    return {entry.name: _read(entry) for entry in entries}


def _environment_layer() -> _Layer:
    values = {}
    for variable, text in sorted(os.environ.items()):
        if variable.startswith(_ENVIRONMENT):
            name = variable.removeprefix(_ENVIRONMENT)
            if name != name.upper() or name.lower() not in keys():
                nearest = f"{_ENVIRONMENT}{_nearest_key(name.lower()).upper()}"
                raise ConfigError(f"environment variable {variable}: names no config key; nearest: {nearest}")
            values[name.lower()] = _read(_Entry(name.lower(), text, True, f"environment variable {variable}"))
    return values


def _override_layer(overrides: Sequence[str]) -> _Layer:
    if isinstance(overrides, str):
        text = shown(overrides)
        raise ConfigError(f'overrides="{text}": must be a list of texts; works: overrides=["{text}"]')
    values = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{shown(override)}: an override is key=value; works: steps=100")
        values[name.strip()] = _read(_Entry(name.strip(), text, True, ""))
    return values


def _read(entry: _Entry) -> Value:
    where = f"{entry.where}: " if entry.where else ""
    if entry.name not in keys():
        if entry.name == "base_config":
            raise ConfigError(f"{where}base_config={shown(entry.text)}: is a key of config files only")
        nearest = _nearest_key(entry.name)
        raise ConfigError(f"{where}unknown key {shown(entry.name)}; nearest: {nearest}")
    try:
        return keys()[entry.name].read(entry.text, entry.plain)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def _nearest_key(name: str) -> str:
    """Return the key that is most like a name, however little it is."""
    return nearest_name(name, keys(), least_like=0) or next(iter(keys()))


def _entries(path: Path) -> Iterator[_Entry]:
    """Yield the keys of a YAML file with their texts, unread: no type is guessed and no object made."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"config file {shown(str(path), 400)}: {_reason(error)}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
        raise ConfigError(f"{path}{line}: is no valid YAML ({problem})") from None
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else "not UTF-8 text"
        raise ConfigError(f"config file {shown(str(path), 400)}: cannot be read ({problem})") from None
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: must be lines of `key: value`")
    seen: dict[str, int] = {}
    for name_node, value_node in node.value:
        line = name_node.start_mark.line + 1
        where = f"{path}:{line}"
        if not isinstance(name_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: must be lines of `key: value`")
        name = name_node.value
        if name in seen:
            raise ConfigError(f"{where}: {shown(name)} is stated twice (first in line {seen[name]})")
        seen[name] = line
        if name in LISTS and isinstance(value_node, yaml.SequenceNode):
            yield _Entry(name, ";".join(_path_item(item, name) for item in value_node.value), False, where)
            continue
        if not isinstance(value_node, yaml.ScalarNode):
            rule = "a path or a list of paths" if name in LISTS else "one value, not a list or a mapping"
            raise ConfigError(f"{where}: {shown(name)} takes {rule}")
        if not value_node.tag.startswith("tag:yaml.org,2002:"):
            raise ConfigError(f"{where}: {shown(name)} takes no tag such as {shown(value_node.tag)}")
        yield _Entry(name, value_node.value, value_node.style is None, where)


def _path_item(node: yaml.Node, name: str) -> str:
    """Return an item of a list of paths as it is written in one line: `PATH`, or `PATH,WEIGHT` of a mixture."""
    if isinstance(node, yaml.ScalarNode):
        path, weight = node.value, ""
    else:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        item = {k.value: v.value for k, v in pairs if isinstance(v, yaml.ScalarNode)}
        if set(item) != {"path", "weight"}:
            raise ConfigError(
                f"{name}, line {node.start_mark.line + 1}: an item must be a path or {{path: ..., weight: ...}}; "
                "works: {path: a.jsonl, weight: 0.7}"
            )
        path, weight = item["path"], f",{item['weight']}"
    if not path or ";" in path:
        line = node.start_mark.line + 1
        raise ConfigError(
            f"{name}, line {line}: {shown(path)!r} must be a path without ';', which separates paths"
        )
    return path + weight


def _reason(error: OSError) -> str:
    return {FileNotFoundError: "does not exist", IsADirectoryError: "is a folder, not a YAML file"}.get(
        type(error), f"cannot be read ({error.strerror})"
    )


def _apply(values: dict[str, Value], layer: _Layer) -> None:
    """Put a layer over the values below it: its alternatives displace theirs."""
    stated = {name for name, value in layer.items() if value is not None}
    values.update(layer)
    if values["batch_size"] is not None:
        _displace_pretraining_batch(values, stated)
    lengths = stated.intersection(LENGTH_KEYS)
    if lengths:
        values.update(dict.fromkeys(set(LENGTH_KEYS) - lengths, None))
    ramp = bool(values["enable_rampup_batch_size"]) and bool(stated.intersection(RAMP_KEYS))
    batch = stated.intersection(("global_batch_size", "batch_size_schedule"))
    if ramp or "gradient_accumulation_steps" in stated or batch:
        values.update(dict.fromkeys({"global_batch_size", "batch_size_schedule"} - batch, None))
    if batch and not ramp:
        values["enable_rampup_batch_size"] = False
        if "gradient_accumulation_steps" not in stated:
            values["gradient_accumulation_steps"] = None


def _displace_pretraining_batch(values: dict[str, Value], stated: set[str]) -> None:
    """Put the keys that batch_size stands in place of back to their defaults; refuse those of batch_size's layer."""
    refused = [name for name in PRETRAINING_BATCH_KEYS if name in stated]
    if refused:
        name = refused[0]
        raise ConfigError(
            f"{name}={values[name]}: must not be stated beside batch_size={values['batch_size']}, which states the "
            f"batch in prompts; works: batch_size=null, or {name} left out"
        )
    values.update({name: _base_layer()[name] for name in PRETRAINING_BATCH_KEYS})


def _refuse_pairs_without_prompts(values: Mapping[str, Value], layers: Sequence[_Layer]) -> None:
    """Refuse keys of a batch of prompts where no layer says anything of such a batch: they would do nothing."""
    if any("batch_size" in layer for layer in layers):
        return
    for name in RL_BATCH_KEYS:
        if values[name] != _base_layer()[name]:
            raise ConfigError(
                f"{name}={values[name]}: belongs to reinforcement learning, and says nothing without batch_size, "
                f"the prompts of a batch; works: {name}={_base_layer()[name]}"
            )


def _check_rules(values: Mapping[str, Value]) -> None:
    """Check what one key says about another, and what no type can tell."""

    def fault(name: str, rule: str, nearest: object = None) -> ConfigError:
        return keys()[name].fault(keys()[name].write(values[name]), rule, nearest)

    if all(values[name] is None for name in LENGTH_KEYS):
        raise ConfigError(f"steps=null: one of {', '.join(LENGTH_KEYS)} must say how long; works: steps=300")
    for name in ("global_batch_size", "batch_size_schedule"):
        if values["enable_rampup_batch_size"] and values[name] is not None:
            raise ConfigError(
                f"{name}={values[name]}: must not be stated beside enable_rampup_batch_size=true; "
                f"works: {name}=null"
            )
    if values["adam_scaling"] == "sde":
        for name, needed in (("opt_type", "adamw"), ("learning_rate_scaling", "sqrt")):
            if values[name] != needed:
                raise fault(
                    name, f"{needed} beside adam_scaling=sde, a rule for Adam with the square root", needed
                )
    if values["packing_strategy"] == "best_fit" and not values["packing"]:
        raise fault("packing_strategy", "concatenate where packing=false, which packs nothing", "concatenate")
    if not values["run_dir"]:
        raise fault("run_dir", "the path of a folder", "runs/default")
    number = {name: value for name, value in values.items() if isinstance(value, int | float)}
    heads, kv_heads = int(number["base_num_query_heads"]), int(number["base_num_kv_heads"])
    if heads % kv_heads:
        multiple = max(1, round(heads / kv_heads)) * kv_heads
        raise fault("base_num_query_heads", f"a multiple of base_num_kv_heads={kv_heads}", multiple)
    if number["head_dim"] % 2:
        raise fault("head_dim", "even, since rotary embeddings turn pairs", number["head_dim"] + 1)
    warmup, decay = number["warmup_steps_fraction"], number["wsd_decay_steps_fraction"]
    if values["learning_rate_schedule"] == "wsd" and warmup + decay > 1:
        rest = f"{max(0.0, 1 - warmup):.12g}"
        rule = f"at most {rest}, what warmup_steps_fraction={warmup:g} leaves of the run"
        raise fault("wsd_decay_steps_fraction", rule, rest)
    window = re.fullmatch(r"(\d{1,18}):(\d{1,18})", str(values["profile_steps"]))
    if values["profile_steps"] and not (window and int(window[1]) < int(window[2])):
        raise fault("profile_steps", 'empty or "first:end" with first < end', "10:13")


def _quoted(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', width=float("inf"), allow_unicode=True).strip()
