"""The kind of sample that a config chooses, as one object: a recipe.

A kind is a folder, a row of `Table.KINDS` and the keys that it reads; one of them chooses it
(`key(chooses=...)`). This module declares the facts of a kind. What the rooms above ask of it, in
types that they alone know, they declare as abstract methods (`StoreRecipe`, `StreamRecipe`,
`TrainedRecipe`); the kind of texts has them all, and other kinds extend it. So no room tests for a
kind, and a new kind changes no room.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Self

from maxbatch.config.keys import Keyed, Section
from maxbatch.config.sections import KEYS, AllKeys
from maxbatch.system.registry import Table, load

# The keys that choose a kind, in the order of base.yml, each with the kind.
CHOICES: Mapping[str, str] = {name: key.chooses for name, key in KEYS.items() if key.chooses}
_TEXT = "text"  # the kind where no key chooses another


class Recipe(Section):
    """A kind of sample. As a field of a section, the kind chosen by the config's keys.

    Attributes:
      unit: the unit of a batch, in a word.
      rows_per_sample: rows of `max_target_length` tokens per sample.
      records: its records, for messages.
      fields: the names of a record's fields, for messages; "": records need no fields.
      has_answers: whether a record is a question with answers, so that training may be on answers
        alone. Its texts begin as the tokenizer's chat template does, for any `add_bos`.
      holds_chats: whether a record may be a conversation, so that the model learns to chat.
      is_sampled: whether a sample is a prompt, whose responses the model itself draws.
      documents_per_record: documents of a token store that a record becomes.
      store_records: the records of a store, for messages.
      means: sums of its objective that are recorded as means over the loss weight, by metric.
      counted: the unit of a batch in lines of progress; "": rows.
      takes_parts: whether a user's own model, loss or stream is possible.
      answers_evals: whether each eval writes answers to held-out questions.
    """

    unit = "sample"
    rows_per_sample = 1
    records = "documents"
    fields = ""
    has_answers = False
    holds_chats = False
    is_sampled = False
    documents_per_record = 1
    store_records = "documents"
    means = tuple[str, ...]()
    counted = ""
    takes_parts = True
    answers_evals = False

    def __init_subclass__(cls) -> None:
        """Skips fields: a kind's facts are class attributes."""

    @classmethod
    def of(cls, config: Keyed) -> Self:
        """Returns a kind, or the one that a config's keys choose, as this room's type."""
        # it may lack the keys that choose
        recipe = vars(config).get("recipe") if isinstance(config, Section) else None
        if isinstance(config, Recipe):
            recipe = config
        elif recipe is None:
            kinds = (kind for name, kind in CHOICES.items() if config.get(name))
            recipe = _named(next(kinds, _TEXT))
        assert isinstance(recipe, cls), f"{recipe.name} is a {cls.__name__}"
        return recipe

    @classmethod
    def flagged(cls) -> list[Self]:
        """Returns the kinds that a flag chooses, the last declared first."""
        flags = [
            kind for name, kind in reversed(list(CHOICES.items())) if KEYS[name].kind == "bool"
        ]
        return [recipe for recipe in map(_named, flags) if isinstance(recipe, cls)]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return type(self).__module__.split(".")[-2]

    @property
    def key(self) -> str:
        """The key that chooses it; "": text."""
        return next((name for name, kind in CHOICES.items() if kind == self.name), "")

    @property
    def statement(self) -> str:
        """The setting that chooses it, with its consequence for records."""
        return f"{self.key}=true, whose records are {self.records}"

    def check(self, config: AllKeys) -> None:
        """Raises ConfigError for values of other keys that exclude this kind."""


def check_kind(config: AllKeys) -> None:
    """Raises ConfigError if two keys choose a kind, or if other values exclude the chosen kind."""
    choosing = [name for name in CHOICES if config[name]]
    if len(choosing) > 1:
        *others, chosen = sorted(choosing, key=lambda name: KEYS[name].kind != "bool")
        raise config.fault(others[0], f"false beside {_named(CHOICES[chosen]).statement}", "false")
    Recipe.of(config).check(config)


def slots_per_sample(config: Keyed) -> int:
    """Returns the token slots of a sample: L for each of its rows."""
    return int(config["max_target_length"]) * Recipe.of(config).rows_per_sample


def slots_per_row(config: Keyed) -> int:
    """Returns the token slots of a row of an update: a sample's, unless samples share rows."""
    shares = config["max_tokens_per_pass"] is not None
    return int(config["max_target_length"]) if shares else slots_per_sample(config)


@functools.cache
def _named(name: str) -> Recipe:
    """Loads a recipe on demand: kinds stand above this room."""
    recipe = load(Table.KINDS, name)
    assert isinstance(recipe, Recipe), f"{name} is a recipe"
    return recipe
