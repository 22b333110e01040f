"""Settings in place of unknown entries, when these are other programs' words."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from maxbatch.around.words import FRAMEWORKS, Word, look_up, meanings
from maxbatch.around.words.convert import (
    FIELD_OF,
    OF_LOSS,
    Setting,
    converted,
    rampup_schedule,
    read_number,
    record_fields,
)
from maxbatch.around.words.skipped import SKIPPING
from maxbatch.around.words.together import OF_OLMO, together
from maxbatch.config.foreign_words import ForeignWords, Machine, Replacement, Settled
from maxbatch.config.keys import Entry
from maxbatch.config.rules import check_data_paths, likely_type
from maxbatch.config.sections import KEYS
from maxbatch.config.unknown import key_in_block, spelt_key
from maxbatch.config.values import Value
from maxbatch.system.errors import ConfigError
from maxbatch.system.registry import Table, names

_EPOCHS = "num_train_epochs"  # of Hugging Face
_THREE_BATCHES = ("batch_size", "b")  # words with three meanings among frameworks


def _rows_of(name: str, is_of_prompts: bool) -> Sequence[Word]:
    """Returns the rows of a word; in reinforcement learning only its own rows, if there are any."""
    rows = meanings(name)
    of_prompts = [row for row in rows if row.is_of_prompts]
    return of_prompts if is_of_prompts and of_prompts else rows


def three_batches(batch: int, hosts: int | None) -> str:
    """Returns the settings for the three meanings of `--batch-size`."""
    of_node = f"{batch} x nodes" if hosts is None else str(batch * hosts)
    return (
        f"global_batch_size={batch} (of all devices), per_device_batch_size={batch} (of each "
        f"process) or global_batch_size={of_node} (of each node)"
    )


def _rampup(
    text: str, known_texts: Mapping[str, str], rest: Sequence[Mapping[str, str]]
) -> Mapping[str, str] | None:
    """Returns the setting for Megatron-LM's ramp, if the final batch is stated beside it."""
    batches = [
        settings["global_batch_size"]
        for settings in (known_texts, *rest)
        if "global_batch_size" in settings
    ]
    numbers = [*re.findall(r"\d{1,12}", text), *batches[-1:]]
    if len(numbers) != 4 or not all(number.isdigit() for number in numbers):
        return None
    schedule = rampup_schedule(*map(int, numbers))
    return {"batch_size_schedule": schedule} if schedule else None


