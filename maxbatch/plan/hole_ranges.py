"""Ranges of samples as `skip_samples` and its file state them."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.values import counted
from maxbatch.plan.holes import LARGEST

RULE = "must be ranges FIRST:END of samples, or a file with one range a line"


def range_words(text: str) -> list[str]:
    """Returns the ranges of a text, between blanks or commas."""
    return text.replace(",", " ").split()


class RangeReading(NamedTuple):
    """A range as it is read.

    Attributes:
      word: the range as it is stated.
      rule: the rule that it breaks; "" for none.
      nearest: the range itself, or the nearest that keeps the rules; "" for a word that is none.
      first, end: own numbers; 0 where a rule is broken.
    """

    word: str
    rule: str
    nearest: str
    first: int = 0
    end: int = 0


def read_ranges(text: str, slots: int | None) -> Iterator[RangeReading]:
    """Yields the ranges that a text states, with blanks or commas between them.

    Args:
      slots: tokens of a sample; None: samples are prompts, which have no fixed number.
    """
    return (_read(word, slots) for word in range_words(text))


def _read(word: str, slots: int | None) -> RangeReading:
    left, colon, right = word.partition(":")
    bare = [part.removesuffix("t") for part in (left, right)]
    is_tokens = [part.endswith("t") for part in (left, right)]
    first, end = (counted(part, slots or 1) for part in (left, right))
    if not colon or first is None or end is None:
        return RangeReading(word, RULE, "")
    if any(is_tokens) and slots is None:
        nearest = _nearest(first, end, None)
        return RangeReading(word, "must count prompts, which have no number of tokens", nearest)
    if any(is_tokens) and not all(is_tokens):
        if first >= end:  # as typed: then one t was forgotten
            first, end = (counted(f"{part}t", slots or 1) or Fraction(0) for part in bare)
        rule = "must count samples at both ends, or tokens (t) at both"
        return RangeReading(word, rule, _nearest(first, end, slots))
    nearest = _nearest(first, end, slots if all(is_tokens) else None)
    if first > end:
        return RangeReading(word, "must end after it begins", nearest)
    if first.denominator != 1 or end.denominator != 1:
        of_tokens = f" of {slots} tokens" if all(is_tokens) else ""
        return RangeReading(word, f"must begin and end at whole samples{of_tokens}", nearest)
    if first == end:
        return RangeReading(word, "must hold at least one sample", nearest)
    return RangeReading(word, "", word, int(first), int(end))


def _nearest(first: Fraction, end: Fraction, slots: int | None) -> str:
    """Returns the nearest range of whole samples that is not empty; with `slots` in tokens."""
    unit, suffix = slots or 1, "t" if slots else ""
    begin = min(round(min(first, end)), LARGEST // unit - 1)
    stop = max(begin + 1, min(round(max(first, end)), LARGEST // unit))
    return f"{begin * unit}{suffix}:{stop * unit}{suffix}"
