"""Trainers without an importer: their files are recognised, and the words of their batch, rate and
length answered.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from maxbatch.around.importers.translation import SPLIT_AXES, Stated
from maxbatch.around.words import FRAMEWORKS, look_up
from maxbatch.around.words.convert import FIELD_OF, read_number, record_fields
from maxbatch.config.sections import (
    BatchConfig,
    LengthConfig,
    PromptBatchConfig,
    RampConfig,
    RatesConfig,
)
from maxbatch.config.values import shown

_SECTIONS = (BatchConfig, RampConfig, LengthConfig, PromptBatchConfig, RatesConfig)
_OF_GENERATION = ("vllm", "sglang", "generation.")  # words of the program that generates responses
_ANSWERED = SPLIT_AXES | {key.name for section in _SECTIONS for key in section.declared}


class _BatchOfPrompts(NamedTuple):
    """The words of a batch of prompts: each a list of spellings, of which a file states one at
    most.
    """

    prompts: tuple[str, ...]
    responses: tuple[str, ...]  # per prompt
    prompts_of_update: tuple[str, ...] = ()
    responses_of_update: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()


_BATCHES: Mapping[str, _BatchOfPrompts] = {
    "verl": _BatchOfPrompts(
        ("data.train_batch_size",),
        ("actor_rollout_ref.rollout.n",),
        ("actor_rollout_ref.actor.ppo_mini_batch_size",),
    ),
    "nemo_rl": _BatchOfPrompts(
        ("grpo.num_prompts_per_step",),
        ("grpo.num_generations_per_prompt",),
        responses_of_update=("policy.train_global_batch_size",),
    ),
    "openrlhf": _BatchOfPrompts(
        ("rollout_batch_size", "rollout.batch_size"),
        ("n_samples_per_prompt", "rollout.n_samples_per_prompt"),
        responses_of_update=("train_batch_size", "train.batch_size"),
    ),
    "slime": _BatchOfPrompts(
        ("rollout_batch_size",),
        ("n_samples_per_prompt",),
        responses_of_update=("global_batch_size",),
        updates=("num_steps_per_rollout",),
    ),
}


def _signs() -> Mapping[str, tuple[str, ...]]:
    lines = Path(__file__).with_name("answered.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.partition("|") for line in lines if not line.startswith("#"))
    return {name.strip(): tuple(signs.split()) for name, _, signs in rows}


SIGNS = _signs()


def signs_in(words: Mapping[str, Stated], name: str) -> int:
    """Returns how many words only the files of a trainer have."""
    return sum(any(fnmatchcase(word, sign) for sign in SIGNS[name]) for word in words)


def answer(name: str, words: Mapping[str, Stated]) -> str:
    """Explains the words of the batch, the rate and the length in a file of a trainer without an
    importer.
    """
    of_training = [word for word in words if not any(part in word for part in _OF_GENERATION)]
    rows = {
        word: row
        for word in of_training
        if (row := look_up(word, name)) and not _ANSWERED.isdisjoint(row.keys)
    }
    answers = "; ".join(
        f"{shown(word)}={shown(_text(words[word]))} {row.answer()}" for word, row in rows.items()
    )
    rule = (
        f"a config of {FRAMEWORKS[name]} is not converted; its batch, rate and length here: "
        f"{answers or 'none stated'}"
    )
    return "; ".join(
        filter(None, (rule, _fields(name, words), _batch_of_prompts(name, words), _ends_with(name)))
    )


def _fields(name: str, words: Mapping[str, Stated]) -> str:
    """Returns the names of the records' fields in our keys; "" if all are ours."""
    rows = {word: row for word in words if (row := look_up(word, name))}
    names = {
        FIELD_OF[row.word]: _text(words[word]) for word, row in rows.items() if row.word in FIELD_OF
    }
    texts = [
        f"text_field={_text(words[word])}"
        for word, row in rows.items()
        if row.keys == ("text_field",)
    ]
    fields = record_fields(names)
    keys = [*texts, *([f"record_fields={shlex.quote(fields)}"] if fields else [])]
    return f"the fields of its records: {' '.join(keys)}" if keys else ""


def _ends_with(name: str) -> str:
    return (
        "maxbatch plan rl --words prints the same words for a batch of ours"
        if name in _BATCHES
        else ""
    )


def _batch_of_prompts(name: str, words: Mapping[str, Stated]) -> str:
    """Returns the batch of prompts and its updates in our keys, or the reason why they do not fit;
    "" if not stated.
    """
    batch = _BATCHES.get(name)
    if batch is None:
        return ""
    prompts, group = _number(batch.prompts, words), _number(batch.responses, words)
    if prompts is None or group is None:
        return ""
    of_update = _number(batch.prompts_of_update, words)
    responses = _number(batch.responses_of_update, words)
    stated_updates = _number(batch.updates, words)
    if of_update is None and responses is not None:
        of_update = responses / group
    updates = (
        stated_updates
        if stated_updates is not None
        else prompts / of_update
        if of_update
        else Fraction(1)
    )
    product = f"{prompts} prompts x {group} responses = {prompts * group} responses"
    if (
        of_update is not None
        and stated_updates is not None
        and prompts != of_update * stated_updates
    ):
        return (
            f"{product}, but {stated_updates} updates of {of_update * group} responses are "
            f"{of_update * stated_updates * group}"
        )
    if updates.denominator != 1 or (prompts / updates).denominator != 1:
        unit = f"{of_update * group} responses per update" if of_update else f"{updates} updates"
        return f"{product}, and {unit} make no whole number of updates of whole prompts"
    return (
        f"together batch_size={prompts} num_generations={group} num_minibatches={updates}: "
        f"{product}"
    )


def _number(names: tuple[str, ...], words: Mapping[str, Stated]) -> Fraction | None:
    return next(
        (number for name in names if name in words and (number := read_number(_text(words[name])))),
        None,
    )


def _text(value: Stated) -> str:
    return value if isinstance(value, str) else json.dumps(value)
