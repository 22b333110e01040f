"""Records that are left out of a dataset, counted by the kind of their problem, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping

from maxbatch.system.terminal.folding import counted

_MOST_REASONS = 3  # named in one line
_MOST_KIND = 160  # characters


def kind_of(problem: str) -> str:
    """Returns the kind of a record's problem: its text without numbers, quoted words, and the
    record's own fields.
    """
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "…", problem.partition("; ")[0].partition(" (")[0])
    return re.sub(r"\d+", "N", plain)[:_MOST_KIND]


def reasons_text(reasons: Mapping[str, int]) -> str:
    """Returns the most frequent reasons with their counts, as in `: 3 x an empty text`; "" without
    reasons.
    """
    ranked = sorted(reasons.items(), key=lambda reason: (-reason[1], reason[0]))
    shown = [f"{count:,} x {kind}" for kind, count in ranked[:_MOST_REASONS]]
    others = len(ranked) - len(shown)
    return "".join(
        [
            ": " if shown else "",
            ", ".join(shown),
            f", and {counted(others, 'more reason')}" if others else "",
        ]
    )


def skipped_text(skipped: int, reasons: Mapping[str, int]) -> str:
    """Returns how many records were left out, and why."""
    return f"{counted(skipped, 'record')} left out{reasons_text(reasons)}"
