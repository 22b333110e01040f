"""Scalars: parsing of text by type, and the messages of its errors.

Types are never guessed; YAML reads `10:13` as 613 and `3e-4` as a string.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
import string
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

from maxbatch.config.paths import data_fault, local_fault, place_fault
from maxbatch.system.errors import ConfigError

Number = int | float | Fraction
Value = bool | Number | str | None

NULLS = ("", "~", "null", "none")
TEXTS = ("text", "local", "path", "paths", "fields")

SUFFIXES = "suffixes K, M, B, T; Ki, Mi, Gi, Ti"  # for messages
_SUFFIXES = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "B": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_DECIMAL = re.compile(r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_LARGEST = 2**63 - 1
_ENDS = (
    ("at_least", "at least", ">=", operator.ge),
    ("above", "greater than", ">", operator.gt),
    ("at_most", "at most", "<=", operator.le),
    ("below", "less than", "<", operator.lt),
)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The interval of a number; `above` and `below` exclude their end."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    also: float | None = None  # an allowed value outside of the interval

    def broken(self, value: Number) -> tuple[str, float] | None:
        """Returns the rule that `value` breaks and the nearest allowed value, or None."""
        for name, words, _, holds in _ENDS:
            end = getattr(self, name)
            if end is not None and value != self.also and not holds(value, end):
                nearest = {"above": self._inside(end, 1), "below": self._inside(end, -1)}.get(
                    name, end
                )
                return f"{words} {end:.16g}" + (
                    "" if self.also is None else f" (or {self.also:g})"
                ), nearest
        return None

    def __str__(self) -> str:
        """Returns the whole rule, such as `>= 1 | -1`."""
        ends = [(sign, getattr(self, name)) for name, _, sign, _ in _ENDS]
        rules = [f"{sign} {_short(end)}" for sign, end in ends if end is not None]
        return " and ".join(rules) + ("" if self.also is None else f" | {self.also:g}")

    def _inside(self, end: float, direction: int) -> float:
        other = self.below if direction > 0 else self.above
        other = self.at_least if other is None and direction < 0 else other
        return end + direction if other is None or abs(other - end) > 1 else (end + other) / 2


def _short(end: float) -> str:
    power = int(end).bit_length() - 1
    return f"2^{power}" if power > 20 and end == 2**power else f"{end:.12g}"


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A named value, parsed from text.

    Its kind is bool; choice; choices (several, joined by ","); int; quantity (whole, with suffixes
    such as K or Mi); batch (samples, a whole number, or tokens, a text such as 2Mit); real; exact
    (a decimal or fraction without rounding); text; path (of this machine); paths (of data, joined
    by ";"); or fields (names by names, in braces).
    """

    name: str  # its source, for messages
    kind: str
    bounds: Bounds | None = None  # interval of a number
    choices: tuple[str, ...] = ()  # values of a choice
    nullable: bool = False
    default: str = ""  # its default as text

    def read(self, text: str, plain: bool = True) -> Value:
        """Parses a text; `plain`: the text is not in quotes, so `null` is None.

        Raises:
          ConfigError: the text has another type, breaks the rule, or is a path of an unsupported
            place.
        """
        refuse_no_text(text, f"{self.name}={shown(text)}")
        if self.kind not in TEXTS:
            text = text.strip()
        is_null = plain and text.strip().lower() in NULLS
        if is_null and self.nullable:
            return None
        if self.kind in TEXTS:
            self._check_place(text)
            if self.kind == "fields":
                return "" if is_null else self._fields(text)
            # A text is null when empty; an unquoted "none" is a word.
            return text if not is_null or text.strip().lower() == "none" else ""
        if self.kind == "batch" and text.endswith("t"):
            return self._tokens(text)
        if self.kind in NUMBERS:
            return self._number(text)
        if self.kind == "choices":
            return ",".join(dict.fromkeys(map(self._choice, [] if is_null else _listed(text))))
        if self.kind == "bool":
            return self._bool(text)
        return self._choice("" if is_null and "" in self.choices else text)

    def fault(self, text: str, rule: str, nearest: object = None) -> ConfigError:
        """Returns the error for a text: name, value, rule, and the nearest value that works."""
        works = "" if nearest is None else f"; works: {self.name}={nearest}"
        return ConfigError(f"{self.name}={shown(text)}: must be {rule}{works}")

    def _check_place(self, text: str) -> None:
        fault_of = {"local": local_fault, "path": place_fault, "paths": data_fault}.get(self.kind)
        if fault_of and (rule := fault_of(text)):
            raise self.fault(text, rule, None if self.kind == "paths" else self.default or "''")

    def _choice(self, text: str) -> str:
        if text in self.choices:
            return text
        nearest = nearest_name(text, self.choices) or self.choices[0] or "''"
        raise self.fault(
            text, f"one of {', '.join(choice or repr('') for choice in self.choices)}", nearest
        )

    def _bool(self, text: str) -> bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        nearest = "true" if text.lower() in ("1", "yes", "on", "y", "t") else "false"
        raise self.fault(text, "true or false", nearest)

    def _fields(self, text: str) -> str:
        """Returns names by names in one form, or "" for none."""
        if not text.strip():
            return ""
        if (names := field_names(text)) is None:
            rule = "names by names, each once, such as {prompt: question, completion: answer}"
            raise self.fault(text, rule, "'{prompt: question, completion: answer}'")
        return f"{{{', '.join(f'{field}: {name}' for field, name in names.items())}}}"

    def _tokens(self, text: str) -> str:
        """Returns a batch in tokens as it is stated."""
        tokens = in_tokens(text)
        if tokens.denominator != 1 or not 1 <= tokens <= _LARGEST:
            raise self.fault(text, f"a whole number of tokens from 1 to {_LARGEST}", "2Mit")
        return text

    def _number(self, text: str) -> Number:
        parse, rule = NUMBERS[self.kind]
        or_null = " or null" if self.nullable else ""
        value, near = parse(text)
        if value is None:
            if length := of_duration(text):
                named = " ".join(f"{name}={count}" for name, count in length.items())
                raise ConfigError(
                    f"{self.name}={shown(text)}: must be {rule}{or_null}; works: {named}"
                )
            bare = text.removesuffix("t")  # the suffix of a batch in tokens
            if (
                self.name.endswith("_tokens")
                and (tokens := amount(bare))
                and tokens == abs(int(tokens))
            ):
                near = bare
            raise self.fault(
                text, rule + or_null, near if isinstance(near, str) else self._near(near)
            )
        if broken := self.bounds and self.bounds.broken(value):
            rule, end = broken
            default = _decimal(self.default)
            # A default of null works on any devices; the end of the interval may not.
            takes_default = self.nullable
            if default is not None:
                takes_default = abs(default - exact(value)) <= abs(exact(end) - exact(value))
            raise self.fault(
                text, rule + or_null, self.default if takes_default else plain_number(end)
            )
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise self.fault(text, f"at most {_LARGEST}", self.default)
        return value

    def _near(self, number: Fraction | None) -> Value:
        """Returns an allowed value near `number`, or the default if that is None."""
        if number is None:
            return self.default
        guess = min(max(round(number), -_LARGEST), _LARGEST)
        broken = self.bounds and self.bounds.broken(guess)
        return plain_number(broken[1] if broken else guess)


