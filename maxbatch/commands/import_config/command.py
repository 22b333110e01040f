"""`maxbatch import`: converts another program's config, and prints the fate of every setting."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from maxbatch.commands.arguments import check_at_most, count, local_path
from maxbatch.commands.import_config import (
    axolotl,
    deepspeed,
    hf,
    maxtext,
    maxtext_files,
    megatron,
    reading,
    shell,
    trl,
)
from maxbatch.commands.import_config.table import Format
from maxbatch.commands.import_config.translation import (
    BESIDE,
    IGNORED,
    MAPPED,
    NEEDS_YOU,
    UNSUPPORTED,
    Fate,
    Stated,
    Translation,
)
from maxbatch.config.config import Config
from maxbatch.config.loading import load_config
from maxbatch.config.paths import is_mixture_file
from maxbatch.config.rules import check_dataset
from maxbatch.config.sections import KEYS, PromptBatchConfig
from maxbatch.config.unknown import IMPORTED
from maxbatch.config.values import TEXTS, first_of, shown, shown_path, value_text
from maxbatch.config.words import FRAMEWORKS, look_up
from maxbatch.config.yaml_file import quoted
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.mesh_shape import MOST_DEVICES
from maxbatch.plan.stages import stated_batches
from maxbatch.plan.view import equation
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.errors import ConfigError
from maxbatch.system.folding import folded, folded_rows, printable, terminal_width
from maxbatch.system.warning import note

_WIDEST = 44  # columns of a word or a value


FORMATS: Mapping[str, Format] = {
    "maxtext": maxtext.FORMAT, "hf": hf.FORMAT, "deepspeed": deepspeed.FORMAT, "axolotl": axolotl.FORMAT,
    "megatron": megatron.FORMAT, "nemo": megatron.NEMO, "trl": trl.FORMAT,
}  # fmt: skip

# Frameworks without a converter: their files are recognised by these words, and only their batch is explained.
ANSWERED = {"verl": ("data.train_batch_size", "algorithm.adv_estimator", "actor_rollout_ref.actor.ppo_mini_batch_size")}
_NAMES = (*FORMATS, *ANSWERED, "auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", metavar="FORMAT", help=f"whose config: {', '.join(_NAMES)}")
    parser.add_argument("file", metavar="FILE", type=local_path, help="YAML, JSON, key=value lines or a shell recipe")
    output = "where to write the config (default maxbatch.yml); never over a file"
    parser.add_argument("--output", metavar="FILE", type=local_path, default="maxbatch.yml", help=output)
    skip = "leave out unsupported words, unless one states the batch, the length, the data or the model"
    one = "number of the command to read, from 1, if several in a shell file train"
    parser.add_argument("--command", metavar="N", type=count, help=one)
    devices = "devices of a run, for which the batch is printed; TRL counts its batch on them"
    parser.add_argument("--devices", metavar="N", type=count, help=devices)
    parser.add_argument("--skip-unsupported", action="store_true", help=skip)


def run(args: argparse.Namespace) -> int:
    """Translates a config, prints the fate of its words and writes it; returns the exit code."""
    path, output = Path(args.file), Path(args.output)
    if args.format not in _NAMES:
        works = f"works: maxbatch import auto {shlex.quote(str(path))}"
        raise ConfigError(f"{shown(args.format)}: must be one of {', '.join(_NAMES)}; {works}")
    _refuse_existing(output)
    reading.text_of(path)
    if args.command is not None and reading.is_yaml(path):
        raise ConfigError(f"--command {args.command}: is for shell files, and {shown_path(path)} is YAML or JSON")
    if args.devices is not None:
        check_at_most("--devices", args.devices, MOST_DEVICES)
    name = recognised_format(path, args.command) if args.format == "auto" else args.format
    translation, notes = translated(name, path, args.command, args.devices)
    name = translation.framework
    _print(translation, name)
    for line in notes:
        note(line)
    _refuse_unsupported(translation.fates, args.skip_unsupported)
    text = written(translation, f"{FRAMEWORKS[name]}'s {path.name}")
    _refuse_existing(output)
    write_atomically(output, text)
    if args.devices is not None:
        _print_batch(load_config(output), args.devices)
    waits = sum(fate.fate == NEEDS_YOU for fate in translation.fates)
    if waits:
        note(f"{waits} of the words need a step of yours before maxbatch train; the table gives each")
    note(f"written to {output}; next: maxbatch plan {shlex.quote(str(output))} --devices N")
    return 0


def translated(
    name: str, path: Path, command: int | None = None, devices: int | None = None
) -> tuple[Translation, list[str]]:
    """Translates a file of a format, with notes on its reading; `hf` reads GRPOConfig as `trl` does.

    `command` is its number in a shell file, from 1; None: the only one.
    """
    words, notes = maxtext_files.read(path, command) if name == "maxtext" else (_read(path, command), [])
    if name == "hf" and trl.is_of_responses(words):
        name = "trl"
    if name == "megatron" and megatron.is_of_nemo(words):
        name = "nemo"
    if name in ANSWERED:
        raise ConfigError(f"{shown_path(path)}: {_answer(name, words)}")
    form = FORMATS[name]
    if not any(_is_known(word, name) for word in words):
        raise ConfigError(f"{shown_path(path)}: states nothing that {FRAMEWORKS[name]} knows")
    counts_processes = name == "trl" and not reading.is_yaml(path)
    if counts_processes and (processes := shell.read_command(path, command).processes(shown_path(path))):
        words.setdefault(trl.PROCESSES, str(processes))
    translation = Translation(words, form.defaults, name, devices)
    form.translate(translation)
    translation.finish()
    return translation, notes


def _answer(name: str, words: Mapping[str, Stated]) -> str:
    """Explains the batch words of a framework without a converter."""
    batch = {key.name for key in PromptBatchConfig.declared}
    rows = {word: row for word in words if (row := look_up(word, name)) and not batch.isdisjoint(row.keys)}
    said = "; ".join(f"{shown(word)}={shown(_text(words[word]))} {row.answer()}" for word, row in rows.items())
    rule = f"a config of {FRAMEWORKS[name]} is not converted; its batch here: {said or 'none is stated'}"
    return f"{rule}; maxbatch plan rl --words prints the same words for a batch of ours"


def _text(value: Stated) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read(path: Path, command: int | None) -> dict[str, Stated]:
    if reading.is_yaml(path):
        return reading.renamed(reading.read_yaml(path), shown_path(path))
    return shell.settings_of(shell.read_command(path, command).arguments, shown_path(path))


def recognised_format(path: Path, command: int | None = None) -> str:
    """Returns the format that shares the most words with a file."""
    words = _read(path, command)
    found: Counter[str] = Counter()
    for word in words:
        found.update(name for name in (*IMPORTED, *ANSWERED) if look_up(word, name) or _is_ours(word, name))
    found["maxtext"] += 3 if "base_config" in words else 0
    for name, signs in (*((name, form.signs) for name, form in FORMATS.items()), *ANSWERED.items()):
        found[name] += 3 * sum(sign in words for sign in signs)
    if not found or not max(found.values()):
        raise ConfigError(f"{shown_path(path)}: no words of {', '.join((*FORMATS, *ANSWERED))}; works: name the format")
    name = max((*IMPORTED, *ANSWERED), key=lambda name: found[name])
    if name in ("hf", "trl"):
        return "trl" if trl.is_of_responses(words) else "hf"
    return "megatron" if name == "nemo" else name


def _is_known(word: str, name: str) -> bool:
    """Returns whether a framework has a word; Megatron-LM's include NeMo's."""
    names = (name, BESIDE.get(name, name))
    return word in FORMATS[name].defaults or _is_ours(word, name) or any(look_up(word, each) for each in names)


def _is_ours(word: str, name: str) -> bool:
    return name == "maxtext" and word in KEYS


def _print(translation: Translation, name: str) -> None:
    """Prints the table: a line per word, and the batch as an equation in both programs' words."""
    rows = [
        (fate.fate, shown(fate.word, _WIDEST), shown(fate.value, _WIDEST), printable(fate.says, keep=""))
        for fate in translation.fates
    ]
    rows.sort(key=lambda row: (MAPPED, NEEDS_YOU, UNSUPPORTED, IGNORED).index(row[0]))
    heads = ("became", FRAMEWORKS[name], "value", "here")
    print("\n".join(folded_rows([heads, *rows], terminal_width())))
    try:
        there, here = FORMATS[name].equation(translation)
    except KeyError:
        return  # the batch is not stated
    print()
    for language, batch in ((FRAMEWORKS[name], there), ("maxbatch", here)):
        print(folded(f"{language}: {printable(batch, keep='')}", 2, terminal_width()))


