"""The translation of another program's config: the fate of each of its words, and our config.

A format (`maxtext`, `hf`, ...) takes the words that need more than another name. The table of words
(`maxbatch.around.words`) covers the rest; words missing there are not supported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from maxbatch.around.importers.hub import hub_step, is_hub_name
from maxbatch.around.words import Word, look_up
from maxbatch.config.keys import Fixes, Part
from maxbatch.config.loading import load_config
from maxbatch.config.sections import KEYS
from maxbatch.config.values import plain_number, shown
from maxbatch.system.errors import ConfigError

Stated = str | list[object]  # a value as written, or a list

BESIDE = {
    "megatron": "nemo",
    "nemo": "megatron",
    "trl": "hf",
    "llamafactory": "hf",
}  # frameworks whose words are read together
MAPPED, NEEDS_YOU, IGNORED, UNSUPPORTED = "mapped", "needs you", "ignored", "not supported"
# Values at which an unsupported word has no effect.
_NOTHING = (
    "",
    "null",
    "none",
    "~",
    "false",
    "0",
    "0.",
    "0.0",
    "-1",
    "-1.0",
    "[]",
    "{}",
    "default",
    "disabled",
    "no",
)
# Words of adapters or another objective; those of a rank in attention (q_lora_rank) are not meant.
_OBJECTIVE = re.compile(
    r"(^|\.|enable_|use_)q?lora([._]|$)|(^|[._])(peft|dpo|orpo|kto|grpo|ppo|rlhf|distill\w*|teacher\w*)([._]|$)"
)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")  # of a shell, not set in a file
_OF_MODEL = "the named model's file overrides it in MaxText"
# The axes that split one replica over devices.
SPLIT_AXES = frozenset(
    f"{net}_{axis}_parallelism"
    for net in ("ici", "dcn")
    for axis in ("tensor", "context", "pipeline")
)
_ONE_IS_NOTHING = (
    "parallelism",
    "num_experts",
    "num_experts_per_tok",
    "_factor",
    "_size",
    "_degree",
    "mscale",
)


class Merged(str):
    """A value that YAML's `<<` also copies into another mapping."""


class Displaced(str):
    """A value overridden by the named model's file."""


class NameOfFile(str):
    """The name of a file whose words are already included."""


class Fate(NamedTuple):
    """The fate of a word."""

    word: str
    value: str
    fate: str  # MAPPED, NEEDS_YOU (mapped; works after the step in `says`), IGNORED or UNSUPPORTED
    says: str  # the result, the reason to ignore it, or the missing feature
    # unsupported: whether the batch, length, data or model depends on it
    is_essential: bool = False


