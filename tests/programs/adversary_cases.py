"""The cases of the adversary: a command line in its own folder, and shrinking of failing ones."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Damage:
    """A change of one file below the folder of a case."""

    file: str
    says: str  # the change in words
    apply: Callable[[Path], None] = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line, and the folder that it runs in: a copy of `base`, with `damages`."""

    name: str  # "line 17", "file 4"; with a seed, it makes the same case again
    arguments: tuple[str, ...]
    base: Path
    damages: tuple[Damage, ...] = ()

    def make(self, folder: Path) -> None:
        """Fills the folder."""
        shutil.copytree(self.base, folder, symlinks=True)
        for damage in self.damages:
            damage.apply(folder / damage.file)

    def smaller(self) -> Iterator[Case]:
        """Yields the cases that leave out a damage or an argument, or have a shorter argument."""
        for left_out in range(len(self.damages)):
            yield dataclasses.replace(
                self, damages=self.damages[:left_out] + self.damages[left_out + 1 :]
            )
        for place in range(1, len(self.arguments)):
            yield self._with(place)
            half = self.arguments[place][: len(self.arguments[place]) // 2]
            if len(self.arguments[place]) > 200:
                yield self._with(place, half)

    def _with(self, place: int, *arguments: str) -> Case:
        return dataclasses.replace(
            self, arguments=(*self.arguments[:place], *arguments, *self.arguments[place + 1 :])
        )

    def __str__(self) -> str:
        damages = "".join(f"\n    {damage.file}: {damage.says}" for damage in self.damages)
        return f"maxbatch {' '.join(map(_quoted, self.arguments))}{damages}"


def _quoted(argument: str) -> str:
    text = (
        argument if len(argument) <= 120 else f"{argument[:100]}... ({len(argument):,} characters)"
    )
    return text if text.isalnum() else repr(text)
