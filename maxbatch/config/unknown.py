"""The refusal of keys that the config does not know: all at once, in one line, each with a suggestion.

For a word of another framework the suggestion comes from the table of words. Only a misspelt key gets a hint by
spelling, and only where each part of its name is like that of the key, so that no hint names a key of another meaning.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from maxbatch.config.keys import Key
from maxbatch.config.values import shown
from maxbatch.config.words import FRAMEWORKS, Word, look_up, normal
from maxbatch.config.words.convert import rampup_schedule
from maxbatch.config.yaml_file import Entry
from maxbatch.system.errors import ConfigError

_MOST_ANSWERS = 40
_ALIKE = 0.75  # of two parts of a name
IMPORTED = ("maxtext", "hf", "deepspeed", "axolotl", "megatron", "nemo")  # what `maxbatch import` reads


def unknown_keys(
    unknown: Sequence[Entry], keys: Mapping[str, Key], file: str | None, works: Callable[[Mapping[str, str]], bool]
) -> ConfigError:
    """Returns the error for entries whose keys are unknown.

    Args:
      unknown: the unknown entries, at least one.
      keys: those of the config.
      file: the config file, if an entry may be in it.
      works: whether the config is accepted with these names in place of the unknown ones ("": left out).
    """
    rows = {entry.name: look_up(entry.name) for entry in unknown}
    answers = [f"{shown(entry.name)}{hint(entry.name, keys)}" for entry in unknown]
    rest = len(answers) - _MOST_ANSWERS
    said = "; ".join(answers[:_MOST_ANSWERS]) + (f"; and {rest} more" if rest > 0 else "")
    plural = "s" if len(unknown) > 1 else ""
    where = unknown[0].where
    where = f"{where}: " if where and not plural else ""
    return ConfigError(f"{where}unknown key{plural} {said}{_works(unknown, rows, keys, works)}{_import(rows, file)}")


def hint(name: str, keys: Iterable[str]) -> str:
    """Returns the text of a message after an unknown name: its row in the table of words, or the key it misspells."""
    row = look_up(name)
    if row is not None:
        return f" {row.answer()}"
    near = misspelt(name, keys)
    return f"; nearest: {near}" if near else " (maxbatch config lists the keys)"


def unknown_flag(flag: str, values: Sequence[str], line: Sequence[str]) -> str | None:
    """Returns the message for a flag that is another framework's word, or None.

    Args:
      flag: the flag, with its dashes.
      values: the words after it.
      line: all words of the command line; a ramp looks up its final batch there.
    """
    row = look_up(flag)
    if row is None or row.keys == (row.word,):
        return None
    settings = ""
    if row.is_same and values:
        settings = f"{row.keys[0]}={shlex.quote(shown(values[0]))}"
    elif row.word == "micro_batch_size" and values:
        settings = f"per_device_batch_size={shown(values[0])} where a replica is one device"
    elif row.word == "rampup_batch_size":
        settings = _rampup(values, line)
    return row.answer() + (f"; works: {settings}" if settings else "")


def _rampup(values: Sequence[str], line: Sequence[str]) -> str:
    """Returns the setting for Megatron-LM's ramp, if the line states the batch that it leads to."""
    words = [part for word in line for part in word.split("=")]
    stated = [i for i, word in enumerate(words[:-1]) if normal(word) == "global_batch_size"]
    numbers = [*values, *(words[i + 1] for i in stated[-1:])]
    if len(numbers) != 4 or not all(re.fullmatch(r"\d{1,12}", number) for number in numbers):
        return ""
    schedule = rampup_schedule(*map(int, numbers))
    return f'batch_size_schedule="{schedule}" in place of global_batch_size' if schedule else ""


def misspelt(name: str, keys: Iterable[str]) -> str | None:
    """Returns the key that a name misspells, or None: as many parts, and each one alike."""

    def alike(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one, other).ratio()

    name, found = name[:80].lower().replace("-", "_"), dict[str, float]()
    for key in keys:
        pairs = list(zip(name.split("_"), key.split("_"), strict=False))
        same_length = name.count("_") == key.count("_")
        glued = name.replace("_", "") == key.replace("_", "")
        if glued or (len(name) > 3 and same_length and all(min(alike(a, b), alike(b, a)) >= _ALIKE for a, b in pairs)):
            found[key] = 2.0 if glued else alike(name, key)
    return max(found, key=lambda key: found[key]) if found else None


def _works(
    unknown: Sequence[Entry],
    rows: Mapping[str, Word | None],
    keys: Mapping[str, Key],
    works: Callable[[Mapping[str, str]], bool],
) -> str:
    """Returns the settings that take the place of the unknown keys, if each of them has one with its value."""
    settings: dict[str, str] = {}
    key_of: dict[str, str] = {}
    for entry in unknown:
        row = rows[entry.name]
        if row is None or not (row.is_same or row.is_ignored):
            return ""
        key_of[entry.name] = row.keys[0] if row.is_same else ""
        if row.is_same and (row.keys[0] not in keys or row.keys[0] in settings):
            return ""
        settings |= {row.keys[0]: entry.text} if row.is_same else {}
    if not settings or not works(key_of):
        return ""
    return "; works: " + " ".join(f"{name}={shlex.quote(shown(text))}" for name, text in settings.items())


def _import(rows: Mapping[str, Word | None], file: str | None) -> str:
    """Returns the command that imports the file, if most of its unknown keys are words of one other framework."""
    whose = Counter(name for row in rows.values() if row for name in row.whose if name in IMPORTED)
    if file is None or not whose:
        return ""
    name, _ = min(whose.items(), key=lambda item: (-item[1], IMPORTED.index(item[0])))
    imported = "megatron" if name == "nemo" else name
    return f"; a config of {FRAMEWORKS[name]} becomes one of ours by: maxbatch import {imported} {file}"
