"""The refusal of unknown keys: all in one line, each with a suggestion.

Suggestions for words of other frameworks come from the table of words. A hint by spelling needs
every part of the name to resemble the key's part, so that no hint names a key of another meaning.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from maxbatch.config.keys import Entry
from maxbatch.config.rules import check_data_paths, likely_type
from maxbatch.config.sections import KEYS
from maxbatch.config.values import Value, shown
from maxbatch.config.words import FRAMEWORKS, Word, look_up, meanings, normal
from maxbatch.config.words.convert import (
    FIELD_OF,
    OF_LOSS,
    Setting,
    converted,
    rampup_schedule,
    read_number,
    record_fields,
)
from maxbatch.config.words.together import OF_OLMO, together
from maxbatch.system.errors import ConfigError

_MOST_ANSWERS = 40
_ALIKE = 0.75  # of two parts of a name
_ALMOST = 0.85  # of two names
_EPOCHS = "num_train_epochs"  # of Hugging Face
_THREE_BATCHES = ("batch_size", "b")  # words with three meanings among frameworks
IMPORTED = (
    "maxtext",
    "hf",
    "deepspeed",
    "axolotl",
    "megatron",
    "nemo",
    "trl",
    "llamafactory",
    "torchtitan",
)  # formats of `maxbatch import`


Settled = Callable[[Mapping[str, Mapping[str, str]]], Mapping[str, Value] | None]
Plans = Callable[[Mapping[str, Value], int, int], bool]


class Machine(NamedTuple):
    """The machine of a command line."""

    devices: int | None = None  # None: unknown
    hosts: int | None = None
    # whether a config can be planned for devices and hosts; None: unknown
    plans: Plans | None = None
    has_flags: bool = False  # whether the command takes --devices and --hosts


class UnknownKeys(ConfigError):
    """Entries with unknown keys; `on` adds the settings that work on a machine."""

    def __init__(
        self,
        unknown: Sequence[Entry],
        file: str | None,
        settled: Settled,
        own: Mapping[str, str],
        machine: Machine | None = None,
    ) -> None:
        """Makes the error.

        Args:
          unknown: the unknown entries, at least one; a name with leading dashes was typed as a
            flag.
          file: the config file, if an entry may be in it.
          settled: returns the config's values with these settings in place of the unknown entries,
            or None if they are refused.
          own: texts of known keys in the layers of the unknown ones.
          machine: the command line's machine; None: unknown.
        """
        super().__init__(*(entry.name for entry in unknown[:_MOST_ANSWERS]))
        self._facts, self._machine = (unknown, file, settled, own), machine or Machine()

    def __str__(self) -> str:
        return self._message

    @functools.cached_property
    def _message(self) -> str:
        unknown, file, settled, own = self._facts
        setting, works = _settings(unknown, settled, own, self._machine)
        is_one = len({entry.name for entry in unknown if entry.name not in KEYS}) == 1
        answered = unknown[:_MOST_ANSWERS]
        most = 2 if is_one else 1
        answers = [
            f"{shown(entry.name)}{hint(entry.name, setting.is_of_prompts, most)}"
            for entry in answered
        ]
        rest = len(unknown) - len(answers)
        said = "; ".join(answers) + (f"; and {rest} more" if rest > 0 else "")
        where = f"{unknown[0].where}: " if unknown[0].where and len(unknown) == 1 else ""
        are_flags = all(entry.name.startswith("-") for entry in unknown)
        what = "" if are_flags else "unknown key " if is_one else "unknown keys "
        return f"{where}{what}{said}{works}{_import(unknown, file)}"

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
    found = _for(name, is_of_prompts)[:most]
    if key := _in_block(name, found):
        return f" is {key}: state it without the block"
    if (key := _as_key(name, found)) in KEYS:
        return (
            ": config keys are stated without dashes"
            if name.startswith("-")
            else f": the key is {key}"
        )
    near = misspelt(name)
    is_misspelt = near is not None and difflib.SequenceMatcher(None, name, near).ratio() >= _ALMOST
    # a typo resembles a pattern of words too
    if found and not (is_misspelt and "*" in found[0].word):
        return f" {'; or '.join(row.answer() for row in found)}"
    return (
        f"; nearest: {near}"
        if near
        else ""
        if name.startswith("-")
        else " (maxbatch config lists the keys)"
    )


def _as_key(name: str, found: Sequence[Word]) -> str:
    """Returns our key that the name spells differently; "" if the name is another framework's
    word.
    """
    word = normal(name)
    return word if not found or found[0].keys == (word,) else ""


def _for(name: str, is_of_prompts: bool) -> Sequence[Word]:
    """Returns the rows of a word; in reinforcement learning only its own rows, if there are any."""
    found = meanings(name)
    of_prompts = [row for row in found if row.is_of_prompts]
    return of_prompts if is_of_prompts and of_prompts else found


def _in_block(name: str, found: Sequence[Word]) -> str | None:
    """Returns the key at the end of a path in a nested file, unless a row without a pattern matches
    the path.
    """
    last = name.rpartition(".")[2]
    is_answered = any("*" not in row.word for row in found)
    return last if last != name and last in KEYS and not is_answered else None


def three_batches(batch: int, hosts: int | None) -> str:
    """Returns the settings for the three meanings of `--batch-size`."""
    of_node = f"{batch} x nodes" if hosts is None else str(batch * hosts)
    return (
        f"global_batch_size={batch} (of all devices), per_device_batch_size={batch} (of each "
        f"process) or global_batch_size={of_node} (of each node)"
    )


def _rampup(
    text: str, own: Mapping[str, str], rest: Sequence[Mapping[str, str]]
) -> Mapping[str, str] | None:
    """Returns the setting for Megatron-LM's ramp, if the final batch is stated beside it."""
    batches = [
        settings["global_batch_size"]
        for settings in (own, *rest)
        if "global_batch_size" in settings
    ]
    numbers = [*re.findall(r"\d{1,12}", text), *batches[-1:]]
    if len(numbers) != 4 or not all(number.isdigit() for number in numbers):
        return None
    schedule = rampup_schedule(*map(int, numbers))
    return {"batch_size_schedule": schedule} if schedule else None


