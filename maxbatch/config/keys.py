"""A config key, and a section of keys: a typed, frozen part of the config.

A field of a section is declared once, with its type, default, rule and sentence. Loading, messages
and `maxbatch config` read it as a `Key`; base.yml shows the same rows to people.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    Self,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from maxbatch.config.values import Bounds, Scalar, Value, value_text

# The types of fields that name a kind of text or number (`values.Scalar`).
Quantity = Annotated[int, "quantity"]
BatchSize = Annotated[int | str, "batch"]
Exact = Annotated[int | float | Fraction, "exact"]
Choice = Annotated[str, "choice"]
Words = Annotated[str, "choices"]
StoragePath = Annotated[str, "path"]
LocalPath = Annotated[str, "local"]
DataPaths = Annotated[str, "paths"]
# Names of fields by ours, in braces; "": none have other names.
FieldNames = Annotated[str, "fields"]

_T = TypeVar("_T")
_KINDS = {bool: "bool", int: "int", float: "real", str: "text"}


class Fixes(enum.Flag):
    """Properties of a run that a key fixes; a resume may change all others."""

    NOTHING = 0
    BATCH = enum.auto()  # the samples of an update; compiled programs see only the shape of a batch
    # how a source's records are read; each source of a mixture may state its own
    RECORDS = enum.auto()
    # the documents and their tokenizer, whose hashes are in the stream's identity
    CONTENT = enum.auto()
    TOKENS = enum.auto()  # the tokens added to those of a document
    ROWS = enum.auto()  # how documents become rows
    ORDER = enum.auto()  # the order of the rows
    PROMPTS = enum.auto()  # how records become prompts
    ADAPTERS = enum.auto()  # the adapters' parameters, and how they enter the model
    CHAT = enum.auto()  # how records become conversations with trained and untrained tokens
    FORM = enum.auto()  # the model: a preset states these keys anew
    STATE = enum.auto()  # the initial parameters, and the optimizer's state
    PROGRAM = enum.auto()  # the compiled programs
    MODEL = FORM | STATE
    STREAM = RECORDS | CONTENT | TOKENS | ROWS | ORDER | CHAT


class Part(enum.Enum):
    """Keys that together state one thing, or are alternatives for stating it."""

    LENGTH = "the length of a run"
    BATCH = "the batch"
    RAMP = "the ramp of the batch"
    PROMPT_BATCH = "the batch of prompts"


class Shared(enum.Enum):
    """The aspect of a key that the hosts of a run must share."""

    VALUE = "its value"
    CONTENT = "the content it names, in any place, or its absence"
    STATED = "whether it is stated; each host may have its own place"
    NOTHING = "nothing; each host may have its own place"


SAME, OURS = "the same", None
# of all others the value
_SHARED_BY_KIND = {"path": Shared.CONTENT, "paths": Shared.CONTENT, "local": Shared.NOTHING}


@dataclasses.dataclass(frozen=True)
class Key(Scalar):
    """One config key."""

    _: dataclasses.KW_ONLY
    fixes: Fixes
    sentence: str  # its meaning, one line
    unit: str = ""  # of a number
    part: Part | None = None
    maxtext: str | None = SAME  # its name in MaxText's configs; OURS: MaxText has no such key
    # whether RL's warm start takes it from the run; else it has its default
    warm_start: bool = True
    chooses: str = ""  # the kind of sample it chooses when set (`maxbatch.config.recipes`)
    shared: Shared
    changes: str  # the effect of a resume with another value, in words; "": none

    @functools.cached_property
    def default_value(self) -> Value:
        """Its default, parsed."""
        return self.read(self.default)

    @property
    def maxtext_name(self) -> str | None:
        """Its name in MaxText's configs, or None."""
        return self.name if self.maxtext == SAME else self.maxtext


class Entry(NamedTuple):
    """A key and its value as written."""

    name: str
    text: str  # its value, not parsed yet
    plain: bool  # whether the value is written without quotes
    where: str  # file and line, or another source, for messages


class Keyed(Protocol):
    """Values by key name: the whole config, a section with those keys, or a mapping."""

    def __getitem__(self, name: str, /) -> Any: ...
    def get(self, name: str, /) -> Any: ...


class _Row(dict[str, Any]):
    """Keyword arguments of `Key` other than name and type."""


def key(
    default: _T,
    sentence: str,
    fixes: Fixes,
    bounds: Bounds | None = None,
    unit: str = "",
    *,
    choices: tuple[str, ...] = (),
    part: Part | None = None,
    maxtext: str | None = SAME,
    warm_start: bool = True,
    chooses: str = "",
    shared: Shared | None = None,
    changes: str | None = None,
) -> _T:
    """Declares the field of a section as a config key; its type gives the kind, and `None` in it
    allows null.

    Args:
      default: its value if no layer states it.
      sentence: the meaning of the key, as in base.yml.
      fixes: the properties that a resume may not change through it.
      bounds: the interval of a number.
      unit: of a number.
      choices: of a choice whose type is not a Literal.
      part: the statement that it belongs to, with its alternatives.
      maxtext: its name in MaxText's configs, where that differs; OURS: MaxText has no such key.
      warm_start: whether the warm start of RL takes it from the run.
      chooses: the kind of sample that it chooses if it is set.
      shared: the aspect that hosts must share; None: of a place the content, of a local place
        nothing, else the value.
      changes: the effect of a resume with another value, in words; "": none; None: its section's.
    """
    return cast(
        _T,
        _Row(
            default=_text(default),
            sentence=sentence,
            fixes=fixes,
            bounds=bounds,
            unit=unit,
            choices=choices,
            part=part,
            maxtext=maxtext,
            warm_start=warm_start,
            chooses=chooses,
            shared=shared,
            changes=changes,
        ),
    )


