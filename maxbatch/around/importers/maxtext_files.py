"""MaxText's files: chains of `base_config`, model files, commands of recipes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from maxbatch.around.importers.maxtext_defaults import (
    BASE,
    file_of_module,
    is_default,
    is_known,
    values_of,
    words_of_model,
)
from maxbatch.around.importers.reading import is_yaml, read_yaml
from maxbatch.around.importers.shell import (
    UNSET,
    config_file_of,
    is_config_file,
    read_command,
    settings_of,
)
from maxbatch.around.importers.translation import Displaced, NameOfFile, Stated
from maxbatch.config.keys import Fixes
from maxbatch.config.loading import load_config
from maxbatch.config.paths import presets
from maxbatch.config.sections import names_fixing
from maxbatch.config.values import NULLS, shown, shown_path
from maxbatch.system.errors import ConfigError

_MOST_BASES = 8
_BLOCKS = ("rl", "lora", "dpo")  # their words are also read without the block's name


def read(path: Path, number: int | None = None) -> tuple[dict[str, Stated], list[str]]:
    """Reads the words of a config, with its `base_config` chain and model, or of a recipe; with
    notes.

    As in MaxText, a model's own keys override a config file's, and a command's override both.
    `number` is that of the command in a recipe, from 1; None: the only one.
    """
    notes: list[str] = []
    named, of_command = None, dict[str, Stated]()
    if is_yaml(path):
        words = _chain(path) if path.name != BASE else dict(read_yaml(path))
    else:
        run = read_command(path, number)
        line = run.arguments
        if len(files := [word for word in line if is_config_file(word)]) > 1:
            both = " and ".join(map(shown, files[:2]))
            raise ConfigError(
                f"{shown_path(path)}: a command has the words of {both}, and an import makes one "
                "config"
            )
        of_command = settings_of(
            [word.lstrip("-") if "=" in word else word for word in line], shown_path(path)
        )
        of_command = {
            name: _as_list(name, value)
            for name, value in of_command.items()
            if name not in ("m", "c")
        }
        if run.program.endswith("train_sft_native"):  # which appends both to its command
            of_command |= {"use_sft": "true", "use_tunix_gradient_accumulation": "false"}
        named = config_file_of(line)
        if bare := ", ".join(unset[1] for word in line if (unset := UNSET.fullmatch(word))):
            notes.append(
                f"{shown_path(path)} does not set {bare}, which may hold words of the command: "
                "none are read"
            )
        words, note = _words_of_file(
            path, named, run.program, "per_device_batch_size" in of_command
        )
        notes += [note] if note else []
        words = {word: value for word, value in words.items() if not _is_stated(word, of_command)}
    name = str((words | of_command).get("model_name", "default")).strip()
    if name in ("", "default"):
        if is_yaml(path) and path.stem not in presets() and words_of_model(path.stem):
            # the name by which MaxText reads the file of a model
            of_command["model_name"] = NameOfFile(path.stem)
        return words | of_command, notes
    if name in presets():
        words = _below_model(words, name)
        block = load_config(overrides=[f"model_name={name}"]).model.decoder_block
        if of_command.get("decoder_block") == block:
            # The model's file states all that its block needs, so the block's rows need not ask.
            of_command["decoder_block"] = Displaced(block)
    else:
        folders = [
            path.parent,
            *([Path(named).parent] if named and Path(named).is_absolute() else []),
        ]
        plain = name.replace("-Instruct", "")
        model = next(
            filter(None, (_near(folder, f"models/{plain}.yml") for folder in folders)), None
        )
        if model is None:  # its name is refused, and what else its file states is not known
            return _below_model(words | of_command, name), notes
        if model.resolve() != path.resolve():
            words |= read_yaml(model)
        of_command["model_name"] = NameOfFile(name)
        notes.append(f"model_name={name}: its keys are those of {shown_path(model)}")
    return words | of_command, notes


def _is_stated(word: str, of_command: Mapping[str, Stated]) -> bool:
    """Returns whether a command states a word of its file, with or without the block's name."""
    return word in of_command or any(
        word == f"{block}.{name}" or name == f"{block}.{word}"
        for block in _BLOCKS
        for name in of_command
    )


def _as_list(name: str, value: Stated) -> Stated:
    """Parses a list in a command as MaxText does: `[a, b]`, or `('a', 'b')` for columns."""
    text = value.strip() if isinstance(value, str) else ""
    is_tuple = text.startswith("(") and text.endswith(")") and name.endswith("_columns")
    if not is_tuple and not (text.startswith("[") and text.endswith("]")):
        return value
    items = re.findall(r"""'([^']*)'|"([^"]*)"|([^\s,'"][^,'"]*)""", text[1:-1])
    return [single or double or bare.strip() for single, double, bare in items]


