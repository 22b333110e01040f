"""The holes that `skip_samples` states: ranges of own numbers, or a file of them."""

from __future__ import annotations

import functools
import re

from maxbatch.config.keys import Keyed
from maxbatch.config.recipes import Recipe, slots_per_sample
from maxbatch.config.values import shown
from maxbatch.plan.hole_ranges import range_words, read_ranges
from maxbatch.plan.holes import NO_HOLES, SKIP_SAMPLES, Holes
from maxbatch.plan.refusal import MOST_TYPED, Refusal

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
    return not all(re.fullmatch(r"[^:/\\]*:[^:/\\]*", word) for word in range_words(text))


@functools.lru_cache(maxsize=2)
def _holes_in_text(text: str, slots: int | None) -> Holes:
    readings = list(read_ranges(text, slots))
    for reading in readings:
        if reading.rule:
            nearest = " ".join(other.nearest for other in readings if other.nearest) or _WORKS
            works = {SKIP_SAMPLES: nearest} if len(nearest) <= MOST_TYPED else {}
            which = "" if reading.word == text else f"{shown(reading.word)} "
            rule = f"{which}{reading.rule}"
            if not works and reading.nearest:
                rule += f", such as {reading.nearest}"
            raise Refusal({SKIP_SAMPLES: text}, SKIP_SAMPLES, rule, works)
    return Holes((reading.first, reading.end) for reading in readings)
