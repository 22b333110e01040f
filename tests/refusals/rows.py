"""Reads the rows of `table.txt`: what is typed, and all that standard error says.

A line of the table begins with its mark:

    == PROMISE        the rows below it keep the promise
    @ NAME: TEXT      the file NAME holds TEXT (\\n begins a line), until the next promise
    & NAME            what `given.py` prepares under that name is there, until the next promise
    + WORDS           the words in front of those that are typed, until the next promise
    $ WORDS           what is typed: settings and a machine, or a command, or variables before both
    $$ WORDS          a command that is a process of its own
      LINE            a line of standard error; the last is the error, without `maxbatch: error: `
    # TEXT            the module that the rows below it are about

FOLDER is the folder that the words are typed in; … is any text.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from maxbatch.commands import COMMANDS

TABLE = Path(__file__).with_name("table.txt")
FOLDER = "FOLDER"  # in a row: the folder that the command is typed in
ERROR = "maxbatch: error: "  # in front of the last line of an answer
ANYTHING = "…"  # in an answer: a text that differs between machines
_VARIABLE = re.compile(r"([A-Z][A-Z_]+)=(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Row:
    """A refusal.

    Args:
      promise: the sentence above the row.
      line: the number of the row's line in the table.
      typed: settings and a machine, or a command.
      answer: the lines of standard error.
      files: contents by name, which are in the folder.
      given: the name of something prepared, which is in the folder too.
      is_process: whether the command must be a process of its own.
    """

    promise: str
    line: int
    typed: str
    answer: str
    files: tuple[tuple[str, str], ...] = ()
    given: str | None = None
    is_process: bool = False

    @property
    def words(self) -> list[str]:
        """What is typed behind the variables."""
        return list(itertools.dropwhile(_VARIABLE.fullmatch, shlex.split(self.typed)))

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables typed before the words."""
        matches = map(_VARIABLE.fullmatch, shlex.split(self.typed))
        return {match[1]: match[2] for match in itertools.takewhile(bool, matches) if match}

    @property
    def is_command(self) -> bool:
        """Whether this process runs the command."""
        return not self.is_process and self.words[:1] != [] and self.words[0] in COMMANDS

    @property
    def is_plan(self) -> bool:
        """Whether settings and a machine are typed, without a command."""
        return not self.is_process and not self.is_command

    def is_answer(self, said: str, folder: Path) -> bool:
        """Returns whether a text is the answer, whatever the folder is called."""
        *notices, error = self.answer.replace(FOLDER, str(folder)).split("\n")
        parts = "\n".join([*notices, f"{ERROR}{error}"]).split(ANYTHING)
        return re.fullmatch(".*".join(map(re.escape, parts)), said) is not None

    def __str__(self) -> str:
        return self.typed[:100]


def read_rows(text: str | None = None) -> list[Row]:
    """Returns the rows of the table, or of a text of its form."""
    return list(_rows(TABLE.read_text() if text is None else text))


def _rows(text: str) -> Iterator[Row]:
    promise, before, files, given = "", "", dict[str, str](), None
    lines = list(enumerate(text.splitlines(), 1))
    while lines:
        number, line = lines.pop(0)
        mark, _, rest = line.partition(" ")
        if mark in ("", "#"):
            continue
        if mark == "==":
            promise, before, files, given = rest, "", {}, None
        elif mark == "@":
            name, _, content = rest.partition(": ")
            files[name] = content.replace("\\n", "\n")
        elif mark == "&":
            given = rest
        elif mark == "+":
            before = f"{rest} "
        elif mark in ("$", "$$"):
            answer = []
            while lines and lines[0][1].startswith("  "):
                answer.append(lines.pop(0)[1][2:])
            yield Row(
                promise,
                number,
                before + rest,
                "\n".join(answer),
                tuple(files.items()),
                given,
                is_process=mark == "$$",
            )
        else:
            raise ValueError(f"{TABLE.name}:{number}: {line!r} is no part of a row")
