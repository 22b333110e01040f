"""YAML files, environment and overrides to one typed, locked config.

Layers, later ones win: base.yml < the `base_config:` chain of CONFIG < CONFIG < environment
variables MAXBATCH_KEY < `key=value` overrides. Among alternatives (the length of a run, the
statement of the batch) the key in the highest layer displaces the others. A preset is just below
the layer whose `model_name` names it, and displaces all model keys of lower layers; its other
values are between the chain and CONFIG.
"""

from __future__ import annotations

import functools
import numbers
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from maxbatch.config.base_yml import base_path, base_yml
from maxbatch.config.config import Config
from maxbatch.config.foreign_words import foreign_words
from maxbatch.config.keys import Entry, Fixes, Part
from maxbatch.config.paths import configs_dir, place_fault, presets
from maxbatch.config.rules import (
    PRETRAINING_BATCH,
    check_rules,
    displaced,
    refuse_pairs_without_prompts,
)
from maxbatch.config.sections import KEYS, names_fixing, names_of
from maxbatch.config.values import NULLS, TEXTS, Value, nearest_name, shown, shown_path, value_text
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath, as_path, is_remote, url_fault

_ENVIRONMENT = "MAXBATCH_"
_MOST_FILES = 8  # of a chain of base_config
AUTO = "auto"  # the model_name that takes the model keys from a Hugging Face folder
_FORM = frozenset(names_fixing(Fixes.FORM))


class Setting(NamedTuple):
    """The value of a key, and its origin."""

    value: Value
    layer: str  # base.yml, base_config, preset, config file, environment or override
    where: str = ""  # file and line, or the environment variable; "" for an override
    displaced_by: str = ""  # the key in that layer that displaces the value; "": none


_Layer = Mapping[str, Setting]


class _Stated(NamedTuple):
    """The entries of a layer, not parsed yet."""

    kind: str
    entries: Sequence[Entry]


def find_config(name: str | os.PathLike[str]) -> AnyPath:
    """Returns the file of a config: a path, or the name of a packaged config.

    `rl`, `post_train/rl.yml` and `configs/post_train/rl.yml` name the same packaged file from any
    folder; `llama3-8b` is a preset. An existing file wins over a name.
    """
    if rule := url_fault(str(name)):
        raise ConfigError(f"config file {shown_path(name)}: must be {rule}")
    if is_remote(str(name)):
        return as_path(name)
    path = Path(name)
    # the folder of a run may have the name of its config
    is_there = os.path.exists(path) and not path.is_dir()
    return path if is_there else _packaged(os.fspath(name)) or path


def _packaged(name: str) -> Path | None:
    """Returns the file of a packaged config; the name may begin with `configs/`."""
    folder = configs_dir()
    ready = [file for file in sorted(folder.rglob("*.yml")) if file.parent.name != "sweeps"]
    names = {
        text: file for file in ready for text in (file.stem, file.relative_to(folder).as_posix())
    }
    return names.get(name.removeprefix("configs/"))


def load_config(
    path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = (), **keys: object
) -> Config:
    """Reads the config of a run.

    Args:
      path: a YAML file of keys, or the name of a packaged config (`find_config`); None: base.yml
        alone.
      overrides: "key=value" texts, the highest layer.
      keys: keys by name, such as `steps=3` or `train_tokens="10M"`, in the same layer as
        `overrides`. The last statement of a key wins.

    Returns:
      The whole config, frozen: every key of base.yml as an attribute and as an item. Alternatives
      that are not stated, or are displaced, are None (the ramp: `enable_rampup_batch_size` is
      False).

    Raises:
      ConfigError: a file that cannot be read, an unknown key, a value of the wrong type or outside
        its rule, alternatives stated together.
    """
    texts = overrides if isinstance(overrides, str) else [*overrides, *override_texts(keys)]
    return config_from(resolve(path, texts))


def config_from(settings: Mapping[str, Setting]) -> Config:
    """Returns the config of `resolve`'s settings."""
    return Config.of(_values(settings))


def displaced_ramp(settings: Mapping[str, Setting]) -> str | None:
    """Returns a warning about a ramp of default keys displaced by a batch in a higher layer, or
    None.

    The plan warns about other ramps; their keys are still in the config.
    """
    enabled, *others = names_of(Part.RAMP)
    by = settings[enabled].displaced_by
    if by in ("", "batch_size") or any(
        settings[name].value != KEYS[name].default_value for name in others
    ):
        return None
    batch = f"{by}={value_text(settings[by].value)}"
    return f"{enabled}=true has no effect: {batch} replaces the ramp"


