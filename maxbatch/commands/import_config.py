"""`maxbatch import`: converts another program's config, and prints the fate of every setting."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from maxbatch.around.importers import (
    answered,
    llamafactory,
    maxtext_files,
    megatron,
    python_file,
    reading,
    shell,
    trl,
)
from maxbatch.around.importers.python_file import CLASS
from maxbatch.around.importers.table import Format
from maxbatch.around.importers.translation import (
    BESIDE,
    IGNORED,
    MAPPED,
    NEEDS_YOU,
    UNSUPPORTED,
    Fate,
    Stated,
    Translation,
)
from maxbatch.around.words import FRAMEWORKS, look_up
from maxbatch.commands.arguments import check_at_most, count, local_path
from maxbatch.config.config import Config
from maxbatch.config.loading import load_config
from maxbatch.config.paths import is_mixture_file
from maxbatch.config.rules import check_dataset
from maxbatch.config.sections import KEYS
from maxbatch.config.values import TEXTS, first_of, shown, shown_path, value_text
from maxbatch.config.yaml_file import quoted
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.mesh_shape import MOST_DEVICES
from maxbatch.plan.stages import stated_batches
from maxbatch.plan.view import equation
from maxbatch.run.folder.foreign import refuse_foreign
from maxbatch.system.errors import ConfigError
from maxbatch.system.registry import Table, load, names
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.bounded import read_json
from maxbatch.system.storage.storage import is_remote
from maxbatch.system.terminal.folding import folded, folded_rows, printable, terminal_width
from maxbatch.system.terminal.warning import note

_WIDEST = 44  # columns of a word or a value


def _format(name: str) -> Format:
    """Loads a format of `Table.IMPORTERS`."""
    form = load(Table.IMPORTERS, name)
    assert isinstance(form, Format), f"{name} is a format of configs"
    return form


FORMATS: Mapping[str, Format] = {name: _format(name) for name in names(Table.IMPORTERS)}

_NAMES = (*FORMATS, *answered.SIGNS, "auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", metavar="FORMAT", help=f"whose config: {', '.join(_NAMES)}")
    parser.add_argument(
        "file",
        metavar="FILE",
        type=local_path,
        help="YAML, JSON, key=value lines or a shell recipe",
    )
    output = "where to write the config (default maxbatch.yml); never over a file"
    parser.add_argument(
        "--output", metavar="FILE", type=local_path, default="maxbatch.yml", help=output
    )
    skip = (
        "leave out unsupported words, unless one states the batch, the length, the data or the "
        "model"
    )
    number = "number of the command to read, from 1, if several in a shell file train"
    parser.add_argument("--command", metavar="N", type=count, help=number)
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
    _check_is_file(args.file)
    reading.text_of(path)
    if args.command is not None and reading.is_yaml(path):
        raise ConfigError(
            f"--command {args.command}: is for shell files, and {shown_path(path)} is YAML or JSON"
        )
    if args.devices is not None:
        check_at_most("--devices", args.devices, MOST_DEVICES)
    name = recognised_format(path, args.command) if args.format == "auto" else args.format
    translation, notes = translated(name, path, args.command, args.devices)
    name = translation.framework
    _print(translation, name)
    for line in notes:
        note(line)
    _refuse_unsupported(translation.fates, args.skip_unsupported)
    text = written(translation, f"{FORMATS[name].program}'s {path.name}")
    _refuse_existing(output)
    write_atomically(output, text)
    if args.devices is not None:
        _print_batch(load_config(output), args.devices)
    waits = sum(fate.fate == NEEDS_YOU for fate in translation.fates)
    if waits:
        rows = f"{waits} {'rows' if waits > 1 else 'row'}"
        note(
            f"{rows} of the table need{'s' * (waits == 1)} you before maxbatch train: a step, or a "
            "default that differs"
        )
    _note_foreign(output)
    note(f"written to {output}; next: maxbatch plan {shlex.quote(str(output))} --devices N")
    return 0


def _note_foreign(output: Path) -> None:
    """Prints that the written config's `run_dir`, on this machine, holds another program's
    checkpoints, if it does.
    """
    try:
        run_dir = load_config(output).run_dir
    except ConfigError:  # it waits for a step of the user's
        return
    if is_remote(run_dir):
        return
    try:
        refuse_foreign(run_dir)
    except ConfigError as error:
        note(str(error))


def translated(
    name: str, path: Path, number: int | None = None, devices: int | None = None
) -> tuple[Translation, list[str]]:
    """Translates a file of a format, with notes on its reading; `hf` reads GRPOConfig as `trl`
    does.

    `number` is that of the command in a shell file, from 1; None: the only one.
    """
    words, notes = (
        maxtext_files.read(path, number) if name == "maxtext" else (_read(path, number), [])
    )
    if name == "hf" and trl.is_of_responses(words):
        name = "trl"
    if name == "megatron" and megatron.is_of_nemo(words):
        name = "nemo"
    words |= _splits_of_deepspeed(words, path)
    if name in answered.SIGNS:
        raise ConfigError(f"{shown_path(path)}: {answered.answer(name, words)}")
    form = FORMATS[name]
    if name == "llamafactory" and llamafactory.is_v1(words):
        form = llamafactory.V1
    if not any(_is_known(word, name) for word in words):
        raise ConfigError(f"{shown_path(path)}: states nothing that {FORMATS[name].program} knows")
    counts_processes = (
        name == "trl" and not reading.is_yaml(path) and not python_file.is_python(path)
    )
    if counts_processes and (
        processes := shell.read_command(path, number).processes(shown_path(path))
    ):
        words.setdefault(trl.PROCESSES, str(processes))
    translation = Translation(words, form.defaults, name, devices)
    if name == "llamafactory":
        translation.described = _described_data(words, path)
    form.translate(translation)
    translation.finish()
    return translation, notes


_SPLITS_OF_ACCELERATE = "parallelism_config"  # begins the words of its flags and of its file


def _splits_of_launcher(run: shell.ShellCommand, path: Path) -> dict[str, Stated]:
    """Returns the devices of a replica that `accelerate launch` states, by flags or in a file that
    is here.
    """
    flags = shell.settings_of(run.start[:-1], shown_path(path))
    named = flags.get("config_file")
    file = path.parent / named if isinstance(named, str) else None
    of_file = (
        reading.read_yaml(file)
        if file is not None and file.is_file() and reading.is_yaml(file)
        else {}
    )
    return {
        word: value
        for word, value in (of_file | flags).items()
        if word.startswith(_SPLITS_OF_ACCELERATE)
    }


_FILE_OF_TORCHTITAN = "job.config_file"  # its flags take precedence over it
_SPLITS_OF_DEEPSPEED = ("tensor_parallel.autotp_size", "sequence_parallel_size")


def _splits_of_deepspeed(words: Mapping[str, Stated], path: Path) -> dict[str, Stated]:
    """Returns the devices of a replica that a DeepSpeed file states which the config names, if that
    file is here.
    """
    named = words.get("deepspeed")
    if not isinstance(named, str) or not named.endswith(".json"):
        return {}
    file = next((place for place in (path.parent / named, Path(named)) if place.is_file()), None)
    of_file = {} if file is None else reading.read_yaml(file)
    return {f"deepspeed.{name}": of_file[name] for name in _SPLITS_OF_DEEPSPEED if name in of_file}


def _described_data(words: Mapping[str, Stated], path: Path) -> Mapping[str, object]:
    """Returns the data sets that LLaMA-Factory's dataset_info.json describes, paths and all, if
    that file is here.
    """
    folder = words.get("dataset_dir", "data")
    if not isinstance(folder, str):
        return {}
    file = next(
        (p for p in (path.parent / folder, Path(folder)) if (p / "dataset_info.json").is_file()),
        None,
    )
    if file is None:
        return {}
    described = read_json(file / "dataset_info.json", shown_path(file / "dataset_info.json"))
    sets = described.items() if isinstance(described, dict) else ()
    return {
        name: {**entry, "path": str(file / entry["file_name"])}
        for name, entry in sets
        if isinstance(entry, dict) and isinstance(entry.get("file_name"), str)
    }


def _read(path: Path, number: int | None) -> dict[str, Stated]:
    if python_file.is_python(path):
        return python_file.read_python(path, number)
    if reading.is_yaml(path):
        return reading.renamed(reading.read_yaml(path), shown_path(path))
    run = shell.read_command(path, number)
    words = _splits_of_launcher(run, path) | shell.settings_of(run.arguments, shown_path(path))
    named = words.get(_FILE_OF_TORCHTITAN)
    if isinstance(named, str) and (path.parent / named).is_file():
        words.pop(_FILE_OF_TORCHTITAN)
        words = {
            **reading.renamed(reading.read_yaml(path.parent / named), shown_path(path)),
            **words,
        }
    return words


# Programs that share words with others, which have words of their own beside these.
_EXTENDED: Mapping[str, tuple[str, ...]] = {
    "hf": ("llamafactory", "axolotl", "openrlhf", "mlx"),
    "megatron": ("nemo", "slime", "nemo_rl"),
    "deepspeed": ("openrlhf",),
    "nemo": ("levanter",),
}


def recognised_format(path: Path, number: int | None = None) -> str:
    """Returns the program whose files alone have the words of a file.

    Raises:
      ConfigError: no program's words are in it, or those of several.
    """
    words = _read(path, number)
    signs = {name: answered.signs_in(words, name) for name in answered.SIGNS}
    signs |= {name: sum(sign in words for sign in form.signs) for name, form in FORMATS.items()}
    signs["maxtext"] += "base_config" in words
    signs["hf"] += CLASS in words
    for name, others in _EXTENDED.items():
        if any(signs[other] for other in others):
            signs[name] = 0
    having = {word: [name for name in signs if _has_word(word, name)] for word in words}
    shared = Counter(name for names in having.values() for name in names)
    alone = Counter(names[0] for names in having.values() if len(names) == 1)
    most = signs if any(signs.values()) else alone
    candidates = sorted(
        (name for name in most if most[name]), key=lambda name: (-most[name], -shared[name])
    )
    if not candidates and not shared:
        raise ConfigError(
            f"{shown_path(path)}: no words of {', '.join(FORMATS)}; works: name the format"
        )
    if not candidates or (
        len(candidates) > 1
        and (most[candidates[1]], shared[candidates[1]])
        == (most[candidates[0]], shared[candidates[0]])
    ):
        named = candidates or [
            name for name, count in shared.items() if count == max(shared.values())
        ]
        whose = first_of([_program(name) for name in named], 8)
        works = f"works: maxbatch import {named[0]} {shlex.quote(str(path))}"
        raise ConfigError(
            f"{shown_path(path)}: has no words that one program alone has, but those of {whose}; "
            f"{works}"
        )
    name = candidates[0]
    if name in ("hf", "trl"):
        return "trl" if trl.is_of_responses(words) else "hf"
    return "megatron" if name == "nemo" else name


def _program(name: str) -> str:
    """Returns the name of the program of a format, or of a trainer without an importer."""
    return FORMATS[name].program if name in FORMATS else FRAMEWORKS[name]


def _has_word(word: str, name: str) -> bool:
    row = look_up(word, name)
    return (row is not None and "*" not in row.word) or _is_ours(word, name)


def _is_known(word: str, name: str) -> bool:
    """Returns whether a framework has a word; Megatron-LM's include NeMo's."""
    names = (name, BESIDE.get(name, name))
    return (
        word in FORMATS[name].defaults
        or _is_ours(word, name)
        or any(look_up(word, each) for each in names)
    )


def _is_ours(word: str, name: str) -> bool:
    return name == "maxtext" and word in KEYS


def _print(translation: Translation, name: str) -> None:
    """Prints the table: a line per word, and the batch as an equation in both programs' words."""
    rows = [
        (
            fate.fate,
            shown(fate.word, _WIDEST),
            shown(fate.value, _WIDEST),
            printable(fate.says, keep=""),
        )
        for fate in translation.fates
    ]
    rows.sort(key=lambda row: (MAPPED, NEEDS_YOU, UNSUPPORTED, IGNORED).index(row[0]))
    heads = ("became", FORMATS[name].program, "value", "here")
    print("\n".join(folded_rows([heads, *rows], terminal_width())))
    try:
        there, here = FORMATS[name].equation(translation)
    except KeyError:
        return  # the batch is not stated
    print()
    for language, batch in ((FORMATS[name].program, there), ("maxbatch", here)):
        print(folded(f"{language}: {printable(batch, keep='')}", 2, terminal_width()))


