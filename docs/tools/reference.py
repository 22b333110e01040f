"""The reference pages of the site, made from the source at build time: a hook of mkdocs.

Config keys come from the typed sections of config/sections.py, metrics from run/folder/metrics_schema.py,
flags from the parsers, exit codes from system/errors.py, and the names of the Python page from
`maxbatch.__all__`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import maxbatch
from maxbatch.cli import main, make_parser
from maxbatch.commands import COMMANDS
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.system.errors import EXIT_CODES

_TOP = Path(__file__).parents[2]
_METRICS = "<!-- the table of metrics -->"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a Markdown table."""
    lines = [list(heads), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def key_facts() -> list[dict[str, Any]]:
    """Returns the facts that `maxbatch config --json` prints of every key."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["config", "--json"]) == 0
    return list(json.loads(printed.getvalue()).values())


def keys_page() -> str:
    """Returns the page of config keys: a table for each section."""
    summary = "Every key with its default, its unit or rule, and MaxText's name for it."
    page = [
        f"# Config keys\n\n{summary} `maxbatch config KEY` prints the same and where a value "
        "comes from.\n"
    ]
    heads = ("key", "default", "rule", "meaning", "in MaxText")
    for section, facts in itertools.groupby(key_facts(), lambda of_key: of_key["section"]):
        page.append(
            f"\n## {section[:1].upper()}{section[1:]}\n\n{table(heads, map(_key_row, facts))}"
        )
    return "".join(page)


def _key_row(facts: dict[str, Any]) -> tuple[str, ...]:
    rule = " or ".join(
        filter(None, (facts["rule"] or facts["type"], "null" if facts["nullable"] else ""))
    )
    named = {facts["key"]: "the same", None: "—"}.get(facts["maxtext"], f"`{facts['maxtext']}`")
    default = f"`{facts['default']}`" if facts["default"] else "empty"
    return f"`{facts['key']}`", default, rule, _plain(facts["comment"]), named


def _plain(comment: str) -> str:
    """Returns the sentence of a key as Markdown in which nothing is markup."""
    return comment.replace("*", r"\*").replace("<", "&lt;").replace("[", r"\[").replace("_", r"\_")


def metrics_table() -> str:
    """Returns the list of all metrics."""

    def row(metric: Metric) -> tuple[str, ...]:
        lines = f"{'every' if metric.lines.every else 'some'}: {', '.join(metric.lines.commands)}"
        return f"`{metric}`", metric.kind, metric.unit, lines, metric.meaning

    return table(("name", "type", "unit", "lines", "meaning"), map(row, Metric))


def commands_page() -> str:
    """Returns the page of commands: the help of each."""
    page = ["# Commands and flags\n\nThe output of `maxbatch COMMAND --help`.\n"]
    for name, command in COMMANDS.items():
        page.append(
            "\n## "
            f"{name}\n\n{command.summary}\n\n```text\n{make_parser(name).format_help().strip()}\n```\n"
        )
    return "".join(page)


_JSON_ERRORS = """
With `--json` a command prints an error twice: as a line on standard error, then as an object on standard output,
`{"error": "per_device_batch_size=0: must be ...", "exit_code": 2}`. `fit` and `compile` add the bytes of a program that
does not fit. `data --first S --count N` prints an object per sample; an error is the last object.
"""


def exit_codes_page() -> str:
    """Returns the page of exit codes."""
    rows = ((str(code), meaning) for code, meaning in EXIT_CODES.items())
    codes = table(("code", "meaning"), rows)
    return f"# Exit codes\n\nEvery command ends with one of these codes.\n\n{codes}{_JSON_ERRORS}"


def python_page() -> str:
    """Returns the page of the Python API: the names that the package exports, from their
    docstrings.
    """
    text = (inspect.getdoc(maxbatch) or "").replace("\n\n    ", "\n\n```python\n", 1)
    summary, _, rest = text.partition("```python\n")
    code, _, after = rest.partition("\n\nImporting")
    code = "\n".join(line.removeprefix("    ") for line in code.splitlines())
    names = sorted(set(maxbatch.__all__) - {"__version__"}, key=str.lower)
    listed = "\n".join(f"::: maxbatch.{name}\n" for name in names)
    return f"# Python\n\n{summary}```python\n{code}\n```\n\nImporting{after}\n\n{listed}"


PAGES = {
    "reference/keys.md": keys_page,
    "reference/commands.md": commands_page,
    "reference/exit-codes.md": exit_codes_page,
    "reference/python.md": python_page,
}


def launch_files() -> Iterator[Path]:
    """Yields the files of launch/, which pages link to."""
    yield from sorted((_TOP / "launch").iterdir())


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages made from the source, and the files that pages link to."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    for path in launch_files():
        files.append(File.generated(config, f"launch/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the table of metrics, and leads links to launch/ to the copies of the site."""
    return markdown.replace(_METRICS, metrics_table()).replace("](../launch/", "](launch/")
