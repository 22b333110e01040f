"""`maxbatch config`: every key with its value, its unit or rule, and the layer the value comes from. Imports no JAX."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from maxbatch.commands.arguments import add_config, config_arguments
from maxbatch.config.keys import Key, names_of
from maxbatch.config.loading import Origin, Resolved, configs_dir, keys, nearest_key, resolve
from maxbatch.config.values import NUMBERS, TEXTS, shown
from maxbatch.system.errors import ConfigError
from maxbatch.system.terminal import PipeConsole

_PIPE_WIDTH, _SETTING_WIDTH = 200, 36
_FILES = ("config file", "base_config")
_LAYERS = {"config file": "the config file", "preset": "the preset", "override": "an override"}
_KINDS = {"bool": "true or false", "choice": "a choice", "text": "text", "path": "a path of this machine",
          "paths": "paths, joined by ';'"}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `maxbatch config` takes."""
    add_config(parser, "KEY")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints every key of a config, or all that is known of one; returns the exit code.

    Raises:
      ConfigError: a config that cannot be used, an unknown key, or more than one.
    """
    asked = [text for text in args.config if text in keys()]
    if len(asked) > 1:
        raise ConfigError(f"{' '.join(asked)}: one key at a time; works: maxbatch config {asked[0]}")
    args.config = [text for text in args.config if text not in keys()]
    path, overrides = config_arguments(args)
    if path is not None and not os.path.exists(path) and not re.search(r"[/.]", path):
        raise ConfigError(f"{shown(path)}: unknown key; nearest: {nearest_key(path)}")
    resolved = resolve(path, overrides)
    sections = _sections()
    if args.json:
        comments = {name: comment for section in sections.values() for name, comment in section.items()}
        facts = {name: _facts(key, resolved, comments[name]) for name, key in keys().items()}
        print(json.dumps(facts[asked[0]] if asked else facts, indent=2))
    elif asked:
        comment = next(section[asked[0]] for section in sections.values() if asked[0] in section)
        _print_key(_console(), keys()[asked[0]], resolved, comment)
    else:
        _print_all(_console(), resolved, sections)
    return 0


def _console() -> Console:
    console = PipeConsole(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def _sections() -> dict[str, dict[str, str]]:
    """Returns the headings of base.yml, and under each its keys with their comments."""
    sections: dict[str, dict[str, str]] = {}
    for line in (configs_dir() / "base.yml").read_text(encoding="utf-8").splitlines():
        heading, key = re.match(r"# --- (.*?)(:.*)? -+$", line), re.match(r"(\w+):.*?\s# (.*)", line)
        if heading:
            section = sections.setdefault(heading[1], {})
        elif key:
            section[key[1]] = key[2]
    return sections


def _print_all(console: Console, resolved: Resolved, sections: dict[str, dict[str, str]]) -> None:
    """Prints a line per key: value, layer, and unit and rule, of which a narrow terminal shows the beginning."""
    width = max(len(f"{name}: {_text(key, resolved)}") for name, key in keys().items())
    width = min(width, _SETTING_WIDTH)
    for heading, comments in sections.items():
        console.print(f"# {heading}", style="bold")
        for name, comment in comments.items():
            key, origin = keys()[name], resolved.origins[name]
            layer = Path(origin.where).name if origin.layer in _FILES else origin.layer
            rule = ", ".join(filter(None, (key.unit, _short_rule(key)))) or comment
            if origin.displaced_by:
                rule = f"displaced by {origin.displaced_by}"
            line = f"{_cropped(f'{name}: {_text(key, resolved)}', width)}  {_cropped(layer, 12)}  {rule}"
            style = "dim" if origin.layer == "base.yml" else ""
            console.print(line, style=style, no_wrap=True, overflow="ellipsis", crop=True)
        console.print()


def _cropped(text: str, width: int) -> str:
    return f"{text:<{width}}" if len(text) <= width else f"{text[: width - 1]}…"


def _text(key: Key, resolved: Resolved) -> str:
    """Returns the value of a key as a person would write it."""
    if resolved.origins[key.name] == Origin("base.yml", resolved.origins[key.name].where):
        text = key.default
    else:
        text = key.write(resolved.config[key.name])
    is_plain = key.kind not in TEXTS or (text and text == text.strip() and text.isprintable())
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _short_rule(key: Key) -> str:
    if key.kind == "bool":
        return "true | false"
    rule = " | ".join(key.choices) or ("" if key.bounds is None else key.bounds.short())
    return f"{rule} | null" if rule and key.nullable else rule


def _print_key(console: Console, key: Key, resolved: Resolved, comment: str) -> None:
    facts = _facts(key, resolved, comment)
    console.print(f"{key.name}: {_text(key, resolved)}", style="bold")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "meaning": comment,
        "from": _said(resolved.origins[key.name]),
        "default": key.default or "''",
        "type": facts["type"],
        "rule": facts["rule"],
        "unit": key.unit,
        "null": "allowed" if key.nullable else "not allowed",
        "MaxText": key.maxtext_name or "no such key",
        "fixes": ", ".join(f"the {what}" for what in key.fixed)
        or "nothing: it may change when a run is resumed",
        "states": f"{key.part.value}, with {', '.join(names_of(key.part))}" if key.part else "",
    }
    for name, text in rows.items():
        if text:
            table.add_row(f"  {name}", text)
    console.print(table)


def _said(origin: Origin) -> str:
    where = origin.where if origin.layer in _FILES else Path(origin.where).name
    where = f" ({where})" if origin.where and origin.layer != "base.yml" else ""
    displaced = f"; displaced by {origin.displaced_by}, which is stated there" if origin.displaced_by else ""
    return f"{_LAYERS.get(origin.layer, origin.layer)}{where}{displaced}"


def _facts(key: Key, resolved: Resolved, comment: str) -> dict[str, Any]:
    """Returns all that is known of a key; JSON."""
    value, origin = resolved.config[key.name], resolved.origins[key.name]
    return {
        "key": key.name,
        "value": value if isinstance(value, bool | int | float | str | None) else str(value),
        "layer": origin.layer,
        "where": origin.where or None,
        "displaced_by": origin.displaced_by or None,
        "default": key.default,
        "type": _KINDS.get(key.kind) or NUMBERS[key.kind][1],
        "rule": ", ".join(key.choices) or str(key.bounds or ""),
        "bounds": {k: v for k, v in dataclasses.asdict(key.bounds).items() if v is not None}
        if key.bounds
        else None,
        "choices": list(key.choices),
        "unit": key.unit,
        "nullable": key.nullable,
        "maxtext": key.maxtext_name,
        "fixes": list(key.fixed),
        "part": key.part.value if key.part else None,
        "comment": comment,
    }
