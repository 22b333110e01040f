"""Words of other frameworks, each with its key here or the reason for having none (`words.txt`).

The table is read on first use, since most runs need no word. Hints, docs and `maxbatch import` use
it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from maxbatch.config.foreign_words import normal
from maxbatch.config.sections import PromptBatchConfig, RLConfig

FRAMEWORKS = {
    "maxtext": "MaxText", "hf": "Hugging Face", "deepspeed": "DeepSpeed", "axolotl": "Axolotl",
    "megatron": "Megatron-LM", "nemo": "NeMo", "keras": "Keras", "torch": "PyTorch", "lightning": "Lightning",
    "nanogpt": "nanoGPT", "torchtitan": "torchtitan", "levanter": "Levanter", "olmo": "OLMo-core",
    "trl": "TRL", "verl": "verl", "llamafactory": "LLaMA-Factory", "mlx": "mlx-lm", "nemo_rl": "NeMo-RL",
    "openrlhf": "OpenRLHF", "slime": "slime", "composer": "Composer", "paxml": "Paxml",
}  # fmt: skip

_OF_PROMPTS = frozenset(
    key.name for section in (PromptBatchConfig, RLConfig) for key in section.declared
)


class Word(NamedTuple):
    """A row of the table."""

    word: str  # as in that framework; * matches any text
    whose: tuple[str, ...]  # keys of FRAMEWORKS
    here: str  # as in words.txt: KEY, ~KEY ..., -, ! or !!
    why: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that correspond to it; empty without a counterpart."""
        return () if self.here[0] in "-!" else tuple(self.here.lstrip("~").split())

    @property
    def is_same(self) -> bool:
        """Whether it is one of our keys, with the same value."""
        return self.here[0] not in "-!~"

    @property
    def is_ignored(self) -> bool:
        """Whether it can be left out without effect on training."""
        return self.here == "-"

    @property
    def is_of_prompts(self) -> bool:
        """Whether it is a word of reinforcement learning."""
        return set(self.whose) <= {"trl", "verl", "nemo_rl", "openrlhf", "slime"} or not set(
            self.keys
        ).isdisjoint(_OF_PROMPTS)

    @property
    def changes_data(self) -> bool:
        """Whether the batch or the data would change without it."""
        return self.here == "!!"

    def answer(self) -> str:
        """Returns the message for a user who types the word."""
        names = ", ".join(FRAMEWORKS[name] for name in self.whose)
        if self.is_same:
            return f"({names}) is {self.keys[0]}: {self.why}"
        if self.keys:
            return f"({names}) maps to {_listed(self.keys)}: {self.why}"
        rule = "can be left out" if self.is_ignored else "is not supported"
        return f"({names}) {rule}: {self.why}"


def _listed(names: Sequence[str]) -> str:
    """Returns "a", "a and b" or "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


@functools.cache
def rows() -> tuple[Word, ...]:
    """Returns the table, in its order."""
    lines = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines()
    cells = (
        [cell.strip() for cell in line.split("|")]
        for line in lines
        if "|" in line and not line.startswith("#")
    )
    return tuple(
        Word(word, tuple(whose.split(", ")), here, why)
        for words, whose, here, why in cells
        for word in words.split(", ")
    )


@functools.cache
def _by_word() -> Mapping[str, tuple[Word, ...]]:
    by_word: dict[str, tuple[Word, ...]] = {}
    for row in rows():
        by_word[row.word] = (*by_word.get(row.word, ()), row)
    return by_word


@functools.cache
def _patterns() -> tuple[Word, ...]:
    return tuple(row for row in rows() if "*" in row.word)


def meanings(word: str) -> tuple[Word, ...]:
    """Returns the rows of a word, one for each counterpart here; empty for an unknown word."""
    first = look_up(word)
    rest = _by_word()[first.word] if first else ()
    by_here = {row.here: row for row in reversed(rest)}
    return tuple(row for row in rest if by_here[row.here] is row)


def look_up(word: str, whose: str | None = None) -> Word | None:
    """Returns the row of a word in one framework, or (None) in any; None for an unknown word.

    A path of a nested file is looked up whole, then by its last name; rows with `*` come last.
    """
    name = normal(word)
    # MaxText's configs are flat: a nested mapping belongs to another model.
    tried_names = (name,) if whose == "maxtext" else (name, name.rpartition(".")[2])
    exact = (row for tried in dict.fromkeys(tried_names) for row in _by_word().get(tried, ()))
    patterns = (
        row
        for tried in dict.fromkeys(tried_names)
        for row in _patterns()
        if fnmatchcase(tried, row.word)
    )
    return next(
        (row for row in itertools.chain(exact, patterns) if whose is None or whose in row.whose),
        None,
    )
