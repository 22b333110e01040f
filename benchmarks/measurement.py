"""Measurements, and comparisons of two sides on a machine that others use as well."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Key = TypeVar("Key", bound=Hashable)


class BenchmarkError(Exception):
    """Two sides are not comparable, or one did not run."""


@dataclass(frozen=True)
class Measurement:
    """One measured quantity.

    Attributes:
      name: of the quantity.
      value: the figure.
      unit: "" for a ratio.
      samples: the figures behind a summary (ratios of single turns, runs).
      bar: the figure to reach; None if there is none.
      sense: the side of the bar on which the figure must be.
      detail: more figures, for the JSON.
    """

    name: str
    value: float
    unit: str = ""
    samples: Sequence[float] = ()
    bar: float | None = None
    sense: Literal["at least", "at most"] = "at most"
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool | None:
        """Whether the bar is reached; None without one."""
        if self.bar is None:
            return None
        return (operator.ge if self.sense == "at least" else operator.le)(self.value, self.bar)

    def to_dict(self) -> dict[str, Any]:
        """The measurement as one JSON object."""
        ordered = sorted(self.samples)
        spread = {
            "min": ordered[0] if ordered else None,
            "median": statistics.median(ordered) if ordered else None,
            "max": ordered[-1] if ordered else None,
        }
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "bar": self.bar,
            "sense": self.sense,
            "passed": self.passed,
            **spread,
            "samples": list(self.samples),
            "detail": dict(self.detail),
        }


def seconds_in_turns(sides: Mapping[Key, Callable[[], Any]], turns: int) -> dict[Key, list[float]]:
    """Seconds of every side in every turn: A B, B A, A B, ..., so that other load affects all of
    them.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in sides}
    for turn in range(turns):
        order = list(sides.items())
        for name, side in order if turn % 2 == 0 else reversed(order):
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(
    name: str,
    above: Sequence[float],
    below: Sequence[float],
    *,
    bar: float | None = None,
    sense: Literal["at least", "at most"] = "at most",
    scale: float = 1.0,
) -> Measurement:
    """The ratio of two medians, times `scale`, with the ratios of the single turns as its
    spread.
    """
    return Measurement(
        name,
        scale * statistics.median(above) / statistics.median(below),
        samples=[scale * a / b for a, b in zip(above, below, strict=True)],
        bar=bar,
        sense=sense,
        detail={"above_s": list(above), "below_s": list(below), "scale": scale},
    )