# Keys by the unit of Composer's durations: batches, epochs, samples, tokens.
_DURATIONS = {"ba": "steps", "ep": "num_epochs", "sp": "train_samples", "tok": "train_tokens"}


def of_duration(text: str) -> dict[str, str] | None:
    """Converts Composer's duration, such as `10ba`, to a length of ours; returns None for other
    text.
    """
    match = re.fullmatch(r"\s*([\d_]{1,18})(ba|ep|sp|tok)\s*", text)
    return {_DURATIONS[match[2]]: match[1].replace("_", "")} if match else None


def value_text(value: Value) -> str:
    """Returns a value as written in configs, from which `Scalar.read` restores it: `null`, `true`,
    `10`.
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(text: str) -> list[str]:
    """Returns the items of a list in one line, with or without brackets."""
    return [item.strip().strip("'\"") for item in text.strip("[]").split(",") if item.strip()]


def in_brackets(text: str) -> list[str]:
    """Returns the items of a list such as `[bias, norm]`; the brackets may be left out."""
    has_brackets = text.startswith("[") and text.endswith("]")
    items = (text[1:-1] if has_brackets else text).split(",")
    return [item.strip().strip("'\"") for item in items if item.strip()]


# The parsed number, or None for other text; and the nearest valid value, a text or a number.
_Parsed = tuple[Number | None, Fraction | str | None]


def field_names(text: str) -> dict[str, str] | None:
    """Returns the names that `{ours: theirs, ...}` gives, by ours; None for another text.

    A name cannot contain a comma, a colon or a brace.
    """
    names: dict[str, str] = {}
    inner = text.strip()
    if inner[:1] == "{" and inner[-1:] == "}":
        inner = inner[1:-1]
    for pair in filter(str.strip, inner.split(",")):
        field, colon, name = (part.strip().strip("'\"") for part in pair.partition(":"))
        if not (field and colon and name) or field in names or re.search(r"[:{}]", field + name):
            return None
        names[field] = name
    return names


def _whole(text: str) -> _Parsed:
    number = _decimal(text)
    if number is None or number.denominator != 1 or "." in text:
        return None, amount(text) or _grouped(text)
    return int(number), None


def _quantity(text: str) -> _Parsed:
    value = amount(text)
    if value is not None and value.denominator == 1 and abs(value) <= _LARGEST:
        return int(value), None
    return None, value or _grouped(text)


def _grouped(text: str) -> Fraction | None:
    """Returns the number in `1,000,000`; None for other text."""
    return _decimal(text.replace(",", "")) if re.fullmatch(r"\d{1,3}(,\d{3})+", text) else None


def _batch(text: str) -> _Parsed:
    value, near = _whole(text)
    suffix = text[-1:].upper()
    if suffix in "KMBG" and suffix and (digits := _whole(text[:-1].strip())[0]):
        return None, f"{digits}{'G' if suffix == 'B' else suffix}it"
    return value, near


def amount(text: str) -> Fraction | None:
    """Returns the exact value of a number, with an optional suffix; None for other text.

    The suffixes K, M, B and T are powers of 1,000; Ki, Mi, Gi and Ti powers of 1,024. A lower-case
    t is no suffix: it marks tokens.
    """
    digits = text.rstrip(string.ascii_letters)
    suffix = text[len(digits) :]
    scale = None if suffix == "t" else _SUFFIXES.get(suffix.upper())
    number = None if scale is None else _decimal(digits.strip())
    return None if number is None or scale is None else number * scale


def counted(text: str, slots: int) -> Fraction | None:
    """Returns a count of samples, stated in samples or, with the suffix t, in tokens; None for
    other text.

    Args:
      text: such as `256`, `100K` or `2Mit`.
      slots: tokens of a sample.
    """
    number = amount(text.removesuffix("t"))
    if number is None or not 0 <= number <= _LARGEST:
        return None
    return number / slots if text.endswith("t") else number


def in_tokens(text: str | None) -> Fraction:
    """Returns the tokens in `2Mit` or `6725.5t`, with or without the `t`; 0 for other text."""
    value = None if text is None else amount(text.strip().removesuffix("t"))
    return Fraction(0) if value is None else value


def in_runs(text: str | None) -> Fraction | None:
    """Returns the multiple of a run in `0.5run`; None for other text."""
    stripped = "" if text is None else text.strip()
    return amount(stripped.removesuffix("run").strip()) if stripped.endswith("run") else None


def _exact(text: str) -> _Parsed:
    top, slash, bottom = text.partition("/")
    number, divisor = _decimal(top.strip()), _decimal(bottom.strip()) if slash else Fraction(1)
    if number is None or not divisor or abs(number / divisor) > _LARGEST:
        return None, None
    return plain_number(number / divisor), None


def _real(text: str) -> _Parsed:
    number = math.nan if _decimal(text) is None else float(text.replace("_", ""))
    return (number if math.isfinite(number) else None), None


NUMBERS: dict[str, tuple[Callable[[str], _Parsed], str]] = {
    "int": (_whole, "a whole number"),
    "quantity": (_quantity, f"a whole number ({SUFFIXES})"),
    "batch": (_batch, "a whole number of samples or of tokens (2Mit)"),
    "exact": (_exact, "a number or a fraction such as 1/3"),
    "real": (_real, "a finite number"),
}


def _decimal(text: str) -> Fraction | None:
    """Returns the exact value of a decimal number; None for other text, nan and infinities
    included.
    """
    is_decimal = len(text) <= 2000 and _DECIMAL.fullmatch(text)
    return Fraction(text.replace("_", "")) if is_decimal else None


def exact(value: Number) -> Fraction:
    """Returns a config number as the exact fraction of its decimal form: the float 0.1 is one
    tenth.
    """
    return value if isinstance(value, Fraction) else Fraction(str(value))


def plain_number(value: Number) -> Number:
    """Returns `value` as an int if exact, else as a float that prints it, else as a Fraction."""
    fraction = exact(value)
    if fraction.denominator == 1:
        return int(fraction)
    return float(fraction) if exact(float(fraction)) == fraction else fraction


def schedule_text(stages: Iterable[tuple[Number, int]]) -> str:
    """Formats pairs of position and batch as a `batch_size_schedule`; positions are rounded up.

    Of stages with the same position, only the last has updates.
    """
    return " ".join(
        f"{position}:{batch}" for position, batch in {math.ceil(p): b for p, b in stages}.items()
    )


def refuse_no_text(text: str, where: str) -> None:
    """Raises ConfigError, with `where` in front, for text that neither a file name nor a tokenizer
    can hold.
    """
    if re.search("[\0\ud800-\udfff]", text):
        raise ConfigError(f"{where}: must be UTF-8 text without NUL characters")


def utf8_of(text: str) -> bytes:
    """Encodes text as UTF-8; raises ConfigError for half of a surrogate pair, as in arguments that
    are not UTF-8.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text {shown(ascii(text))} cannot be encoded: character {error.start} is half of "
            "a surrogate pair, or the text was not given as UTF-8"
        ) from error


