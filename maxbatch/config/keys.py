"""A config key, and a section of keys: a typed, frozen part of the config.

A field of a section is declared once, with its type, its rule and its sentence; `Key` is what loading, messages and
`maxbatch config` read of it. base.yml holds the defaults, and shows the same sentences to people.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from maxbatch.config.values import Bounds, Scalar, Value

# The types of fields that name a kind of text or number (`values.Scalar`).
Quantity = Annotated[int, "quantity"]
Exact = Annotated[int | float | Fraction, "exact"]
Choice = Annotated[str, "choice"]
Words = Annotated[str, "choices"]
Place = Annotated[str, "path"]
LocalPath = Annotated[str, "local"]
DataPaths = Annotated[str, "paths"]

_T = TypeVar("_T")
_KINDS = {bool: "bool", int: "int", float: "real", str: "text"}


class Fixes(enum.Flag):
    """Properties of a run that the value of a key fixes; the others may change when a run is resumed."""

    NOTHING = 0
    BATCH = enum.auto()  # the samples of an update; compiled programs see only the shape of a batch
    RECORDS = enum.auto()  # how a source's records are read; each source of a mixture may state its own
    CONTENT = enum.auto()  # the documents and their tokenizer, whose hashes are in the stream's identity
    TOKENS = enum.auto()  # the tokens added to those of a document
    ROWS = enum.auto()  # how documents become rows
    ORDER = enum.auto()  # the order of the rows
    PROMPTS = enum.auto()  # how records become prompts
    ADAPTERS = enum.auto()  # the parameters trained besides the model's, and how they enter it
    CHAT = enum.auto()  # how records become conversations with trained and untrained tokens
    FORM = enum.auto()  # the model: a preset states these keys anew
    STATE = enum.auto()  # the start of the parameters, and the optimizer's state
    PROGRAM = enum.auto()  # the compiled programs
    MODEL = FORM | STATE
    STREAM = RECORDS | CONTENT | TOKENS | ROWS | ORDER | CHAT


class Part(enum.Enum):
    """Keys that together state one thing, or are alternatives for stating it."""

    LENGTH = "the length of a run"
    BATCH = "the batch"
    RAMP = "the ramp of the batch"
    PROMPT_BATCH = "the batch of prompts"


SAME, OURS = "the same", None


@dataclasses.dataclass(frozen=True)
class Key(Scalar):
    """One config key."""

    _: dataclasses.KW_ONLY
    fixes: Fixes
    sentence: str  # its meaning, on one line
    unit: str = ""  # of a number
    part: Part | None = None
    maxtext: str | None = SAME  # its name in MaxText's configs; OURS: MaxText has no such key
    warm_start: bool = True  # whether the warm start of RL takes it from the run; if not, it has its default

    @property
    def maxtext_name(self) -> str | None:
        """Its name in MaxText's configs, or None."""
        return self.name if self.maxtext == SAME else self.maxtext


def key(sentence: str, *, fixes: Fixes, bounds: Bounds | None = None, choices: tuple[str, ...] = (), unit: str = "",
        part: Part | None = None, maxtext: str | None = SAME, warm_start: bool = True) -> Any:  # fmt: skip
    """Declares the field of a section as a config key; its type gives the kind, and `None` in it allows null.

    Args:
      sentence: the meaning of the key, as in base.yml.
      fixes: the properties that a resume may not change through it.
      bounds: the interval of a number.
      choices: of a choice whose type is not a Literal.
      unit: of a number.
      part: the statement that it belongs to, with its alternatives.
      maxtext: its name in MaxText's configs, where that differs; OURS: MaxText has no such key.
      warm_start: whether the warm start of RL takes it from the run.
    """
    facts = {"sentence": sentence, "fixes": fixes, "bounds": bounds, "choices": choices, "unit": unit, "part": part,
             "maxtext": maxtext, "warm_start": warm_start}  # fmt: skip
    return dataclasses.field(metadata={"key": facts})


def _cached(function: Callable[[type], _T]) -> Callable[[type], _T]:
    """Returns a function that is called once for each class; mypy takes no class for hashable."""
    return functools.cache(function)


class Section:
    """A part of the config: a frozen dataclass whose fields are keys, or sections again.

    A room takes the sections that it may know, and no more of the config.
    """

    @classmethod
    def of(cls, config: Mapping[str, Any] | Self) -> Self:
        """Returns this part of a whole config or of a mapping of its keys; the part itself as it is."""
        if isinstance(config, cls):
            return config
        parts = _parts(cls)
        return cls(**{name: part.of(config) if part else config[name] for name, part in parts.items()})

    @classmethod
    def heading(cls) -> str:
        """Returns the heading of its keys in base.yml."""
        sentence = (cls.__doc__ or "").rstrip(".")
        return sentence[0].lower() + sentence[1:]

    @classmethod
    def declared(cls) -> tuple[Key, ...]:
        """Returns the keys that are declared in this section, in its order."""
        return _keys(cls)

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a key of this section or of an inner one; raises KeyError for any other name."""
        value: Any = self
        for attribute in _places(type(self))[name]:
            value = getattr(value, attribute)
        return value

    def items(self) -> Iterator[tuple[str, Value]]:
        """Yields the name and the value of each key, those of inner sections included."""
        return ((name, self[name]) for name in _places(type(self)))

    def replaced(self, values: Mapping[str, Value]) -> Self:
        """Returns the section with other values of some keys; names that it does not hold are left out."""
        changed = {
            name: getattr(self, name).replaced(values) if part else values.get(name, getattr(self, name))
            for name, part in _parts(type(self)).items()
        }
        return type(self)(**changed)


@_cached
def _parts(section: type) -> dict[str, type[Section] | None]:
    """Returns the fields of a section, each with its type where that is a section."""
    hints = get_type_hints(section)
    return {field.name: _as_section(hints[field.name]) for field in dataclasses.fields(section)}


@_cached
def _places(section: type) -> dict[str, tuple[str, ...]]:
    """Returns, for each key of a section, the attributes that lead to it."""
    places: dict[str, tuple[str, ...]] = {}
    for name, part in _parts(section).items():
        inner = {key: (name, *path) for key, path in _places(part).items()} if part else {name: (name,)}
        places |= inner
    return places


def _as_section(hint: Any) -> type[Section] | None:
    return hint if isinstance(hint, type) and issubclass(hint, Section) else None


@_cached
def _keys(section: type) -> tuple[Key, ...]:
    hints = get_type_hints(section, include_extras=True)
    declared = [field for field in dataclasses.fields(section) if "key" in field.metadata]
    return tuple(_key(field.name, hints[field.name], field.metadata["key"]) for field in declared)


def _key(name: str, hint: Any, facts: Mapping[str, Any]) -> Key:
    kinds = [hint]
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    kind, nullable = kinds[0], kinds != [hint]
    if get_origin(kind) is Literal:
        return Key(name, "choice", nullable=nullable, **{**facts, "choices": get_args(kind)})
    named = kind.__metadata__[0] if get_origin(kind) is Annotated else _KINDS[kind]
    return Key(name, named, nullable=nullable, **facts)
