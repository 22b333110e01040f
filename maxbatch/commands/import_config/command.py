"""`maxbatch import`: another program's config as one of ours, and a table of what became of every word."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from maxbatch.commands.arguments import local_path, note
from maxbatch.commands.import_config import maxtext, megatron, reading, shell, trainers
from maxbatch.commands.import_config.translation import UNSUPPORTED, Fate, Stated, Translation
from maxbatch.config.loading import keys, load_config
from maxbatch.config.unknown import IMPORTED
from maxbatch.config.values import TEXTS, shown, shown_path
from maxbatch.config.words import FRAMEWORKS, look_up
from maxbatch.system.errors import ConfigError

_WIDEST = 44  # columns of a word or a value


class _Format(NamedTuple):
    framework: str
    defaults: Mapping[str, str]
    translate: Callable[[Translation], None]
    equation: Callable[[Translation], tuple[str, str]]


FORMATS = {
    "maxtext": _Format("maxtext", maxtext.DEFAULTS, maxtext.translate, maxtext.equation),
    "hf": _Format("hf", trainers.HF_DEFAULTS, trainers.hf, lambda t: trainers.per_device_equation(
        t, "per_device_train_batch_size", "gradient_accumulation_steps")),
    "deepspeed": _Format("deepspeed", trainers.DEEPSPEED_DEFAULTS, trainers.deepspeed, lambda t:
        trainers.per_device_equation(t, "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")),
    "axolotl": _Format("axolotl", trainers.AXOLOTL_DEFAULTS, trainers.axolotl, lambda t:
        trainers.per_device_equation(t, "micro_batch_size", "gradient_accumulation_steps")),
    "megatron": _Format("megatron", megatron.DEFAULTS, megatron.translate, megatron.equation),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `maxbatch import`."""
    formats = (*FORMATS, "nemo", "auto")
    parser.add_argument("format", metavar="FORMAT", help=f"whose config: {', '.join(formats)}")
    parser.add_argument("file", metavar="FILE", type=local_path, help="YAML, JSON, key=value lines or a shell recipe")
    output = "where to write the config (default maxbatch.yml); never over a file"
    parser.add_argument("--output", metavar="FILE", type=local_path, default="maxbatch.yml", help=output)
    skip = "write it although some words are not supported; never without one that says the batch or the data"
    parser.add_argument("--skip-unsupported", action="store_true", help=skip)


def run(args: argparse.Namespace) -> int:
    """Translates a config, prints what became of its words and writes it; returns the exit code."""
    path, output = Path(args.file), Path(args.output)
    if args.format not in (*FORMATS, "nemo", "auto"):
        works = f"works: maxbatch import auto {shown_path(path)}"
        raise ConfigError(f"{shown(args.format)}: must be one of {', '.join(FORMATS)}, nemo, auto; {works}")
    if os.path.lexists(output):
        raise ConfigError(f"--output {shown_path(output)}: is there already; works: --output another.yml")
    reading.text_of(path)
    name = _recognised(path) if args.format == "auto" else "megatron" if args.format == "nemo" else args.format
    translation, notes = translated(name, path)
    _print(translation, name)
    for line in notes:
        note(line)
    _refuse_unsupported(translation.fates, args.skip_unsupported)
    text = written(translation, f"{FRAMEWORKS[name]}'s {path.name}")
    _write(output, text)
    note(f"written to {output}; next: maxbatch plan {output} --devices N")
    return 0


def translated(name: str, path: Path) -> tuple[Translation, list[str]]:
    """Returns a file in our words, and notes on how it was read."""
    form = FORMATS[name]
    if name == "maxtext":
        words, notes = maxtext.read(path)
    else:
        words, notes = _read(path, name)
    if not words:
        raise ConfigError(f"{shown_path(path)}: states nothing that {FRAMEWORKS[name]} knows")
    translation = Translation(words, form.defaults, name)
    form.translate(translation)
    translation.finish()
    return translation, notes


def _read(path: Path, name: str) -> tuple[dict[str, Stated], list[str]]:
    if reading.is_yaml(path):
        words = reading.read_yaml(path)
        return {word.replace("-", "_"): value for word, value in words.items()}, []
    line, count = shell.read_line(path)
    notes = [f"{count} commands train in {shown_path(path)}; this is the first"] if count > 1 else []
    return shell.settings_of(line), notes


def _recognised(path: Path) -> str:
    """Returns the format most of whose words a file has."""
    words, _ = _read(path, "")
    count: Counter[str] = Counter()
    for word in words:
        count.update(name for name in IMPORTED if look_up(word, name) or _is_ours(word, name))
    count["maxtext"] += 3 if "base_config" in words else 0
    for name, signs in _SIGNS.items():
        count[name] += 3 * sum(sign in words for sign in signs)
    if not count or not max(count.values()):
        raise ConfigError(f"{shown_path(path)}: no words of {', '.join(FORMATS)}; works: name the format")
    name = max(IMPORTED, key=lambda name: count[name])
    return "megatron" if name == "nemo" else name


_SIGNS = {
    "hf": ("per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type"),
    "deepspeed": ("train_micro_batch_size_per_gpu", "zero_optimization.stage", "train_batch_size"),
    "axolotl": ("base_model", "datasets", "sequence_len", "sample_packing"),
    "megatron": ("train_iters", "tensor_model_parallel_size", "lr_decay_style", "trainer.max_steps"),
    "maxtext": ("per_device_batch_size", "base_emb_dim", "base_output_directory"),
}  # fmt: skip


def _is_ours(word: str, name: str) -> bool:
    return name == "maxtext" and word in keys()


def _print(translation: Translation, name: str) -> None:
    """Prints the table: a line for each word, and the batch as an equation in both languages."""
    rows = [(fate.fate, fate.word, shown(fate.value, _WIDEST), fate.says) for fate in translation.fates]
    rows.sort(key=lambda row: ("mapped", "not supported", "ignored").index(row[0]))
    heads = ("became", FRAMEWORKS[name], "value", "here")
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(3)]
    for row in (heads, *rows):
        print("  ".join((*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[3])).rstrip())
    try:
        there, here = FORMATS[name].equation(translation)
    except KeyError:
        return  # the batch is not stated
    print(f"\n{FRAMEWORKS[name]}: {there}\nmaxbatch: {here}")


def _refuse_unsupported(fates: list[Fate], skip: bool) -> None:
    found = [fate for fate in fates if fate.fate == UNSUPPORTED and (not skip or fate.changes_data)]
    if not found:
        return
    sys.stdout.flush()
    said = "; ".join(f"{shown(fate.word)}={fate.value} ({fate.says})" for fate in found[:8])
    rest = f"; and {len(found) - 8} more" if len(found) > 8 else ""
    if skip:
        raise ConfigError(f"not supported, and they say the batch or the data: {said}{rest}")
    works = "works: --skip-unsupported, which leaves them out" if not any(f.changes_data for f in found) else ""
    raise ConfigError(f"not supported: {said}{rest}" + (f"; {works}" if works else ""))


def written(translation: Translation, source: str) -> str:
    """Returns the config as YAML; raises ConfigError where its values do not go together."""
    lines = [f"# from {source} by maxbatch import"]
    for name, key in keys().items():
        if name in translation.settings:
            text = translation.settings[name]
            quoted = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' if key.kind in TEXTS and text else text
            lines.append(f"{name}: {quoted}")
    load_config(overrides=[f"{name}={text}" for name, text in translation.settings.items()])
    return "\n".join(lines) + "\n"


def _write(output: Path, text: str) -> None:
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--output {shown_path(output)}: cannot be written ({error.strerror})") from None
