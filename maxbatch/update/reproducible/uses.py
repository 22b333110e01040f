"""The uses that an update makes of its programs, from shapes alone: runs, and the memory around
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Use(NamedTuple):
    """The use of a program by an update of all its micro-batches, on a device."""

    runs: int
    held_bytes: int  # of the arrays in memory while the program runs, its arguments among them


class Held(NamedTuple):
    """Bytes of a device's arrays during an update, by kind."""

    state: int  # its shards
    batch: int
    model: int  # gathered; 0 on one device
    sums: int  # of the atoms
    gradient: int  # of the batch, its shards
    band: int  # the largest band, cut into pieces

    def around(self, kind: str) -> int:
        """Returns the bytes in memory while a program of a kind runs."""
        before = self.state + self.batch
        if kind in ("gather", "arrange"):
            return before
        if kind in ("nothing", "weigh", "weights", "scale"):
            return before + self.model
        if kind in ("take", "atom", "figures"):
            return before + self.model + self.sums
        if kind in ("reduce", "squares"):  # band after band
            return before + self.sums
        return before + self.gradient + (self.band if kind == "piece" else 0)


def uses_of(
    names: Iterable[str], held: Held, num_atoms: int, num_pieces: Mapping[str, int]
) -> dict[str, Use]:
    """Returns the use of each program by name.

    Args:
      num_atoms: of a device.
      num_pieces: of all bands, by the name of the program that steps them.
    """
    uses = {}
    for name in names:
        kind = name.partition("-")[0]
        runs = num_atoms if kind in ("take", "atom", "weigh") else num_pieces.get(name, 1)
        uses[name] = Use(runs, held.around(kind))
    return uses