def _print_batch(config: Config, devices: int) -> None:
    """Prints the batch of the written config on a number of devices, or what `plan` refuses there."""
    try:
        batch = equation(BatchPlan.from_config(config.plan, devices))
    except ConfigError as error:
        note(f"maxbatch plan --devices {devices} refuses it: {error}")
    else:
        print(folded(f"{devices} devices: {batch}", 2, terminal_width()))


def _refuse_unsupported(fates: list[Fate], skip: bool) -> None:
    found = [fate for fate in fates if fate.fate == UNSUPPORTED and (not skip or fate.is_essential)]
    if not found:
        return
    sys.stdout.flush()
    said = first_of([f"{shown(fate.word)}={fate.value} ({fate.says})" for fate in found], 8, ";")
    if skip:
        raise ConfigError(f"not supported, although they state the batch, the length, the data or the model: {said}")
    works = "works: --skip-unsupported, which leaves them out" if not any(f.is_essential for f in found) else ""
    raise ConfigError(f"not supported: {said}" + (f"; {works}" if works else ""))


def written(translation: Translation, source: str) -> str:
    """Returns the config as YAML; raises ConfigError if its values exclude each other."""
    config = load_config(overrides=[f"{name}={text}" for name, text in translation.settings.items()])
    check_dataset(config)  # as plan does
    stated_batches(config.plan)
    if not is_mixture_file(config.dataset_path):  # the file may be on another machine
        read_mixture(config.stream)
    lines = [f"# from {shown(source)} by maxbatch import"]
    for name, key in KEYS.items():
        if name in translation.settings:
            is_text = key.kind in TEXTS and config[name] is not None
            lines.append(f"{name}: {quoted(value_text(config[name])) if is_text else translation.settings[name]}")
    return "\n".join(lines) + "\n"


def _refuse_existing(output: Path) -> None:
    if os.path.lexists(output):
        raise ConfigError(f"--output {shown_path(output)}: is there already; works: --output another.yml")