class Translation:
    """The words of a file, taken one by one by a format.

    Attributes:
      settings: our config, as texts.
      devices: the other program's devices, if stated.
      updates: updates per batch of prompts; 1 if unknown.
      fates: the fates of the words.
    """

    def __init__(
        self,
        words: Mapping[str, Stated],
        defaults: Mapping[str, str],
        framework: str,
        devices: int | None = None,
    ) -> None:
        self.framework, self.devices, self.updates = framework, devices, 1
        self.settings: dict[str, str] = {}
        # data sets by name, where a file beside this one describes them
        self.described: Mapping[str, object] = {}
        self.fates: list[Fate] = []
        lost = {word: value for word, value in words.items() if isinstance(value, Displaced)}
        self.fates += [
            Fate(word, shown(value, 40), IGNORED, _OF_MODEL) for word, value in lost.items()
        ]
        self._stated = {word: value for word, value in words.items() if word not in lost}
        self._defaults = dict(defaults)
        self._left = dict.fromkeys([*self._stated, *defaults])
        self._taken = set[str]()
        self._words: dict[str, str] = {}  # the source word of each of our settings
        self._written: dict[str, str] = {}  # spellings in the file of renamed words
        self._is_default: Callable[[str, Stated], bool] = lambda word, value: False

    def __contains__(self, word: str) -> bool:
        """Returns whether the file states the word with a non-empty value."""
        return word in self._stated and self.text(word).lower() not in ("", "null", "none", "~")

    def text(self, word: str, default: str = "") -> str:
        """Returns the value of a word as text: stated, or the other program's default."""
        value = self._stated.get(word, self._defaults.get(word, default))
        return value.strip() if isinstance(value, str) else json.dumps(value)

    def items(self, word: str) -> list[str]:
        """Returns the items of a list, or a text as one item."""
        value = self._stated.get(word, self._defaults.get(word, ""))
        return (
            [str(item) for item in value] if isinstance(value, list) else [value] if value else []
        )

    def number(self, word: str) -> float | None:
        try:
            number = float(self.text(word).replace("_", ""))
        except ValueError:
            return None
        return number if math.isfinite(number) else None

    def sources(self, word: str) -> list[dict[str, str]]:
        """Returns the items of a list of data sets; empty unless each is a mapping with a path."""
        value = self._stated.get(word, [])
        items = value if isinstance(value, list) else []
        named = [
            item
            for item in items
            if isinstance(item, dict) and isinstance(item.get("path"), str) and item["path"]
        ]
        return named if len(named) == len(items) else []

    def left(self) -> list[str]:
        """Returns the words not taken yet."""
        return list(self._left)

    def is_left(self, word: str) -> bool:
        return word in self._left

    def states_below(self, *blocks: str) -> bool:
        """Returns whether the file states words in these blocks."""
        return any(word.startswith(blocks) for word in self._stated)

    def is_taken(self, word: str) -> bool:
        return word in self._taken

    def assume(self, defaults: Mapping[str, str]) -> None:
        """Adds defaults of the other program, over existing ones."""
        self._defaults |= defaults
        self._left |= dict.fromkeys(
            name for name in defaults if name not in self._left and name not in self._taken
        )

    def rename(self, word: str, name: str) -> None:
        """Takes a word as a synonym; if the synonym has another value, neither is supported."""
        if name in self and self._stated[name] != self._stated[word]:
            other = self._written.get(name, name)
            self.refuse(
                word, f"{other} is {shown(self.text(name), 40)}", is_essential=_may_state_run(name)
            )
            return
        self._stated[name] = self._stated.pop(word)
        self._written[name] = word
        self._left = dict.fromkeys(
            name if left == word else left for left in self._left if left != name
        )

    def expand(self, word: str) -> None:
        """Replaces a word whose value is a mapping as JSON by its words: `a={"b": 1}` is
        `a.b=1`.
        """
        try:
            inner = json.loads(self.text(word).replace("'", '"'))
        except (ValueError, RecursionError):
            return
        if word not in self._left or not isinstance(inner, dict) or not inner:
            return
        del self._stated[word]
        flat = {f"{word}.{name}": value for name, value in inner.items()}
        self._stated |= {
            name: v if isinstance(v, str | list) else json.dumps(v) for name, v in flat.items()
        }
        self._left = dict.fromkeys(
            name for left in self._left for name in (flat if left == word else [left])
        )

    def excuse(self, is_default: Callable[[str, Stated], bool]) -> None:
        """Treats words without a counterpart as unstated if they have the other program's
        defaults.
        """
        self._is_default = is_default

    def is_merged(self, word: str) -> bool:
        """Returns whether the word is only an anchor for `<<`, stated elsewhere."""
        last = word.rpartition(".")[2]
        others = (
            other for other in self._stated if other != word and other.rpartition(".")[2] == last
        )
        return "." in word and isinstance(self._stated.get(word), Merged) and any(others)

    def is_read(self, word: str) -> bool:
        """Returns whether a word names a file whose words are included."""
        return isinstance(self._stated.get(word), NameOfFile)

    def drop(self, word: str) -> None:
        """Drops a default that does not apply."""
        if word in self._left and word not in self._stated:
            del self._left[word]

    def is_true(self, word: str) -> bool:
        return self.text(word).lower() in ("true", "1", "yes", "on")

    def map(self, word: str, why: str = "", **settings: str) -> None:
        """Maps a word to settings of ours; values that our keys refuse are not supported."""
        self._settle(word, MAPPED, why, settings)

    def need(self, word: str, step: str, **settings: str) -> None:
        """Maps a word to settings of ours that need a step by the user."""
        self._settle(word, NEEDS_YOU, step, settings)

    def _settle(self, word: str, fate: str, why: str, settings: Mapping[str, str]) -> None:
        try:
            for name, text in settings.items():
                KEYS[name].read(text)
        except ConfigError as error:
            self._lack(word, str(error), is_essential=any(_states_run(name) for name in settings))
            return
        if unset := _unset(settings.values()):
            fate, why = (
                NEEDS_YOU,
                "; ".join(
                    filter(None, (f"the file does not set {unset}: put its value there", why))
                ),
            )
        self.settings |= settings
        self._words |= dict.fromkeys(settings, word)
        said = " ".join(f"{name}={shown(text)}" for name, text in settings.items())
        self._tell(word, fate, ": ".join(text for text in (said, why) if text))

    def split(self, word: str, axis: str, why: str = "") -> None:
        """Takes a word as devices that hold one replica between them, a factor of a mesh axis."""
        number = self.number(word)
        if number is None or number < 1 or not number.is_integer():
            self.refuse(word, "must be a whole number of devices, from 1", is_essential=True)
        elif number == 1:
            self.ignore(word, "1 has no effect")
        else:
            self.map(word, why, **{axis: str(int(number) * int(self.settings.get(axis, "1")))})

    @property
    def replica(self) -> int:
        """Devices that hold one replica between them."""
        return math.prod(int(self.settings.get(axis, 1)) for axis in SPLIT_AXES)

    def rows_of_device(self, word: str) -> str:
        """Returns a word's rows of a replica as rows of each of its devices; text that is no number
        as it is.
        """
        try:
            return str(plain_number(Fraction(self.text(word).replace("_", "")) / self.replica))
        except (ValueError, ZeroDivisionError):
            return self.text(word)

    def replica_in_words(self) -> str:
        """Returns the reason why a device has less rows than a replica; "" if a replica is one
        device.
        """
        return "" if self.replica == 1 else f"a replica is split over {self.replica} devices"

    def ignore(self, word: str, why: str) -> None:
        """Ignores a word without effect on training."""
        self._tell(word, IGNORED, why)

    def _lack(self, word: str, why: str, is_essential: bool) -> None:
        """Refuses a word without a counterpart, unless it has its default."""
        if word in self._stated and self._is_default(word, self._stated[word]):
            self.ignore(word, f"MaxText's default; at others: {why}")
        else:
            self.refuse(word, why, is_essential)

    def refuse(self, word: str, why: str, is_essential: bool = False) -> None:
        """Refuses a word without a counterpart that affects training; essential ones are never
        skipped.
        """
        if unset := _unset([*self.items(word), why]):
            rest = "" if _VARIABLE.search(why) else f"; {why}"
            why = (
                f"the file does not set {unset}: put a line with its value before the command{rest}"
            )
        self._tell(word, UNSUPPORTED, why, is_essential)

    def finish(self) -> None:
        """Takes the remaining words by the table of words."""
        for word in list(self._left):
            self._by_table(word)
        while fault := _fault(self.settings):
            name = fault.partition("=")[0]
            if name not in self._words:
                return  # values exclude each other, and the unsupported word is unknown
            self._take_back(self._words[name], fault)

    def _take_back(self, word: str, fault: str) -> None:
        """Marks a mapped word as not supported, because a rule of ours refuses its value."""
        names = [name for name, source in self._words.items() if source == word]
        for name in names:
            del self._words[name], self.settings[name]
        self.fates = [fate for fate in self.fates if fate.word != self._written.get(word, word)]
        self._lack(word, fault, is_essential=any(_states_run(name) for name in names))

    def _by_table(self, word: str) -> None:
        value, row = self.text(word), self._row(word)
        if (
            row is not None
            and row.is_same
            and word not in self._stated
            and row.keys[0] in self.settings
        ):
            del self._left[word]  # a default; another word states the same
            return
        if self.is_merged(word):
            self.ignore(word, "<< states it elsewhere")
            return
        name = word.rpartition(".")[2]
        if (
            "." in word
            and self.framework != "maxtext"
            and states_training(word)
            and not _says_nothing(name, value)
        ):
            self.refuse(
                word, "configures adapters or another objective; not imported", is_essential=True
            )
            return
        is_ours = self.framework == "maxtext" and word in KEYS and KEYS[word].maxtext_name == word
        if is_ours and (row is None or row.word != word or row.here[0] == "!"):
            self.map(word, **{word: value})
        elif row is None:
            why = "not in the table of words; maxbatch config lists the keys"
            self._lack(word, why, _may_state_run(name) or states_training(word))
        elif row.is_same:
            self._map_same(word, row.keys[0], value)
        elif row.is_ignored:
            self.ignore(word, row.why)
        elif _says_nothing(name, value):
            self.ignore(word, f"{shown(value) or 'empty'} has no effect")
        else:
            is_schedule = name.startswith(("lr_", "learning_rate"))  # a key states their length too
            is_essential = row.changes_data or any(
                _states_run(key) for key in row.keys if not is_schedule
            )
            is_essential = is_essential or states_training(word)
            self._lack(word, row.why, is_essential)

    def _map_same(self, word: str, key: str, value: str) -> None:
        """Maps a word to a key, unless another word set that key differently."""
        other = self._words.get(key, word)
        if (
            other != word
            and other in self._stated
            and not _is_equal(key, value, self.settings[key])
        ):
            why = f"{self._written.get(other, other)} states {key}={shown(self.settings[key], 40)}"
            self.refuse(word, why, is_essential=_states_run(key))
        elif key == "tokenizer_path" and "tokenizer_type" not in self.settings:
            kind = "sentencepiece" if value.endswith(".model") else "huggingface"
            self._from_hub(word, value, tokenizer_path=value, tokenizer_type=kind)
        elif key in ("tokenizer_path", "load_parameters_path"):
            self._from_hub(word, value, **{key: value})
        else:
            self.map(word, **{key: value})

    def _from_hub(self, word: str, name: str, **settings: str) -> None:
        if is_hub_name(name):
            self.need(word, hub_step(name), **settings)
        else:
            self.map(word, **settings)

    def _row(self, word: str) -> Word | None:
        row, beside = look_up(word, self.framework), BESIDE.get(self.framework)
        return look_up(word, beside) if row is None and beside else row

    def _tell(self, word: str, fate: str, says: str, is_essential: bool = False) -> None:
        self._taken.add(word)
        if word in self._left:
            del self._left[word]
        given = word in self._stated
        items = self._stated.get(word)
        is_plain = isinstance(items, list) and all(isinstance(item, str) for item in items)
        text = f"[{', '.join(self.items(word))}]" if is_plain else self.text(word)
        value = shown(text, 40) if given or word in self._defaults else ""
        self.fates.append(
            Fate(
                self._written.get(word, word),
                value if given else f"{value} (default)",
                fate,
                says,
                is_essential,
            )
        )