def _sizeless(part: str) -> str:
    """Returns a part of a name without micro and mini; these are other meanings, not
    misspellings.
    """
    return part.removeprefix("micro").removeprefix("mini")


def misspelt(name: str) -> str | None:
    """Returns the key that a name misspells, with as many parts and each part similar; None if
    there is none.
    """

    def alike(one: str, other: str) -> float:
        if one != other and _sizeless(one) == _sizeless(other):
            return 0.0
        return difflib.SequenceMatcher(None, one, other).ratio()

    name, found = name[:80].lower().replace("-", "_"), dict[str, float]()
    for key in KEYS:
        pairs = list(zip(name.split("_"), key.split("_"), strict=False))
        same_length = name.count("_") == key.count("_")
        glued = name.replace("_", "") == key.replace("_", "")
        if glued or (
            len(name) > 3
            and same_length
            and all(min(alike(a, b), alike(b, a)) >= _ALIKE for a, b in pairs)
        ):
            found[key] = 2.0 if glued else alike(name, key)
    return max(found, key=lambda key: found[key]) if found else None


def _settings(
    unknown: Sequence[Entry], settled: Settled, own: Mapping[str, str], machine: Machine
) -> tuple[Setting, str]:
    """Returns the config without the unknown entries, and the settings that replace them, if all
    can be replaced.
    """
    place_of: dict[str, Mapping[str, str]] = {entry.name: {} for entry in unknown}
    setting = Setting(settled(place_of) or {}, machine.devices, machine.hosts)
    rows = {
        entry.name: next(iter(_for(entry.name, setting.is_of_prompts)), None) for entry in unknown
    }
    words = {row.word: entry.text for entry in unknown if (row := rows[entry.name])}
    if read_number(words.get("max_steps", "")):  # takes precedence over epochs there
        rows = {
            name: row._replace(here="-") if row and row.word == _EPOCHS else row
            for name, row in rows.items()
        }
    for entry in unknown:
        row = rows[entry.name]
        key = _in_block(entry.name, [row] if row else []) or (
            row.keys[0] if row and row.is_same else ""
        )
        key = key or _as_key(entry.name, [row] if row else [])
        if key in KEYS:
            place_of[entry.name] = {key: entry.text}
    setting = dataclasses.replace(setting, values=settled(place_of) or setting.values)
    batch = together(words, own, setting)
    if batch is None:
        return setting, ""
    for entry in unknown:
        row = rows[entry.name]
        if row and row.word in batch.settings:
            place_of[entry.name] = batch.settings[row.word]
    without_rest = settled(place_of) or setting.values
    setting = dataclasses.replace(
        setting, values=without_rest, devices=batch.devices, hosts=batch.hosts
    )
    fields = {
        FIELD_OF[row.word]: entry.text
        for entry in unknown
        if (row := rows[entry.name]) and row.word in FIELD_OF
    }
    if fields and (text := record_fields(fields)) is not None:
        named = {"record_fields": text} if text else {}
        place_of |= {
            e.name: named for e in unknown if (row := rows[e.name]) and row.word in FIELD_OF
        }
    for entry in unknown:
        row = rows[entry.name]
        if (
            row
            and row.word in _THREE_BATCHES
            and len(unknown) == 1
            and re.fullmatch(r"\d{1,12}", entry.text)
        ):
            return setting, f"; works: {three_batches(int(entry.text), setting.hosts)}"
        if (
            row
            and row.word not in batch.settings
            and (by_value := converted(row.word, entry.text, setting))
        ):
            place_of[entry.name] = by_value
    for entry in unknown:
        row = rows[entry.name]
        if (
            row
            and row.word == "rampup_batch_size"
            and (ramp := _rampup(entry.text, own, list(place_of.values())))
        ):
            place_of |= {name: {} for name, ours in place_of.items() if "global_batch_size" in ours}
            place_of[entry.name] = ramp
        elif not place_of[entry.name] and not (
            row and (row.is_ignored or row.word in batch.settings)
        ):
            return setting, ""
    has_type = setting.values.get("dataset_type") != "python_stdlib" or "dataset_type" in own
    for entry in unknown:
        row, ours = rows[entry.name], place_of[entry.name]
        if ours.get("dataset_path") and not has_type:
            likely = "megatron" if row and row.whose == ("megatron",) else likely_type(entry.text)
            place_of[entry.name] = {**ours, "dataset_type": likely}
    stated = [(name, text) for ours in place_of.values() for name, text in ours.items()]
    # states the batch of prompts again, to replace it
    beside = {} if setting.is_of_prompts else dict(own)
    if any(row and row.word in OF_LOSS for row in rows.values()):
        beside.pop("learning_rate", None)  # stated again, for the mean
    if OF_OLMO in words:
        beside.pop("global_batch_size", None)  # stated again, in tokens
    if any(dict(stated)[name] != text or beside.get(name, text) != text for name, text in stated):
        return setting, ""
    values = settled(place_of)
    flags = (
        None if values is None or not _reads_its_data(values) else _flags(values, setting, machine)
    )
    added = {name: text for name, text in stated if own.get(name) != text}
    found = [*(f"{name}={shlex.quote(text)}" for name, text in added.items()), *(flags or [])]
    return setting, f"; works: {' '.join(found)}" if flags is not None and found else ""