def override_texts(settings: Mapping[str, object]) -> list[str]:
    """Returns Python values as "key=value" texts; items of a list are joined by commas.

    Raises:
      ConfigError: no key has a value of this type.
    """
    return [f"{name}={_text_of(name, value)}" for name, value in settings.items()]


def _text_of(name: str, value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_text_of(name, item) for item in value)
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool):
        return value_text(value)
    if isinstance(value, numbers.Real):
        return str(value)
    raise ConfigError(
        f"{name}={shown(repr(value))}: must be a text, a number, True, False, None or a list of "
        "them"
    )


def resolve(
    path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> Mapping[str, Setting]:
    """Reads a config as `load_config` does, and returns each value with its layer."""
    _refuse_edited_base()
    files = _chain(find_config(path)) if path is not None else []
    above = [
        *files[-1:],
        _Stated("environment", _environment()),
        _Stated("override", _overrides(overrides)),
    ]
    _refuse_unknown(files[:-1], above, path)
    return _settled(files[:-1], above)


def _settled(
    stated_below: Sequence[_Stated], stated_above: Sequence[_Stated]
) -> Mapping[str, Setting]:
    """Merges the layers below and above a preset's rates; only keys of base.yml."""
    below = [_base_layer(), *(_layer(kind, entries) for kind, entries in stated_below)]
    above = [_layer(kind, entries) for kind, entries in stated_above]
    layers = [*below, *above]
    naming = max(i for i, layer in enumerate(layers) if "model_name" in layer)
    preset = _preset(naming, layers)
    settings: dict[str, Setting] = {}
    for i, layer in enumerate(layers):
        if preset is not None and i == len(below):
            _apply(
                settings, {name: setting for name, setting in preset.items() if name not in _FORM}
            )
        if preset is not None and i == naming:
            _displace_form(settings, preset, layer["model_name"])
        _apply(settings, layer)
        _settle_run_dir(settings, layer)
    values = _values(settings)
    check_rules(Config.of(values))
    if not any("batch_size" in layer for layer in [*below[1:], *above]):
        in_files = [
            layer
            for layer in above
            if {"micro_batch_size", "gradient_accumulation_steps"} <= layer.keys()
        ]
        places = [layer["micro_batch_size"].where.rpartition(":")[0] for layer in in_files]
        file = next(filter(None, places), None)  # a file with both keys is Axolotl's
        imports = {"micro_batch_size": f"maxbatch import axolotl {file}"} if file else {}
        refuse_pairs_without_prompts(values, imports)
    return {name: settings[name] for name in KEYS}


def dump_config(config: Config) -> str:
    """Returns the config as YAML that `load_config` reads back as an equal config."""
    from maxbatch.config.yaml_file import quoted

    left_out = () if config.batch_size is None else PRETRAINING_BATCH
    written = {name: value_text(value) for name, value in config.items() if name not in left_out}
    for name, text in written.items():
        if KEYS[name].kind in TEXTS and config[name] is not None:
            written[name] = quoted(text)
    return "".join(f"{name}: {text}\n" for name, text in written.items())


@functools.cache
def _base_layer() -> _Layer:
    return {name: Setting(key.default_value, "base.yml") for name, key in KEYS.items()}


def _refuse_edited_base() -> None:
    """Raises ConfigError if base.yml differs from its table: an edit of it would be ignored."""
    path = base_path()
    try:
        is_edited = path.read_text(encoding="utf-8") != base_yml()
    except FileNotFoundError:  # no layer
        return
    if is_edited:
        raise ConfigError(
            f"{shown_path(path)}: differs from the table of keys, which holds the defaults; "
            "works: a config file of your own with base_config: base.yml"
        )


def _is_base(path: AnyPath) -> bool:
    try:
        return isinstance(path, Path) and path.samefile(base_path())
    except (OSError, ValueError):  # the reader reports the fault of the path
        return False


def _chain(path: AnyPath) -> list[_Stated]:
    """Returns the entries of the files in a `base_config` chain, the lowest first."""
    layers: list[_Stated] = []
    seen: list[AnyPath] = []
    while True:
        if _is_base(path):
            return layers
        from maxbatch.config.yaml_file import entries

        file_entries = list(entries(path))
        real = path.resolve()
        if real in seen:
            loop = shown(" -> ".join(p.name for p in [*seen, path]))
            rule = f"must not lead back to a file of its own chain ({loop})"
            raise ConfigError(f"base_config={shown_path(path)}: {rule}")
        if len(seen) == _MOST_FILES:
            raise ConfigError(
                f"base_config={shown_path(path)}: a chain has at most {_MOST_FILES} files"
            )
        seen.append(real)
        base = next((entry for entry in file_entries if entry.name == "base_config"), None)
        kind = "base_config" if layers else "config file"
        layers.insert(0, _Stated(kind, [entry for entry in file_entries if entry is not base]))
        if base is None or (base.plain and base.text.lower() in NULLS) or not base.text:
            return layers
        if fault := url_fault(base.text):
            raise ConfigError(f"base_config={shown_path(base.text)}: must be {fault}")
        path = as_path(base.text) if is_remote(base.text) else path.parent / base.text
        # MaxText's files have `base_config: base.yml`; if no such file is beside them, it is ours.
        if not os.path.exists(str(path)):
            path = _packaged(base.text) or path


def _preset(naming: int, layers: Sequence[_Layer]) -> _Layer | None:
    """Returns the preset that a layer names; None if the layers' own keys describe the model."""
    model_name = str(layers[naming]["model_name"].value)
    if model_name == "default":
        return None
    if model_name == AUTO:
        return _imported(naming, layers)
    files = presets()
    if model_name not in files:
        nearest = nearest_name(model_name, files) or "default"
        raise ConfigError(
            f"model_name={shown(model_name)}: must be default, {AUTO} or one of "
            f"{shown(', '.join(files), 300)}; works: model_name={nearest}"
        )
    from maxbatch.config.yaml_file import entries

    return _layer("preset", entries(files[model_name]))


def _imported(naming: int, layers: Sequence[_Layer]) -> _Layer | None:
    """Returns the keys of the Hugging Face folder that `load_parameters_path` names.

    The folder is not needed if a layer from `model_name` upwards states all of them, as the config
    of a run does; that folder may no longer exist.
    """
    if any(layer.keys() >= _FORM for layer in layers[naming:]):
        return None
    from maxbatch.config.hub import hub_problem
    from maxbatch.config.model_forms import model_forms

    path = str(
        [
            layer["load_parameters_path"].value
            for layer in layers
            if "load_parameters_path" in layer
        ][-1]
    )
    for form in model_forms().values() if path else ():
        if (keys := form.keys(path)) is not None:
            where = form.file_of_keys(path)
            return _layer("preset", [Entry(name, text, True, where) for name, text in keys.items()])
    where = f"load_parameters_path={shown(path) or repr(path)}"
    if problem := hub_problem(path):
        raise ConfigError(f"{where}: {problem}")
    raise ConfigError(
        f"model_name={AUTO}: reads the model keys from the config.json of a Hugging Face "
        f"folder, and {where} is none; works: model_name=default"
    )


def _displace_form(settings: dict[str, Setting], preset: _Layer, model_name: Setting) -> None:
    """Sets all keys that fix the model from a preset; keys missing there get their defaults."""
    for name in _FORM:
        if name in preset:
            settings[name] = preset[name]
        elif settings[name] != (default := _base_layer()[name]):
            settings[name] = model_name._replace(value=default.value, displaced_by="model_name")


def _environment() -> list[Entry]:
    settings, faults = [], list[str]()
    for variable, text in sorted(os.environ.items()):
        if variable.startswith(_ENVIRONMENT):
            name = variable.removeprefix(_ENVIRONMENT)
            if name != name.upper() or name.lower() not in KEYS:
                faults.append(
                    f"environment variable {shown(variable)}: names no config key{_hint(name)}"
                )
            settings.append(Entry(name.lower(), text, True, f"environment variable {variable}"))
    if faults:
        raise ConfigError("; ".join(faults))
    return settings


def _hint(name: str) -> str:
    from maxbatch.config.unknown import hint

    answer, separator, near = hint(name.lower()).partition("; nearest: ")
    return f"; nearest: {_ENVIRONMENT}{near.upper()}" if separator else answer


def _refuse_unknown(
    below: Sequence[_Stated], above: Sequence[_Stated], path: str | os.PathLike[str] | None
) -> None:
    """Raises a ConfigError that names all unknown keys.

    If a key is unknown and batch_size is unset, keys of reinforcement learning alone are reported
    too.
    """
    known = KEYS.keys() | {"base_config"}
    layers = [
        layer
        for layer in (*below, *above)
        if any(entry.name not in known for entry in layer.entries)
    ]
    if not layers:
        return
    from maxbatch.config.unknown import UnknownKeys

    has_prompts = any(
        entry.name == "batch_size" for layer in (*below, *above) for entry in layer.entries
    )
    of_prompts = () if has_prompts else names_of(Part.PROMPT_BATCH)
    foreign = {name for name in of_prompts if foreign_words().elsewhere(name)}
    entries_of = [entry for layer in layers for entry in layer.entries]
    unknown = [entry for entry in entries_of if entry.name not in known or entry.name in foreign]

    def settled(place_of: Mapping[str, Mapping[str, str]]) -> Mapping[str, Value] | None:
        def replaced(layer: _Stated) -> _Stated:
            texts = (
                (entry, place_of.get(entry.name, {entry.name: entry.text}))
                for entry in layer.entries
            )
            return layer._replace(
                entries=[
                    entry._replace(name=name, text=text)
                    for entry, settings in texts
                    for name, text in settings.items()
                ]
            )

        try:
            return _values(
                _settled(*([replaced(layer) for layer in layers] for layers in (below, above)))
            )
        except ConfigError:
            return None

    in_file = any(
        entry.where and entry.name not in known
        for layer in (*below, *above)
        for entry in layer.entries
    )
    known_texts = {entry.name: entry.text for entry in entries_of if entry.name in known - foreign}
    raise UnknownKeys(unknown, str(path) if in_file else None, settled, known_texts)


def _overrides(overrides: Sequence[str]) -> list[Entry]:
    if isinstance(overrides, str):
        text = shown(overrides)
        raise ConfigError(
            f'overrides="{text}": must be a list of texts; works: overrides=["{text}"]'
        )
    settings = []
    for override in overrides:
        if not isinstance(override, str):
            raise ConfigError(
                f"overrides: {shown(repr(override))} must be a text; works: overrides=['steps=100']"
            )
        name, equals, text = override.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{shown(override)}: an override is key=value; works: steps=100")
        settings.append(Entry(name.strip(), text, True, ""))
    return settings


def _layer(kind: str, entries: Iterable[Entry]) -> _Layer:
    return {entry.name: Setting(_read(entry), kind, entry.where) for entry in entries}


def _read(entry: Entry) -> Value:
    where = f"{entry.where}: " if entry.where else ""
    if entry.name == "base_config":
        raise ConfigError(f"{where}base_config={shown(entry.text)}: is a key of config files only")
    try:
        return KEYS[entry.name].read(entry.text, entry.plain)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def _apply(settings: dict[str, Setting], layer: _Layer) -> None:
    """Puts a layer over the settings below it; its alternatives displace theirs."""
    settings.update(layer)
    stated_names = {name for name, setting in layer.items() if setting.value is not None}
    for name, by, to_default in list(displaced(_values(settings), stated_names)):
        nothing = False if name == "enable_rampup_batch_size" else None
        value = KEYS[name].default_value if to_default else nothing
        if to_default or settings[name].value != value:
            settings[name] = settings[by]._replace(value=value, displaced_by=by)


def _settle_run_dir(settings: dict[str, Setting], layer: _Layer) -> None:
    """Sets run_dir in a layer that states MaxText's base_output_directory and run_name."""
    words = [
        name
        for name in ("base_output_directory", "run_name")
        if name in layer and layer[name].value
    ]
    if words:
        folder, name = (str(settings[word].value) for word in ("base_output_directory", "run_name"))
        place = f"{folder.rstrip('/')}/{name}" if folder and name else folder or f"runs/{name}"
        if "run_dir" in layer and layer["run_dir"].value != place:
            raise ConfigError(
                f"run_dir={shown(str(layer['run_dir'].value))}: must not be stated beside "
                f"{' and '.join(words)}, which mean {shown(place)}; works: "
                f"run_dir={shlex.quote(place)}"
            )
        if rule := place_fault(place):
            raise ConfigError(f"{' and '.join(words)} mean run_dir={shown(place)}: must be {rule}")
        settings["run_dir"] = settings[words[0]]._replace(value=place)
    elif "run_dir" in layer:
        for name in ("base_output_directory", "run_name"):
            settings[name] = layer["run_dir"]._replace(
                value="", displaced_by="run_dir" * bool(settings[name].value)
            )


def _values(layer: _Layer) -> dict[str, Value]:
    return {name: setting.value for name, setting in layer.items()}