def _settings(
    unknown: Sequence[Entry], settled: Settled, known_texts: Mapping[str, str], machine: Machine
) -> tuple[Setting, str]:
    """Returns the config without the unknown entries, and the settings that replace them, if all
    can be replaced.
    """
    # The settings in place of each entry, by its name; none yet.
    place_of: dict[str, Mapping[str, str]] = {entry.name: {} for entry in unknown}
    setting = Setting(settled(place_of) or {}, machine.devices, machine.hosts)
    rows = {
        entry.name: next(iter(_rows_of(entry.name, setting.is_of_prompts)), None)
        for entry in unknown
    }
    words = {row.word: entry.text for entry in unknown if (row := rows[entry.name])}
    if read_number(words.get("max_steps", "")):  # takes precedence over epochs there
        rows = {
            name: row._replace(here="-") if row and row.word == _EPOCHS else row
            for name, row in rows.items()
        }

    # Our keys under another spelling, or in a block.
    for entry in unknown:
        row = rows[entry.name]
        key = key_in_block(entry.name, [row] if row else []) or (
            row.keys[0] if row and row.is_same else ""
        )
        key = key or spelt_key(entry.name, [row] if row else [])
        if key in KEYS:
            place_of[entry.name] = {key: entry.text}
    setting = dataclasses.replace(setting, values=settled(place_of) or setting.values)

    # The batch and the machine, which several words state together.
    batch = together(words, known_texts, setting)
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

    # The fields of records: all words in one setting.
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

    # Words with a conversion of their own.
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
            if row.word in SKIPPING:  # it states the length that is left
                place_of |= {
                    name: {key: by_value.get(key, text) for key, text in settings.items()}
                    for name, settings in place_of.items()
                }
            place_of[entry.name] = by_value

    # A ramp needs the final batch, whichever word stated it; it then has the place of that word.
    for entry in unknown:
        row = rows[entry.name]
        if (
            row
            and row.word == "rampup_batch_size"
            and (ramp := _rampup(entry.text, known_texts, list(place_of.values())))
        ):
            place_of |= {
                name: {} for name, settings in place_of.items() if "global_batch_size" in settings
            }
            place_of[entry.name] = ramp
        elif not place_of[entry.name] and not (
            row and (row.is_ignored or row.word in batch.settings)
        ):
            return setting, ""

    # A path of data needs the type that reads it.
    has_type = (
        setting.values.get("dataset_type") != "python_stdlib" or "dataset_type" in known_texts
    )
    for entry in unknown:
        row, settings = rows[entry.name], place_of[entry.name]
        if settings.get("dataset_path") and not has_type:
            likely = "megatron" if row and row.whose == ("megatron",) else likely_type(entry.text)
            place_of[entry.name] = {**settings, "dataset_type": likely}
    replacing = [(name, text) for settings in place_of.values() for name, text in settings.items()]

    # Two words may not state one key differently, nor contradict a key stated beside them. A batch
    # of prompts is stated again, to replace it.
    beside = {} if setting.is_of_prompts else dict(known_texts)
    if any(row and row.word in OF_LOSS for row in rows.values()):
        beside.pop("learning_rate", None)  # stated again, for the mean
    if words.keys() & set(SKIPPING):  # stated again, without what is skipped
        beside = {
            name: text for name, text in beside.items() if name not in ("steps", "train_samples")
        }
    if OF_OLMO in words:
        beside.pop("global_batch_size", None)  # stated again, in tokens
    if any(
        dict(replacing)[name] != text or beside.get(name, text) != text for name, text in replacing
    ):
        return setting, ""

    values = settled(place_of)
    flags = (
        None if values is None or not _reads_its_data(values) else _flags(values, setting, machine)
    )
    added = {name: text for name, text in replacing if known_texts.get(name) != text}
    words_to_type = [
        *(f"{name}={shlex.quote(text)}" for name, text in added.items()),
        *(flags or []),
    ]
    return (
        setting,
        f"; works: {' '.join(words_to_type)}" if flags is not None and words_to_type else "",
    )


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


class Words(ForeignWords):
    """The words of `words.txt`, as the core asks for them."""

    def meanings(self, name: str, is_of_prompts: bool) -> Sequence[Word]:
        return _rows_of(name, is_of_prompts)

    def elsewhere(self, key: str) -> Word | None:
        row = look_up(key)
        return row if row and not row.is_of_prompts else None

    def batch_of(self, key: str, values: Mapping[str, Value]) -> Mapping[str, str]:
        batch = together({key: str(values[key])}, {}, Setting(values))
        return batch.settings.get(key, {}) if batch else {}

    def replacement(
        self,
        unknown: Sequence[Entry],
        settled: Settled,
        known_texts: Mapping[str, str],
        machine: Machine,
    ) -> Replacement:
        setting, works = _settings(unknown, settled, known_texts, machine)
        return Replacement(setting.is_of_prompts, works)

    def import_command(self, unknown: Sequence[Entry], file: str | None) -> str:
        rows = [look_up(entry.name) for entry in unknown]
        formats = names(Table.IMPORTERS)
        whose = Counter(name for row in rows if row for name in row.whose if name in formats)
        if file is None or not whose:
            return ""
        name, _ = min(whose.items(), key=lambda item: (-item[1], formats.index(item[0])))
        imported = "megatron" if name == "nemo" else name
        return (
            f"; to convert a config of {FRAMEWORKS[name]}: maxbatch import {imported} "
            f"{shlex.quote(file)}"
        )


WORDS = Words()
