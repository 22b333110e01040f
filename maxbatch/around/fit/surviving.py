"""`fit --survive`: the same batch on every machine that remains when slices are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from maxbatch.around.fit.choices import Choice, Wanted
from maxbatch.config.values import value_text
from maxbatch.plan.view import number_text
from maxbatch.run.compile.memory import gigabytes
from maxbatch.run.compile.target import Target
from maxbatch.system.terminal.terminal import PipeConsole, PlainTable


class FittedMachine(NamedTuple):
    """A machine with its best choice."""

    target: Target
    slices: int
    wanted: Wanted
    choice: Choice | None
    refusal: str | None  # why the run is refused there, or does not fit; None if it runs

    def to_dict(self) -> dict[str, object]:
        """Returns the row for `--json`."""
        figures = self.choice.to_dict() if self.choice else {}
        devices = len(self.target.devices)
        return {
            "slices": self.slices,
            "hosts": self.target.num_hosts,
            "devices": devices,
            "refusal": self.refusal,
            **figures,
        }

    def cells(self) -> list[str]:
        cells = [number_text(self.slices), number_text(len(self.target.devices))]
        if self.choice is None:
            return [*cells, "-", "refused", "-", "-", ""]
        seconds = self.choice.modelled.modelled_step_s
        changes = self.choice.keys(self.wanted)
        return [
            *cells,
            number_text(self.choice.shape.max_micro_batches),
            "-" if self.choice.padded_share is None else f"{self.choice.padded_share:.2%}",
            gigabytes(self.choice.verdict.needed_bytes),
            "-" if seconds is None else f"{seconds * 1e3:,.1f} ms",
            " ".join(f"{name}={value_text(value)}" for name, value in changes.items()),
        ]


def render_fitted(rows: Sequence[FittedMachine]) -> None:
    """Prints the rows as a table, and the refusals below it."""
    console = PipeConsole()
    heads = ("slices", "devices", "passes", "padded share", "needed", "modelled step", "keys")
    table = PlainTable(*heads, justify="right")
    for row in rows:
        table.add_row(*row.cells())
    console.print()
    console.print(table)
    for row in rows:
        if row.refusal:
            console.print(f"refused on {row.slices} slices: {row.refusal}", soft_wrap=True)