def _print_batch(config: Config, devices: int) -> None:
    """Prints the batch of the written config on a number of devices, or what `plan` refuses
    there.
    """
    try:
        batch = equation(BatchPlan.from_config(config.plan, devices))
    except ConfigError as error:
        note(f"maxbatch plan --devices {devices} refuses it: {error}")
    else:
        print(folded(f"{devices} devices: {batch}", 2, terminal_width()))


def _refuse_unsupported(fates: list[Fate], skip: bool) -> None:
    refused = [
        fate for fate in fates if fate.fate == UNSUPPORTED and (not skip or fate.is_essential)
    ]
    if not refused:
        return
    sys.stdout.flush()
    said = first_of([f"{shown(fate.word)}={fate.value} ({fate.says})" for fate in refused], 8, ";")
    if skip:
        raise ConfigError(
            "not supported, although they state the batch, the length, the data or the model: "
            f"{said}"
        )
    works = (
        "works: --skip-unsupported, which leaves them out"
        if not any(f.is_essential for f in refused)
        else ""
    )
    raise ConfigError(f"not supported: {said}" + (f"; {works}" if works else ""))


def written(translation: Translation, source: str) -> str:
    """Returns the config as YAML; raises ConfigError if its values exclude each other."""
    config = load_config(
        overrides=[f"{name}={text}" for name, text in translation.settings.items()]
    )
    check_dataset(config)  # as plan does
    stated_batches(config.plan)
    # the file may be on another machine
    if not is_mixture_file(config.dataset_path, config.dataset_type):
        read_mixture(config.stream)
    lines = [f"# from {shown(source)} by maxbatch import"]
    for name, key in KEYS.items():
        if name in translation.settings:
            is_text = key.kind in TEXTS and config[name] is not None
            lines.append(
                f"{name}: "
                f"{quoted(value_text(config[name])) if is_text else translation.settings[name]}"
            )
    return "\n".join(lines) + "\n"


def _check_is_file(name: str) -> None:
    """Raises ConfigError for standard input, and for a command in place of the file that has it."""
    if name == "-":
        raise ConfigError(
            "-: standard input is not read; write it to a file, such as run.sh, and name that"
        )
    if (
        " " in name
        and not os.path.lexists(name)
        and re.search(r"(^| )(python[\d.]*|torchrun|deepspeed|trl)( |$)", name)
    ):
        raise ConfigError(
            f"{shown(name)}: is a command; write it to a file, such as run.sh, and name that"
        )


def _refuse_existing(output: Path) -> None:
    if os.path.lexists(output):
        raise ConfigError(
            f"--output {shown_path(output)}: is there already; works: --output another.yml"
        )
