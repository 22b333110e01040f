"""The code blocks of README and of the pages in docs/, and the maxbatch commands in them.

A block that cannot run everywhere says why in its first line, which readers see: `# needs a TPU`. A
block with a title is a file that its page's commands read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(TOP)) for path in (TOP / "docs").rglob("*.md")))
REASONS = (
    "a model",
    "a TPU",
    "the TPU compiler",
    "a GPU",
    "a bucket",
    "a cluster",
    "lm-eval",
    "Megatron-LM's files",
    "a MaxText run",
    "your records",
)
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str  # the name of the file that it shows, or ""
    text: str

    @property
    def reason(self) -> str:
        """What it needs that a test does not have, or ""."""
        needs = re.match(r"# needs (.+)", self.text)
        return needs[1] if needs else ""


class Command(NamedTuple):
    """A maxbatch command of a page, and the output that the page shows of it."""

    arguments: tuple[str, ...]  # without the word maxbatch
    shown: str = ""
    reason: str = ""  # why it is not run, or ""

    @property
    def name(self) -> str:
        return self.arguments[0]

    @property
    def config(self) -> list[str]:
        """The arguments that state a config."""
        return [
            text
            for text in self.arguments[1:]
            if re.match(r"[a-z]\w*=", text) or text.endswith(".yml")
        ]


def text_of(page: str) -> str:
    return (TOP / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    return [Block(language, title, text) for language, title, text in _BLOCK.findall(text_of(page))]


def commands_of(page: str) -> list[Command]:
    return [command for block in blocks_of(page) for command in commands_in(block)]


def commands_in(block: Block) -> Iterator[Command]:
    if block.language == "console":
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            line, _, shown = part.partition("\n")
            yield from (
                command._replace(shown=shown, reason=block.reason) for command in _in_line(line)
            )
    if block.language == "sh" and not block.title:
        for line in block.text.replace("\\\n", " ").splitlines():
            yield from (command._replace(reason=block.reason) for command in _in_line(line))


def _in_line(line: str) -> Iterator[Command]:
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word != "&&":
            words.append(word)
            continue
        if words[:1] == ["maxbatch"]:
            yield Command(tuple(words[1:]))
        words = []


def is_shown(shown: str, printed: str) -> bool:
    """Whether a page's output matches the printed one; `...` matches any lines, or the rest of a
    line.
    """
    lines = [
        "(?:.*\n)*?" if line == "..." else _pattern(line) for line in shown.rstrip().splitlines()
    ]
    clean = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    return re.fullmatch("".join(lines), clean) is not None


def _pattern(line: str) -> str:
    start, dots, _ = line.rpartition("...") if line.endswith("...") else (line, "", "")
    return re.escape(start) + (".*\n" if dots else "\n")