def _reads_its_data(values: Mapping[str, Value]) -> bool:
    try:
        check_data_paths(values)
    except ConfigError:
        return False
    return True


def _flags(values: Mapping[str, Value], setting: Setting, machine: Machine) -> list[str] | None:
    """Returns the flags for the machine of the words; None if the config cannot be planned for it.

    Without a machine, takes the smallest that fits the mesh.
    """
    if machine.plans is None:
        return []
    hosts = setting.hosts or 1
    least = hosts * (dataclasses.replace(setting, values=values).devices_of_replica or 1)
    tried = [setting.devices] if setting.devices else [1, least]
    for devices in tried:
        if machine.plans(values, devices, hosts if setting.devices or machine.hosts else 1):
            break
    else:
        return None
    if not machine.has_flags:
        return []
    flags = [f"--devices {devices}"] if devices > 1 and machine.devices is None else []
    return flags + (
        [f"--hosts {hosts}"] if machine.hosts is None and hosts > 1 and setting.devices else []
    )


def _import(unknown: Sequence[Entry], file: str | None) -> str:
    """Returns the command that imports the file, if one framework has most of its unknown keys."""
    rows = [look_up(entry.name) for entry in unknown]
    whose = Counter(name for row in rows if row for name in row.whose if name in IMPORTED)
    if file is None or not whose:
        return ""
    name, _ = min(whose.items(), key=lambda item: (-item[1], IMPORTED.index(item[0])))
    imported = "megatron" if name == "nemo" else name
    return (
        f"; to convert a config of {FRAMEWORKS[name]}: maxbatch import {imported} "
        f"{shlex.quote(file)}"
    )