def _unset(texts: Iterable[str]) -> str:
    """Returns the shell variables in texts that the script does not set."""
    return ", ".join(dict.fromkeys(name for text in texts for name in _VARIABLE.findall(text)))


def _fault(settings: Mapping[str, str]) -> str:
    """Returns the error of our config, or ""."""
    try:
        load_config(overrides=[f"{name}={text}" for name, text in settings.items()])
    except ConfigError as error:
        return str(error)
    return ""


def _says_nothing(name: str, value: str) -> bool:
    return value.lower() in _NOTHING or (value in ("1", "1.0") and name.endswith(_ONE_IS_NOTHING))


def _is_equal(key: str, left: str, right: str) -> bool:
    try:
        return left == right or KEYS[key].read(left) == KEYS[key].read(right)
    except ConfigError:
        return False


def states_training(word: str) -> bool:
    """Returns whether a word states adapters or another objective."""
    return _OBJECTIVE.search(word.lower()) is not None


def _may_state_run(name: str) -> bool:
    """Returns whether a nested name states the run, as our key or as any framework's word."""
    row = look_up(name)
    return name in KEYS or (
        row is not None and (row.changes_data or any(_states_run(key) for key in row.keys))
    )


def _states_run(name: str) -> bool:
    """Returns whether a key states the batch, the devices of a replica, the length, the data or the
    model.
    """
    key = KEYS[name]
    of_run = Fixes.BATCH | Fixes.STREAM | Fixes.PROMPTS | Fixes.ADAPTERS | Fixes.FORM
    is_model = name in ("model_name", "load_parameters_path", "load_full_state_path")
    return is_model or name in SPLIT_AXES or key.part is Part.LENGTH or bool(key.fixes & of_run)
