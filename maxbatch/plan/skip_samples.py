"""The holes that `skip_samples` states: ranges of own numbers, or a file of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.keys import Keyed
from maxbatch.config.recipes import Recipe, slots_per_sample
from maxbatch.config.values import counted, shown
from maxbatch.plan.holes import LARGEST, NO_HOLES, SKIP_SAMPLES, Holes
from maxbatch.plan.refusal import MOST_TYPED, Refusal

RULE = "must be ranges FIRST:END of samples, or a file with one range a line"
_WORKS = "1.2M:1.3M 5M:5.01M"


def holes_of(config: Keyed, is_kept: bool = True) -> Holes:
    """Returns the holes that `skip_samples` states; reads its file, if it names one.

    Args:
      is_kept: whether the run under way watches the file, whose content must stay.

    Raises:
      ConfigError: a range cannot be read, is empty or reversed, or is not of whole samples.
    """
    text = config[SKIP_SAMPLES].strip()
    if not text:
        return NO_HOLES
    # a prompt has no fixed number of tokens
    slots = None if Recipe.of(config).is_sampled else slots_per_sample(config)
    if not names_file(text):
        return _holes_in_text(text, slots)
    from maxbatch.plan.holes_file import holes_in_file  # late, so that other plans start sooner

    return holes_in_file(text, slots, is_kept)


def names_file(text: str) -> bool:
    """Returns whether `skip_samples` names a file, instead of stating ranges or nothing."""
    return not all(re.fullmatch(r"[^:/\\]*:[^:/\\]*", word) for word in text.split())


@functools.lru_cache(maxsize=2)
def _holes_in_text(text: str, slots: int | None) -> Holes:
    readings = list(read_ranges(text, slots))
    for reading in readings:
        if reading.rule:
            nearest = " ".join(one.nearest for one in readings if one.nearest) or _WORKS
            works = {SKIP_SAMPLES: nearest} if len(nearest) <= MOST_TYPED else {}
            rule = f"{shown(reading.word)} {reading.rule}"
            if not works and reading.nearest:
                rule += f", such as {reading.nearest}"
            raise Refusal({SKIP_SAMPLES: text}, SKIP_SAMPLES, rule, works)
    return Holes((reading.first, reading.end) for reading in readings)


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
    """Yields the ranges that a text states, with blanks between them.

    Args:
      slots: tokens of a sample; None: samples are prompts, which have no fixed number.
    """
    return (_read(word, slots) for word in text.split())


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
