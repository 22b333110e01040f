"""The refusal of keys that the config does not know: all at once, in one line, each with a suggestion.

For a word of another framework the suggestion comes from the table of words. Only a misspelt key gets a hint by
spelling, and only where each part of its name is like that of the key, so that no hint names a key of another meaning.
"""

from __future__ import annotations

import difflib
import functools
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from maxbatch.config.keys import Key
from maxbatch.config.values import Value, shown
from maxbatch.config.words import FRAMEWORKS, Word, look_up, meanings, normal
from maxbatch.config.words.convert import Setting, converted, rampup_schedule
from maxbatch.config.yaml_file import Entry
from maxbatch.system.errors import ConfigError

_MOST_ANSWERS = 40
_ALIKE = 0.75  # of two parts of a name
IMPORTED = ("maxtext", "hf", "deepspeed", "axolotl", "megatron", "nemo", "trl", "verl")  # what `maxbatch import` reads


Settled = Callable[[Mapping[str, Mapping[str, str]]], Mapping[str, Value] | None]


class UnknownKeys(ConfigError):
    """Entries whose keys are unknown; `on` states the settings that work on a machine."""

    def __init__(
        self, unknown: Sequence[Entry], keys: Mapping[str, Key], file: str | None, settled: Settled,
        devices: int | None = None, hosts: int | None = None,
    ) -> None:  # fmt: skip
        """Makes the error.

        Args:
          unknown: the unknown entries, at least one.
          keys: those of the config.
          file: the config file, if an entry may be in it.
          settled: returns the values of the config with these settings in place of each unknown entry, or None if it
            is refused.
          devices: of the machine; None: unknown.
          hosts: of the machine; None: unknown.
        """
        super().__init__(*(entry.name for entry in unknown[:_MOST_ANSWERS]))
        self._facts, self._machine = (unknown, keys, file, settled), (devices, hosts)

    def __str__(self) -> str:
        return self._message

    @functools.cached_property
    def _message(self) -> str:
        unknown, keys, file, settled = self._facts
        setting, works = _settings(unknown, keys, settled, *self._machine)
        most = 2 if len(unknown) == 1 else 1
        answered = unknown[:_MOST_ANSWERS]
        answers = [f"{shown(entry.name)}{hint(entry.name, keys, setting.is_of_prompts, most)}" for entry in answered]
        rest = len(unknown) - len(answers)
        said = "; ".join(answers) + (f"; and {rest} more" if rest > 0 else "")
        plural = "s" if len(unknown) > 1 else ""
        where = unknown[0].where
        where = f"{where}: " if where and not plural else ""
        return f"{where}unknown key{plural} {said}{works}{_import(unknown, file)}"

    def on(self, devices: int | None, hosts: int | None) -> ConfigError:
        """Returns the error for a machine of these devices and hosts."""
        return UnknownKeys(*self._facts, devices, hosts)


def hint(name: str, keys: Iterable[str], is_of_prompts: bool = False, most: int = 2) -> str:
    """Returns the text of a message after an unknown name: its rows in the table of words, or the key it misspells.

    Args:
      name: the unknown name.
      keys: those of the config.
      is_of_prompts: whether the config is one of reinforcement learning, whose words are then preferred.
      most: meanings of a word that are told.
    """
    found = _for(name, is_of_prompts)[:most]
    if key := _in_block(name, found, keys):
        return f" is {key}: state it without the block"
    if found:
        return f" {'; or '.join(row.answer() for row in found)}"
    near = misspelt(name, keys)
    return f"; nearest: {near}" if near else " (maxbatch config lists the keys)"


def unknown_flag(
    flag: str, values: Sequence[str], line: Sequence[str], setting: Setting, keys: Iterable[str]
) -> str | None:
    """Returns the message for a flag that is another framework's word, or None.

    Args:
      flag: the flag, with its dashes.
      values: the words after it.
      line: all words of the command line; a ramp looks up its final batch there.
      setting: the config and the machine of the line.
      keys: those of the config.
    """
    word = normal(flag)
    found = _for(word, setting.is_of_prompts)
    if not found or (found[0].keys == (word,) and word in keys):
        return None
    row, settings = found[0], ""
    by_value = converted(row.word, values[0], setting) if values else None
    if row.word == "batch_size" and values:
        settings = _three_batches(shown(values[0]), setting.hosts)
    elif row.word == "rampup_batch_size":
        settings = _rampup(values, line)
    elif by_value:
        settings = _stated(by_value)
    elif row.is_same and values:
        settings = _stated({row.keys[0]: values[0]})
    return "; or ".join(row.answer() for row in found) + (f"; works: {settings}" if settings else "")


