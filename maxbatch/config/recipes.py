"""The kind of sample that a config chooses, as one object: a recipe.

A kind is a file of `maxbatch/recipes/` and the keys that it reads, of which one names it (`key(chooses=...)`). This
module declares the facts of a kind; the rooms above declare what they ask of it (`StoreRecipe`, `StreamRecipe`,
`TrainedRecipe`), each with plain text's answer as the default. So no room asks which kind a run has, and a new kind
changes none of them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Self

from maxbatch.config.keys import Keyed, Section
from maxbatch.config.sections import KEYS
from maxbatch.config.values import Value
from maxbatch.system.errors import ConfigError

_TEXT = "text"  # the kind where no key chooses another
_ROOM = "maxbatch.recipes"
Fault = Callable[..., ConfigError]  # of a key, a rule and the nearest value


class Recipe(Section):
    """A kind of sample. As a field of a section it is the kind that the config's keys choose.

    Attributes:
      unit: what a batch counts, in a word.
      rows_per_sample: rows of `max_target_length` tokens that a sample has.
      records: the records of its data, for messages.
      fields: how the fields of such a record are named, for messages; "": its data need no fields.
      has_answers: whether a record is a question with answers, of which the answers alone may be trained on. Its texts
        begin as the tokenizer's chat template begins them, whatever `add_bos`.
      holds_chats: whether a record may be a conversation, so that a model may have learnt to chat.
      is_sampled: whether a sample is a prompt, whose responses the model itself draws.
    """

    unit = "sample"
    rows_per_sample = 1
    records = "documents"
    fields = ""
    has_answers = False
    holds_chats = False
    is_sampled = False

    def __init_subclass__(cls) -> None:
        """Takes no field from a kind's annotations: its facts are those of its class."""

    @classmethod
    def of(cls, config: Keyed) -> Self:
        """Returns the kind that a whole config or a section chooses, as far as this room knows it."""
        found = config if isinstance(config, Recipe) else getattr(config, "recipe", None)
        if not isinstance(found, Recipe):
            found = _named(next((kind for name, kind in choices().items() if _is_stated(config, name)), _TEXT))
        assert isinstance(found, cls), f"{found.name} is a {cls.__name__}"
        return found

    @classmethod
    def flagged(cls) -> list[Self]:
        """Returns the kinds that a flag chooses, the last declared first."""
        flags = [kind for name, kind in reversed(list(choices().items())) if _kind_of_key(name) == "bool"]
        return [found for found in map(_named, flags) if isinstance(found, cls)]

    @property
    def name(self) -> str:
        """The name of its file."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def key(self) -> str:
        """The key that chooses it; "" for text."""
        return next((name for name, kind in choices().items() if kind == self.name), "")

    @property
    def statement(self) -> str:
        """The statement that chooses it, and what follows for other keys."""
        return f"{self.key}=true, whose records are {self.records}"

    def check(self, values: Mapping[str, Value], fault: Fault) -> None:
        """Raises ConfigError for values of other keys that this kind cannot have."""


@functools.cache
def choices() -> Mapping[str, str]:
    """Returns the keys that choose a kind of sample, in the order of base.yml, each with the kind."""
    return {key.name: key.chooses for key in KEYS if key.chooses}


def check_kind(values: Mapping[str, Value], fault: Fault) -> None:
    """Raises ConfigError if two keys choose a kind, or if the kind that is chosen cannot have the other values."""
    stated = [name for name in choices() if values[name]]
    if len(stated) > 1:
        *others, chosen = sorted(stated, key=lambda name: _kind_of_key(name) != "bool")
        raise fault(others[0], f"false beside {_named(choices()[chosen]).statement}", "false")
    Recipe.of(values).check(values, fault)


def slots_per_sample(config: Keyed) -> int:
    """Returns the tokens that a sample has room for: L of each of its rows."""
    return int(config["max_target_length"]) * Recipe.of(config).rows_per_sample


def _is_stated(config: Keyed, name: str) -> bool:
    """Returns whether a key is set; a section may not hold it."""
    try:
        return bool(config[name])
    except KeyError:
        return False


def _kind_of_key(name: str) -> str:
    return next(key.kind for key in KEYS if key.name == name)


@functools.cache
def _named(name: str) -> Recipe:
    """Returns the recipe of a file of the room of recipes, which is above this one: read only for the kind in use."""
    recipe = importlib.import_module(f"{_ROOM}.{name}").RECIPE
    assert isinstance(recipe, Recipe), f"{name} is a recipe"
    return recipe
