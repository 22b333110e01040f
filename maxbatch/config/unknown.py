"""The refusal of unknown keys: all in one line, each with a suggestion.

Suggestions for words of other frameworks come from the table of words. A hint by spelling needs
every part of the name to resemble the key's part, so that no hint names a key of another meaning.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence

from maxbatch.config.foreign_words import ForeignWord, Machine, Settled, foreign_words, normal
from maxbatch.config.keys import Entry
from maxbatch.config.sections import KEYS
from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError

_MOST_ANSWERS = 40
_ALIKE = 0.75  # of two parts of a name
_ALMOST = 0.85  # of two names


class UnknownKeys(ConfigError):
    """Entries with unknown keys; `on` adds the settings that work on a machine."""

    def __init__(
        self,
        unknown: Sequence[Entry],
        file: str | None,
        settled: Settled,
        known_texts: Mapping[str, str],
        machine: Machine | None = None,
    ) -> None:
        """Makes the error.

        Args:
          unknown: the unknown entries, at least one; a name with leading dashes was typed as a
            flag.
          file: the config file, if an entry may be in it.
          settled: returns the config's values with these settings in place of the unknown entries,
            or None if they are refused.
          known_texts: texts of known keys in the layers of the unknown ones.
          machine: the command line's machine; None: unknown.
        """
        super().__init__(*(entry.name for entry in unknown[:_MOST_ANSWERS]))
        self._facts, self._machine = (unknown, file, settled, known_texts), machine or Machine()

    def __str__(self) -> str:
        return self._message

    @functools.cached_property
    def _message(self) -> str:
        unknown, file, settled, known_texts = self._facts
        words = foreign_words()
        replacement = words.replacement(unknown, settled, known_texts, self._machine)
        is_single = len({entry.name for entry in unknown if entry.name not in KEYS}) == 1
        most = 2 if is_single else 1

        answers = [
            f"{shown(entry.name)}{hint(entry.name, replacement.is_of_prompts, most)}"
            for entry in unknown[:_MOST_ANSWERS]
        ]
        rest = len(unknown) - len(answers)
        message = "; ".join(answers) + (f"; and {rest} more" if rest > 0 else "")
        where = f"{unknown[0].where}: " if unknown[0].where and len(unknown) == 1 else ""
        are_flags = all(entry.name.startswith("-") for entry in unknown)
        subject = "" if are_flags else "unknown key " if is_single else "unknown keys "
        advice = words.import_command(unknown, file)
        return f"{where}{subject}{message}{replacement.works}{advice}"

    def on(self, machine: Machine) -> ConfigError:
        return UnknownKeys(*self._facts, machine)


def hint(name: str, is_of_prompts: bool = False, most: int = 2) -> str:
    """Returns a hint for an unknown name, for messages: its rows in the table of words, or the key
    it misspells.

    Args:
      name: the unknown name.
      is_of_prompts: whether the config trains on prompts; prefers words of reinforcement learning.
      most: largest number of meanings of a word in the hint.
    """
    rows = foreign_words().meanings(name, is_of_prompts)[:most]
    if key := key_in_block(name, rows):
        return f" is {key}: state it without the block"
    if (key := spelt_key(name, rows)) in KEYS:
        return (
            ": config keys are stated without dashes"
            if name.startswith("-")
            else f": the key is {key}"
        )
    answer = f" {'; or '.join(row.answer() for row in rows)}"
    if rows and "*" not in rows[0].word:
        return answer
    near = misspelt(name)
    is_misspelt = near is not None and difflib.SequenceMatcher(None, name, near).ratio() >= _ALMOST
    if rows and not is_misspelt:  # a typo resembles a pattern of words too
        return answer
    return (
        f"; nearest: {near}"
        if near
        else ""
        if name.startswith("-")
        else " (maxbatch config lists the keys)"
    )


def spelt_key(name: str, rows: Sequence[ForeignWord]) -> str:
    """Returns our key that the name spells differently; "" if the name is another framework's
    word, of which `rows` are the meanings.
    """
    word = normal(name)
    return word if not rows or rows[0].keys == (word,) else ""


def key_in_block(name: str, rows: Sequence[ForeignWord]) -> str | None:
    """Returns the key at the end of a path in a nested file, unless a row without a pattern matches
    the path.
    """
    last = name.rpartition(".")[2]
    is_answered = any("*" not in row.word for row in rows)
    return last if last != name and last in KEYS and not is_answered else None


def _sizeless(part: str) -> str:
    """Returns a part of a name without micro and mini; these are other meanings, not
    misspellings.
    """
    return part.removeprefix("micro").removeprefix("mini")


def misspelt(name: str) -> str | None:
    """Returns the key that a name misspells, with as many parts and each part similar; None if
    there is none.
    """

    def alike(left: str, right: str) -> float:
        if left != right and _sizeless(left) == _sizeless(right):
            return 0.0
        return difflib.SequenceMatcher(None, left, right).ratio()

    name = name[:80].lower().replace("-", "_")  # comparing longer names would take seconds
    likeness: dict[str, float] = {}
    for key in KEYS:
        pairs = list(zip(name.split("_"), key.split("_"), strict=False))
        same_length = name.count("_") == key.count("_")
        glued = name.replace("_", "") == key.replace("_", "")
        if glued or (
            len(name) > 3
            and same_length
            # SequenceMatcher's ratio depends on the order of its texts
            and all(min(alike(a, b), alike(b, a)) >= _ALIKE for a, b in pairs)
        ):
            likeness[key] = 2.0 if glued else alike(name, key)
    return max(likeness, key=lambda key: likeness[key]) if likeness else None