def _words_of_file(
    path: Path, named: str | None, program: str, is_alone: bool
) -> tuple[dict[str, Stated], str]:
    """Returns the words of a command's config file, and a note on their origin.

    Args:
      path: the recipe.
      named: the file named by the command; None: the program's default.
      program: the module or the path run by the command.
      is_alone: whether the command may be read without its file, because it states the batch.
    """
    if named is None:
        file = file_of_module(program)
        note = (
            f"{program} reads MaxText's {file} where no file is named: its values as of 0.2.5"
            if file != BASE
            else ""
        )
        return dict(values_of(file) or {}), note
    place = Path(os.path.expanduser(named))
    if place.is_absolute() and os.path.isfile(place):
        return _of_base(place) if place.name == BASE else _chain(place), ""
    if Path(named).name == BASE:
        return {}, ""  # its values are MaxText's defaults
    beside, note = _named(path.parent, named, is_alone and file_of_module(program) == BASE)
    return _chain(beside) if beside else dict(values_of(named) or {}), note


def _of_base(path: Path) -> dict[str, Stated]:
    """Returns the words of a base.yml with other values than MaxText's."""
    return {
        word: value
        for word, value in read_yaml(path).items()
        if is_known(word) and not is_default(word, value)
    }


def _below_model(words: dict[str, Stated], name: str) -> dict[str, Stated]:
    """Returns a config file's words below a model, whose file overrides them."""
    form, of_model = names_fixing(Fixes.FORM), words_of_model(name)
    return {
        word: Displaced(value if isinstance(value, str) else json.dumps(value))
        if word in of_model or (word in form and is_default(word, value))
        else value
        for word, value in words.items()
    }


def _near(folder: Path, name: str) -> Path | None:
    """Finds a MaxText config in a folder or above it; None if there is none."""
    for above in [folder, *folder.resolve().parents][:8]:
        for tried in (
            above / name,
            above / "configs" / name,
            above / "src" / "maxtext" / "configs" / name,
        ):
            if os.path.isfile(tried):  # False for an invalid name
                return tried
    return None


def _named(folder: Path, named: str, is_alone: bool) -> tuple[Path | None, str]:
    """Returns the config file named by a command, or None, and a note on the origin of its words.

    Raises:
      ConfigError: the file is missing, its values are unknown, and it may state the task, the model
        or the batch: it is MaxText's own (below `configs`), or the command does not state the
        batch.
    """
    beside = _near(folder, re.sub(r"^.*configs/+|^\W*", "", named))
    if beside is not None:
        return beside, ""
    configs = next((above for above in folder.resolve().parents if above.name == "configs"), None)
    files = sorted(configs.glob(f"*/**/{Path(named).name}")) if configs else []
    if len(files) == 1:
        return (
            files[0],
            f"{shown_path(named)} is not there: {shown_path(files[0])} is read, the only one of "
            "that name",
        )
    absent = f"{shown_path(named)} is not beside {shown_path(folder)}"
    if values_of(named) is not None:
        return None, f"{absent}: its values are MaxText's as of 0.2.5"
    if is_alone and "configs/" not in named:
        return None, f"{absent}: only the command's own words are read"
    states = "states the task, the model or the batch"
    raise ConfigError(f"{absent.replace(' is', ': is', 1)}, and {states}; works: put it there")


def _chain(path: Path) -> dict[str, Stated]:
    """Returns the words of a file over its bases'; from MaxText's base.yml only changed ones."""
    words: dict[str, Stated] = {}
    seen: list[Path] = []
    at: Path | None = path
    while at is not None:
        if len(seen) == _MOST_BASES:
            raise ConfigError(
                f"base_config={shown_path(at)}: a chain has at most {_MOST_BASES} files"
            )
        if at.resolve() in seen:
            raise ConfigError(
                f"base_config={shown_path(at)}: must not lead back to a file of its own chain"
            )
        seen.append(at.resolve())
        of_file = read_yaml(at) if at.name != BASE else _of_base(at)
        base = of_file.pop("base_config", "")
        words = of_file | words
        name = base if isinstance(base, str) and base.lower() not in NULLS else ""
        at = _near(path.parent, name) if name else None
        if name and at is None and Path(name).name != BASE:  # its values are known
            raise ConfigError(
                f"base_config={shown(name)}: is not beside {shown_path(path)}; works: put it there"
            )
    return words
