"""`maxbatch config`: every key with its value, its unit or rule, and the layer the value comes
from. Imports no JAX.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from maxbatch.commands.arguments import add_config, config_arguments
from maxbatch.config.keys import Fixes, Key
from maxbatch.config.loading import Setting, find_config, resolve
from maxbatch.config.sections import KEYS, SECTIONS, ModelConfig, names_of
from maxbatch.config.unknown import hint
from maxbatch.config.values import NUMBERS, TEXTS, shown, value_text
from maxbatch.families.matrices import model_size
from maxbatch.system.errors import ConfigError
from maxbatch.system.terminal.folding import folded
from maxbatch.system.terminal.terminal import PipeConsole

_PIPE_WIDTH = 1_000_000  # only a terminal cuts lines
_LEAST_WIDTH = 32  # of the unit and rule
_FILES = ("config file", "base_config")
_MODEL = "model"  # the heading of the model's keys
_KINDS = {
    "bool": "true or false",
    "choice": "a choice",
    "choices": "one or more choices",
    "text": "text",
    "path": "a path",
    "local": "a local path",
    "paths": "data paths",
    "fields": "names of fields by ours",
}
_FIXED = {
    Fixes.BATCH: "batch",
    Fixes.STREAM: "stream",
    Fixes.PROMPTS: "prompts",
    Fixes.FORM: "model",
    Fixes.STATE: "training state",
    Fixes.PROGRAM: "compiled programs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "KEY")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints every key of a config, or all facts about one; returns the exit code."""
    asked = [text for text in args.config if text in KEYS]
    if len(asked) > 1:
        raise ConfigError(
            f"{' '.join(asked)}: one key at a time; works: maxbatch config {asked[0]}"
        )
    args.config = [text for text in args.config if text not in KEYS]
    path, overrides = config_arguments(args)
    if (
        path is not None
        and not os.path.exists(str(find_config(path)))
        and not re.search(r"[/.]", path)
    ):
        raise ConfigError(f"{shown(path)}: unknown key{hint(path)}")
    settings = resolve(path, overrides)
    sections = {
        (heading := section.heading().partition(":")[0]): [
            _facts(KEYS[key.name], settings[key.name]) | {"section": heading}
            for key in section.declared
        ]
        for section in SECTIONS
    }
    facts = {facts["key"]: facts for section in sections.values() for facts in section}
    if args.json:
        print(json.dumps(facts[asked[0]] if asked else facts, indent=2))
    elif asked:
        _print_key(_console(), facts[asked[0]])
    else:
        model = ModelConfig.of({name: facts["value"] for name, facts in facts.items()})
        _print_all(_console(), sections, model_size(model))
    return 0


def _console() -> Console:
    console = PipeConsole(highlight=False, markup=False)
    if not console.is_terminal:
        columns = os.environ.get("COLUMNS", "")
        console.width = int(columns) if columns.isdigit() else _PIPE_WIDTH
    return console


def _print_all(
    console: Console, sections: dict[str, list[dict[str, Any]]], parameters: int
) -> None:
    """Prints a line per key: value, layer, and unit and rule, which a narrow terminal folds."""
    for heading, keys_below in sections.items():
        size = f": {parameters:,} parameters" if heading == _MODEL else ""
        console.print(f"# {heading}{size}", style="bold")
        for facts in keys_below:
            layer = Path(facts["where"]).name if facts["layer"] in _FILES else facts["layer"]
            rule = (
                f"{facts['rule']} | null" if facts["rule"] and facts["nullable"] else facts["rule"]
            )
            said = ", ".join(filter(None, (facts["unit"], rule))) or facts["comment"]
            if facts["displaced_by"]:
                said = f"displaced by {facts['displaced_by']}"
            setting = f"{facts['key']}: {facts['text']}"
            style = "dim" if layer == "base.yml" else ""
            head = f"{setting:<36}  {layer:<12}  "
            indent = min(len(head), max(4, console.width - _LEAST_WIDTH))
            console.print(
                folded(f"{head}{said}", indent, console.width), style=style, soft_wrap=True
            )
        console.print()


def _print_key(console: Console, facts: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    console.print(f"{facts['key']}: {facts['text']}", style="bold")
    where = f" ({facts['where']})" if facts["where"] else ""
    by = (
        f"; displaced by {facts['displaced_by']}, which is stated there"
        if facts["displaced_by"]
        else ""
    )
    said = {
        "meaning": facts["comment"],
        "from": f"{facts['layer']}{where}{by}",
        "default": facts["default"] or '""',
        "type": facts["type"],
        "rule": facts["rule"],
        "unit": facts["unit"],
        "null": "allowed" if facts["nullable"] else "not allowed",
        "MaxText": facts["maxtext"] or "no such key",
        "fixes": ", ".join(f"the {what}" for what in facts["fixes"])
        or "nothing: it may change on a resume",
        "states": facts["part"],
    }
    for label, text in said.items():
        if text:
            table.add_row(f"  {label}", text)
    console.print(table)


def _facts(key: Key, setting: Setting) -> dict[str, Any]:
    """Returns all facts about a key, as JSON."""
    value = setting.value
    return {
        "key": key.name,
        "value": value if isinstance(value, bool | int | float | str | None) else str(value),
        "text": _text(key, setting),
        "layer": setting.layer,
        "where": None if setting.layer == "base.yml" else setting.where or None,
        "displaced_by": setting.displaced_by or None,
        "default": key.default,
        "type": _KINDS.get(key.kind) or NUMBERS[key.kind][1],
        "rule": " | ".join(key.choices) or str(key.bounds or ""),
        "unit": key.unit,
        "nullable": key.nullable,
        "maxtext": key.maxtext_name,
        "fixes": [word for what, word in _FIXED.items() if key.fixes & what],
        "part": f"{key.part.value}, with {', '.join(names_of(key.part))}" if key.part else None,
        "comment": key.sentence,
    }


def _text(key: Key, setting: Setting) -> str:
    is_default = setting.layer == "base.yml" and not setting.displaced_by
    text = key.default if is_default else value_text(setting.value)
    is_plain = key.kind not in TEXTS or (text and text == text.strip() and text.isprintable())
    return text if is_plain else json.dumps(text, ensure_ascii=False)
