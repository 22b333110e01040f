"""Names of other programs' settings, as messages about unknown keys need them.

Who knows such names registers from above (`Table.WORDS`); the core knows our keys alone. The object
is loaded when a message first asks, since most runs need no foreign word.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from maxbatch.config.keys import Entry
from maxbatch.config.values import Value
from maxbatch.system.registry import Table, load, names

# Returns a config's values with these settings in place of its unknown entries, by their names;
# None if they are refused.
Settled = Callable[[Mapping[str, Mapping[str, str]]], Mapping[str, Value] | None]
Plans = Callable[[Mapping[str, Value], int, int], bool]


class Machine(NamedTuple):
    """The machine of a command line."""

    devices: int | None = None  # None: unknown
    hosts: int | None = None
    # whether a config can be planned for devices and hosts; None: unknown
    plans: Plans | None = None
    has_flags: bool = False  # whether the command takes --devices and --hosts


class ForeignWord(Protocol):
    """A name in other programs, with its counterpart here."""

    @property
    def word(self) -> str:
        """The name there; * matches any text."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that correspond to it; empty without a counterpart."""

    def answer(self) -> str:
        """Returns the message for a user who types the word."""


class Replacement(NamedTuple):
    """The settings that replace unknown entries."""

    is_of_prompts: bool  # whether the config without them trains on prompts
    works: str  # "; works: " and the settings; "" if not every entry can be replaced


class ForeignWords(ABC):
    """The table of other programs' words."""

    @abstractmethod
    def meanings(self, name: str, is_of_prompts: bool) -> Sequence[ForeignWord]:
        """Returns the words with a name, one for each counterpart here; empty if none has it.

        Args:
          name: the name as typed; case, leading dashes, `-` and blanks do not matter.
          is_of_prompts: leaves out all but words of reinforcement learning, if there are any.
        """

    @abstractmethod
    def elsewhere(self, key: str) -> ForeignWord | None:
        """Returns the word that has the name of a key of ours for batches of prompts, but another
        meaning; None if there is none.
        """

    @abstractmethod
    def batch_of(self, key: str, values: Mapping[str, Value]) -> Mapping[str, str]:
        """Returns the settings that give what a key's value, read as another program's word, states
        of the batch; empty if none do.
        """

    @abstractmethod
    def replacement(
        self,
        unknown: Sequence[Entry],
        settled: Settled,
        known_texts: Mapping[str, str],
        machine: Machine,
    ) -> Replacement:
        """Returns the settings that replace unknown entries; `UnknownKeys` has the arguments."""

    @abstractmethod
    def import_command(self, unknown: Sequence[Entry], file: str | None) -> str:
        """Returns the advice to import a config file, if one program has most of the unknown keys;
        else "".
        """


def normal(name: str) -> str:
    """Returns a flag or a name in the spelling of tables of words: no leading dashes, `-` and
    blanks as `_`, lower case.
    """
    return re.sub(r"[-\s]+", "_", name.strip().lstrip("-")).lower()


def foreign_words() -> ForeignWords:
    """Loads the table of other programs' words."""
    (name,) = names(Table.WORDS)
    words = load(Table.WORDS, name)
    assert isinstance(words, ForeignWords), f"{name} is a table of foreign words"
    return words