def nearest_name(name: str, known: Iterable[str], least_like: float = 0.5) -> str | None:
    """Returns the known name most similar to `name`, the first of equals.

    None if its similarity (0 to 1) is below `least_like`.
    """
    name, known = name[:80], list(known)
    near = set(difflib.get_close_matches(name, known, n=5, cutoff=least_like))
    alike = [candidate for candidate in known if candidate in near]
    return max(
        alike,
        key=lambda candidate: difflib.SequenceMatcher(None, candidate, name).ratio(),
        default=None,
    )


def nearest_or_all(name: str, known: Iterable[str], least_like: float = 0.5) -> str:
    """Returns the end of a message about an unknown name: the most similar known one, or all if
    none is similar.
    """
    known = list(known)
    nearest = nearest_name(name, known, least_like)
    return f"nearest: {nearest}" if nearest else f"one of {', '.join(known)}"


def shown(text: str, most: int = 80) -> str:
    """Returns user input on one line, cut to `most` characters, for messages."""
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown_fields(record: Mapping[str, object]) -> str:
    """Returns the names of a record's first fields, for messages."""
    return shown(", ".join(map(repr, list(record)[:8])) or "none")


def first_of(texts: Sequence[str], most: int, mark: str = ",") -> str:
    """Returns the first texts with a mark between them, and how many more there are, for
    messages.
    """
    rest = len(texts) - most
    more = f"{mark.strip(',')} and {rest} more" if rest > 0 else ""
    return f"{mark} ".join(texts[:most]) + more


def shown_path(path: object) -> str:
    """Returns a path as `shown` does, but keeps its end."""
    text = shown(str(path), sys.maxsize)
    return text if len(text) <= 80 else f"...{text[-77:]}"