def _for(name: str, is_of_prompts: bool) -> Sequence[Word]:
    """Returns the rows of a word: in reinforcement learning only those that are its words, where there are any."""
    found = meanings(name)
    of_prompts = [row for row in found if row.is_of_prompts]
    return of_prompts if is_of_prompts and of_prompts else found


def _in_block(name: str, found: Sequence[Word], keys: Iterable[str]) -> str | None:
    """Returns the key that a path of a nested file ends in, if no row but one of a pattern answers for it."""
    last = name.rpartition(".")[2]
    is_answered = any("*" not in row.word for row in found)
    return last if last != name and last in keys and not is_answered else None


def _stated(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(shown(text))}" for name, text in settings.items())


def _three_batches(batch: str, hosts: int | None) -> str:
    """Returns the settings for `--batch-size`, which frameworks mean in three ways."""
    if not re.fullmatch(r"\d{1,12}", batch):
        return ""
    of_node = f"{batch} x nodes" if hosts is None else str(int(batch) * hosts)
    return (
        f"global_batch_size={batch} (of all devices), per_device_batch_size={batch} (of each process) or "
        f"global_batch_size={of_node} (of each node)"
    )


def _rampup(values: Sequence[str], line: Sequence[str]) -> str:
    """Returns the setting for Megatron-LM's ramp, if the line states the batch that it leads to."""
    words = [part for word in line for part in word.split("=")]
    stated = [i for i, word in enumerate(words[:-1]) if normal(word) == "global_batch_size"]
    numbers = [*values, *(words[i + 1] for i in stated[-1:])]
    if len(numbers) != 4 or not all(re.fullmatch(r"\d{1,12}", number) for number in numbers):
        return ""
    schedule = rampup_schedule(*map(int, numbers))
    return f'batch_size_schedule="{schedule}" in place of global_batch_size' if schedule else ""


def _sizeless(part: str) -> str:
    """Returns a part of a name without the size of a batch: microbatches, minibatches and batches are three things."""
    return part.removeprefix("micro").removeprefix("mini")


def misspelt(name: str, keys: Iterable[str]) -> str | None:
    """Returns the key that a name misspells, or None: as many parts, and each one alike."""

    def alike(one: str, other: str) -> float:
        if one != other and _sizeless(one) == _sizeless(other):
            return 0.0
        return difflib.SequenceMatcher(None, one, other).ratio()

    name, found = name[:80].lower().replace("-", "_"), dict[str, float]()
    for key in keys:
        pairs = list(zip(name.split("_"), key.split("_"), strict=False))
        same_length = name.count("_") == key.count("_")
        glued = name.replace("_", "") == key.replace("_", "")
        if glued or (len(name) > 3 and same_length and all(min(alike(a, b), alike(b, a)) >= _ALIKE for a, b in pairs)):
            found[key] = 2.0 if glued else alike(name, key)
    return max(found, key=lambda key: found[key]) if found else None


def _settings(
    unknown: Sequence[Entry], keys: Mapping[str, Key], settled: Settled, devices: int | None, hosts: int | None
) -> tuple[Setting, str]:
    """Returns the config without the unknown entries, and the settings that take their place if each has one."""
    place_of: dict[str, Mapping[str, str]] = {entry.name: {} for entry in unknown}
    setting = Setting(settled(place_of) or {}, devices, hosts)
    rows = {entry.name: next(iter(_for(entry.name, setting.is_of_prompts)), None) for entry in unknown}
    for entry in unknown:
        row = rows[entry.name]
        key = _in_block(entry.name, [row] if row else [], keys) or (row.keys[0] if row and row.is_same else "")
        if key in keys:
            place_of[entry.name] = {key: entry.text}
    setting = Setting(settled(place_of) or setting.values, devices, hosts)
    for entry in unknown:
        row = rows[entry.name]
        if row and (by_value := converted(row.word, entry.text, setting)):
            place_of[entry.name] = by_value
        if not place_of[entry.name] and not (row and row.is_ignored):
            return setting, ""
    names = [name for settings in place_of.values() for name in settings]
    if not names or len(set(names)) < len(names) or settled(place_of) is None:
        return setting, ""
    return setting, "; works: " + " ".join(_stated(settings) for settings in place_of.values() if settings)


def _import(unknown: Sequence[Entry], file: str | None) -> str:
    """Returns the command that imports the file, if most of its unknown keys are words of one other framework."""
    rows = [look_up(entry.name) for entry in unknown]
    whose = Counter(name for row in rows if row for name in row.whose if name in IMPORTED)
    if file is None or not whose:
        return ""
    name, _ = min(whose.items(), key=lambda item: (-item[1], IMPORTED.index(item[0])))
    imported = "megatron" if name == "nemo" else name
    return f"; a config of {FRAMEWORKS[name]} becomes one of ours by: maxbatch import {imported} {file}"
