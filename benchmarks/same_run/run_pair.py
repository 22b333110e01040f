"""Two runs of one training, and the result that is written of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.same_run.figures import Arrays, Differences, Update, differences


@dataclass(frozen=True)
class Pair:
    """A run of another program and ours.

    Attributes:
      start, our_end, their_end: parameters by our names, before and after the updates.
      squares: Adam's second moments of their run, where it has them.
      command: the other program's settings.
    """

    ours: Sequence[Update]
    theirs: Sequence[Update]
    start: Arrays
    our_end: Arrays
    their_end: Arrays
    squares: Arrays | None
    command: Sequence[str]

    @property
    def differences(self) -> Differences:
        return differences(
            self.ours, self.theirs, self.start, self.our_end, self.their_end, self.squares
        )
