"""Comparison of configs: the facts that hosts must share, and the changes of a resume.

A key's row in the table states both (`shared`, `changes`); `docs/depends.md` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping

from maxbatch.config.config import Config
from maxbatch.config.keys import Fixes, Key, Shared
from maxbatch.config.sections import KEYS, THE_BATCH, names_fixing
from maxbatch.config.values import Value, shown, value_text
from maxbatch.config.yaml_file import entries
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath


def facts_of(config: Mapping[str, Value]) -> dict[str, str]:
    """Returns the facts of a config that hosts compare before they read any data, as texts by
    key.
    """
    facts = {}
    for name, key in KEYS.items():
        value = config[name]
        if key.shared is Shared.VALUE:
            facts[name] = value_text(value)
        elif key.shared is not Shared.NOTHING:
            facts[name] = "stated" if value else "not stated"
    return facts


def program_keys(config: Mapping[str, Value]) -> dict[str, str]:
    """Returns the values of the keys that fix the compiled programs, as texts by key."""
    return {name: value_text(config[name]) for name in names_fixing(Fixes.PROGRAM)}


_PINNED = Fixes.STREAM | Fixes.MODEL | Fixes.ADAPTERS | Fixes.PROMPTS
_ANYWHERE = Fixes.RECORDS | Fixes.CONTENT  # pinned by content alone
THE_CUT = "only the micro-batches"


def states_batch(name: str) -> bool:
    """Returns whether a key states the batch in samples."""
    return KEYS[name].changes == THE_BATCH


def read_written(path: AnyPath) -> Config | None:
    """Reads the config written by a run, without the environment; returns None if it cannot be
    read.

    Missing keys are newer than the run, so they have their defaults.
    """
    try:
        texts = {entry.name: (entry.text, entry.plain) for entry in entries(path)}
        return Config.of(
            {name: key.read(*texts.get(name, (key.default,))) for name, key in KEYS.items()}
        )
    except ConfigError:
        return None


def is_pinned(key: Key) -> bool:
    """Returns whether a resume refuses another value of a key, whatever the content that it
    names.
    """
    names_content = key.kind in ("paths", "path")
    return bool(
        key.fixes & _PINNED & ~_ANYWHERE
        or (key.fixes & Fixes.CONTENT and not names_content and key.changes)
    )


def pinned_changes(previous: Config, config: Config) -> list[str]:
    """Returns the keys in which two configs of a run differ, and whose changes a resume refuses."""
    return [
        name
        for name, key in KEYS.items()
        if previous[name] != config[name]
        and is_pinned(key)
        and (config.recipe.is_sampled or key.fixes & ~Fixes.PROMPTS)
    ]


def changed_since(
    previous: Mapping[str, Value], config: Mapping[str, Value], of_batch: str = THE_BATCH
) -> dict[str, str]:
    """Returns a line for each key whose value differs from the previous session's and changes the
    run, by key.

    `of_batch` is the effect of the keys of the batch: `THE_BATCH` or `THE_CUT`.
    """
    states_prompts = previous["batch_size"] is not None  # then no key states the batch in samples
    lines = {}
    for name, key in KEYS.items():
        if (
            previous[name] != config[name]
            and key.changes
            and not (states_prompts and states_batch(name))
        ):
            before, now = (shown(value_text(values[name])) or '""' for values in (previous, config))
            effect = of_batch if states_batch(name) else key.changes
            lines[name] = f"{name}: {before} before, {now} now: changes {effect}"
    return lines