def _text(default: Any) -> str:
    """Returns a default as written in configs: `null`, `true`, `3e-3`."""
    if isinstance(default, float) and 0 < default < 0.01:
        digits, _, exponent = f"{default:e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    return value_text(default)


def _cached(function: Callable[[type], _T]) -> Callable[[type], _T]:
    """Caches a function per class; a wrapper because mypy does not treat classes as hashable."""
    return functools.cache(function)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(key,))
class Section(Mapping[str, Any]):
    """A part of the config: frozen, a mapping of its keys, equal by its values, its fields keys or
    sections again.

    A subclass lists its fields as a dataclass does, and takes all of them by name. Sections are not
    dataclasses, because compiling their methods took most of the config's import time. A room takes
    only the sections that it may know.
    """

    _names: ClassVar[tuple[str, ...]] = ()
    declared: ClassVar[tuple[Key, ...]] = ()  # its own keys, in its order

    def __init_subclass__(cls, changes: str = "") -> None:
        """Reads the rows of a section; `changes` is the effect of a resume with another value of
        its keys.
        """
        fields = inspect.get_annotations(cls)
        rows = {name: row for name in fields if isinstance(row := cls.__dict__.get(name), _Row)}
        for name in rows:
            delattr(cls, name)
        bases = [base for base in cls.__bases__ if issubclass(base, Section)]
        cls._names = (*(name for base in bases for name in base._names), *fields)
        declared = (_key(name, fields[name], row, changes) for name, row in rows.items())
        cls.declared = (*(key for base in bases for key in base.declared), *declared)

    def __init__(self, **values: object) -> None:
        if values.keys() != set(self._names):
            differing = sorted(values.keys() ^ set(self._names))
            raise TypeError(
                f"{type(self).__name__}: takes {', '.join(self._names)}; missing or unknown: "
                f"{differing}"
            )
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: a {type(self).__name__} is frozen")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: a {type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False
        return all(self.__dict__[name] == other.__dict__[name] for name in self._names)

    def __hash__(self) -> int:
        return hash((type(self), *(self.__dict__[name] for name in self._names)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={self.__dict__[name]!r}' for name in self._names)})"

    @classmethod
    def of(cls, config: Keyed) -> Self:
        """Returns this section of a config, or of anything else that has its keys; returns an
        instance unchanged.
        """
        if type(config) is cls:
            return config
        sections = _parts(cls)
        return cls(
            **{
                name: section.of(config) if section else config[name]
                for name, section in sections.items()
            }
        )

    @classmethod
    def heading(cls) -> str:
        """Returns the heading of its keys in base.yml."""
        sentence = " ".join((cls.__doc__ or "").split()).rstrip(".")
        return sentence[0].lower() + sentence[1:]

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a key in this section or an inner one; raises KeyError for any other
        name.
        """
        value: Any = self
        for attribute in _places(type(self))[name]:
            value = getattr(value, attribute)
        return value

    def __iter__(self) -> Iterator[str]:
        """Yields the names of its keys, including inner sections."""
        return iter(_places(type(self)))

    def __len__(self) -> int:
        return len(_places(type(self)))

    def to_dict(self) -> dict[str, Value]:
        """Returns the values of its keys by name."""
        return dict(self)

    def replaced(self, values: Mapping[str, Value]) -> Self:
        """Returns a copy with some values replaced; ignores keys of other sections."""
        changed = {
            name: getattr(self, name).replaced(values)
            if part
            else values.get(name, getattr(self, name))
            for name, part in _parts(type(self)).items()
        }
        return type(self)(**changed)


@_cached
def _parts(section: type[Section]) -> dict[str, type[Section] | None]:
    """Returns the fields of a section, each with its type where that is a section."""
    hints = get_type_hints(section)
    return {name: _as_section(hints[name]) for name in section._names}


@_cached
def _places(section: type) -> dict[str, tuple[str, ...]]:
    """Returns, for each key of a section, the attributes that lead to it."""
    places: dict[str, tuple[str, ...]] = {}
    for name, part in _parts(section).items():
        inner = (
            {key: (name, *path) for key, path in _places(part).items()} if part else {name: (name,)}
        )
        places |= inner
    return places


def _as_section(hint: object) -> type[Section] | None:
    return hint if isinstance(hint, type) and issubclass(hint, Section) else None


def _key(name: str, hint: Any, row: _Row, changes: str) -> Key:
    kinds = [hint]
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    kind, nullable = kinds[0], kinds != [hint]
    named = kind.__metadata__[0] if get_origin(kind) is Annotated else _KINDS.get(kind, "choice")
    facts = row | ({"choices": get_args(kind)} if get_origin(kind) is Literal else {})
    facts["shared"] = facts["shared"] or _SHARED_BY_KIND.get(named, Shared.VALUE)
    facts["changes"] = changes if facts["changes"] is None else facts["changes"]
    return Key(name, named, nullable=nullable, **facts)
