"""The tables of the formats: another program's words, their counterparts here, and conditions.

A table is `FORMAT.txt`. Its section `defaults` has the other program's defaults, `signs` the words
that identify a file, and `words` the rows, in the order in which words are taken:

    words | when | here | why

    words  joined by commas; * matches any text in the words not taken yet; empty: a row without a
    word when   terms joined by `and`; empty: the file states the word. A term is [NAME] TEST, or
    :CONDITION, a function
           stated, unstated       stated with a non-empty value, or not
           written, any           stated or a default; always
           is A, B; not A, B      the value is (not) one of these, * for any text; `empty`: no value
           = N, < N, > N, >= N    the value as a number
    here   KEY, KEY=VALUE ...     settings of ours; {} is the word's value, {NAME} another word's
    value; {bool}, {not}
                                  and {int}: the value as a switch, the opposite switch, a whole
                                  number; {rows}: rows of a replica, as rows of each of its devices
           x KEY                  devices that hold one replica between them: the word's value
           multiplies the axis ? KEY=VALUE ...        settings that need a step by the user, which
           `why` gives
           -                      ignored: no effect on training
           !, !!                  not supported; !!: it states the batch, the length, the data or
           the model only A, B; only!! A    ignored at these values, our behaviour; else not
           supported
           > NAME                 another name of a word
           assume WORD=VALUE ...  further defaults of the other program
           @NAME ...              sections of the table or functions that take the word

Consecutive rows of the same word, of patterns and of no word are alternatives: a word takes the
first row that holds. An empty line separates them. A word is taken once; words in no row are taken
by the table of words (`maxbatch/around/words/words.txt`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from maxbatch.around.importers.translation import Translation
from maxbatch.around.words import FRAMEWORKS
from maxbatch.config.values import shown

Rule = Callable[[Translation, str], None]
Equation = Callable[[Translation], tuple[str, str]]
Condition = Callable[[Translation, str], bool]
TERM = re.compile(r"(?:(\S+) )?(stated|unstated|written|any|is|not|>=|<|>|=)(?: (.+))?")
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    ">=": operator.ge,
}
_NAME = re.compile(r"\{(\w*)\}")
_FOLDED = ("false", "null", "none")  # in any case


class Row(NamedTuple):
    words: tuple[str, ...]
    when: str
    here: str
    why: str


class Format:
    """A format: a table, and the functions named in it.

    Attributes:
      program: the other program's name, for messages.
      defaults: the other program's defaults, by word.
      signs: words that identify its files.
      equation: returns the batch as an equation in their words and in ours.
    """

    def __init__(
        self,
        name: str,
        equation: Equation,
        rules: Mapping[str, Rule],
        conditions: Mapping[str, Condition] | None = None,
        parent: Format | None = None,
        program: str | None = None,
        default_of: Callable[[str], str] = lambda word: "",
    ) -> None:
        """Reads a table; missing sections, functions and defaults are its parent's.

        Args:
          name: the name of the table's file, and of the program in the table of words.
          program: the program's name for messages; None: that of the table of words.
          default_of: returns the default of a word that the section states without a value.
        """
        self.program = program or FRAMEWORKS.get(name, name)
        self.equation = equation
        self.rules: dict[str, Rule] = {**(parent.rules if parent else {}), **rules}
        self.conditions: dict[str, Condition] = {
            "is_left": Translation.is_left,
            **(parent.conditions if parent else {}),
            **(conditions or {}),
        }
        of_table = dict(
            sections(Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8"))
        )
        self.defaults: dict[str, str] = {
            **(parent.defaults if parent else {}),
            **_defaults(of_table.get("defaults", ""), default_of),
        }
        self.signs = of_table.get("signs", "").split()
        self.sections: dict[str, list[list[Row]]] = {**(parent.sections if parent else {})}
        self.sections |= {
            name: _blocks(text)
            for name, text in of_table.items()
            if name not in ("defaults", "signs")
        }

    def translate(self, t: Translation, section: str = "words") -> None:
        """Takes the words of a section."""
        for block in self.sections[section]:
            for word in _words_of(block, t):
                self._take(t, word, block)

    def _take(self, t: Translation, word: str, block: list[Row]) -> None:
        for row in block:
            if _names(row, word) and self._holds(t, word, row):
                self._apply(t, word, row)
                return

    def _holds(self, t: Translation, word: str, row: Row) -> bool:
        if not row.when:
            return not word or word not in row.words or word in t
        return all(self._term(t, word, term.strip()) for term in row.when.split(" and "))

    def _term(self, t: Translation, word: str, term: str) -> bool:
        if term.startswith(":"):
            return self.conditions[term[1:]](t, word)
        match = TERM.fullmatch(term)
        assert match, term
        name, test, text = match[1] or word, match[2], match[3] or ""
        if test in ("is", "not"):
            return _is_one(t, name, text.split(", ")) == (test == "is")
        if test in _COMPARED:
            number = t.number(name)
            return number is not None and _COMPARED[test](number, float(text))
        return {
            "any": True,
            "stated": name in t,
            "unstated": name not in t,
            "written": t.text(name) != "",
        }[test]

    def _apply(self, t: Translation, word: str, row: Row) -> None:
        kind, _, rest = row.here.partition(" ")
        why = _NAME.sub(lambda match: shown(t.text(match[1] or word)) or "empty", row.why)
        if kind.startswith("@"):
            for name in row.here.replace("@", "").split():
                if name in self.rules:
                    self.rules[name](t, word)
                else:
                    self.translate(t, name)
        elif kind.startswith("only"):
            if t.text(word).lower() in rest.replace("empty", "").split(", "):
                t.ignore(word, f"{shown(t.text(word)) or 'empty'}: our behaviour")
            else:
                t.refuse(word, why, is_essential=kind.endswith("!!"))
        elif kind == "-":
            t.ignore(word, why)
        elif kind in ("!", "!!"):
            t.refuse(word, why, is_essential=kind == "!!")
        elif kind == ">":
            t.rename(word, rest)
        elif kind == "assume":
            t.assume(settings(rest))
        elif kind == "x":
            t.split(word, rest, why)
        elif not word:
            t.settings |= _filled(t, word, row.here)
        elif kind == "?":
            t.need(word, why, **_filled(t, word, rest))
        else:
            of_replica = t.replica_in_words() if "{rows}" in row.here else ""
            t.map(word, "; ".join(filter(None, (of_replica, why))), **_filled(t, word, row.here))


def _words_of(block: list[Row], t: Translation) -> Iterator[str]:
    """Yields the words that a block of rows takes, in order; a pattern takes only remaining
    words.
    """
    patterns = [name for row in block for name in row.words if "*" in name]
    seen = set[str]()
    for row in block:
        named = [name for name in row.words if "*" not in name]
        matching = t.left() if len(named) < len(row.words) else []
        words = [
            *named,
            *(word for word in matching if any(fnmatchcase(word, name) for name in patterns)),
        ]
        for word in words or ([] if row.words else [""]):
            if word not in seen and not (word and t.is_taken(word)):
                seen.add(word)
                yield word


def _names(row: Row, word: str) -> bool:
    return any(fnmatchcase(word, name) for name in row.words) if word else not row.words


def _is_one(t: Translation, name: str, values: list[str]) -> bool:
    text = t.text(name)
    if not text:
        return "empty" in values
    is_folded = text.lower() in _FOLDED and text.lower() in values
    is_like = any(fnmatchcase(text, value) for value in values if "*" in value)
    return text in values or is_folded or is_like or ("true" in values and t.is_true(name))


def _filled(t: Translation, word: str, here: str) -> dict[str, str]:
    """Fills a cell's settings with the values of words."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name in ("bool", "not"):
            return "true" if t.is_true(word) == (name == "bool") else "false"
        if name == "rows":
            return t.rows_of_device(word)
        return str(int(t.number(word) or 0)) if name == "int" else t.text(name or word)

    settings = {
        name: text if given else "{}"
        for name, given, text in (part.partition("=") for part in here.split())
    }
    return {name: _NAME.sub(value, text) for name, text in settings.items()}


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the lines of each section."""
    for section in re.split(r"^\[", re.sub(r"^#[^\n]*\n", "", text, flags=re.M), flags=re.M)[1:]:
        name, _, lines = section.partition("]\n")
        yield name, lines.strip()


def settings(text: str) -> dict[str, str]:
    """Parses `WORD=VALUE ...`; values with blanks are quoted."""
    return {name: value.strip("'") for name, value in re.findall(r"(\S+?)=('[^']*'|\S*)", text)}


def _defaults(text: str, default_of: Callable[[str], str]) -> dict[str, str]:
    """Parses defaults in their order; those without a value are asked for."""
    words = [word.partition("=")[0] for word in re.findall(r"\S+?='[^']*'|\S+", text)]
    values = settings(text)
    return {word: values[word] if word in values else default_of(word) for word in words}


def _blocks(text: str) -> list[list[Row]]:
    """Groups the rows of a section into blocks of alternatives."""
    blocks: list[list[Row]] = []
    is_next = False
    for line in text.strip().split("\n"):
        row = _row(line) if line else None
        if row and is_next and _is_alternative(blocks[-1], row):
            blocks[-1].append(row)
        elif row:
            blocks.append([row])
        is_next = row is not None
    return blocks


def _is_alternative(block: list[Row], row: Row) -> bool:
    words = {word for each in block for word in each.words}
    are_patterns = all(any("*" in word for word in each) for each in (words, row.words))
    return are_patterns or not (words or row.words) or not words.isdisjoint(row.words)


def _row(line: str) -> Row:
    words, when, here, why = (cell.strip() for cell in line.split("|"))
    return Row(tuple(filter(None, words.split(", "))), when, here, why)
