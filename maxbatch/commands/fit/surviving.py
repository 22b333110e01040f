"""`fit --survive`: the same batch on every machine that remains when slices are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from maxbatch.commands.fit.choices import Choice, Wanted
from maxbatch.config.loading import keys
from maxbatch.plan.view import number_text, plan_console
from maxbatch.system.terminal import PlainTable
from maxbatch.training.compile.memory import gigabytes
from maxbatch.training.compile.target import Target


class FittedMachine(NamedTuple):
    """A machine with its best choice."""

    slices: int
    hosts: int
    devices: int
    refusal: str | None  # why the run is refused there, or does not fit; None if it runs
    choice: Choice | None
    keys: str  # the keys that the choice changes, as overrides

    def to_dict(self) -> dict[str, object]:
        """Returns the row for `--json`."""
        found: dict[str, object] = self.choice.to_dict() if self.choice else {}
        return {
            "slices": self.slices, "hosts": self.hosts, "devices": self.devices, "refusal": self.refusal, **found,
        }  # fmt: skip


def row_of(target: Target, num_slices: int, wanted: Wanted, choice: Choice) -> FittedMachine:
    """Returns the row of a machine on which a choice fits."""
    stated = " ".join(f"{name}={keys()[name].write(value)}" for name, value in choice.keys(wanted).items())
    return FittedMachine(num_slices, target.num_hosts, len(target.devices), None, choice, stated)


def refusal_of(target: Target, num_slices: int, refusal: str) -> FittedMachine:
    """Returns the row of a machine that cannot run the model or its batch, or on which nothing fits."""
    return FittedMachine(num_slices, target.num_hosts, len(target.devices), refusal, None, "")


def render_fitted(rows: Sequence[FittedMachine]) -> None:
    """Prints the rows as a table, and the refusals below it."""
    console = plan_console()
    heads = ("slices", "devices", "passes", "padded share", "needed", "modelled step", "keys")
    table = PlainTable(*heads, justify="right")
    for row in rows:
        table.add_row(number_text(row.slices), number_text(row.devices), *_cells(row.choice), row.keys)
    console.print()
    console.print(table)
    for row in rows:
        if row.refusal:
            console.print(f"refused on {row.slices} slices: {row.refusal}", soft_wrap=True)


def _cells(choice: Choice | None) -> list[str]:
    if choice is None:
        return ["-", "refused", "-", "-"]
    seconds = choice.modelled.modelled_step_s
    return [
        number_text(choice.shape.max_micro_batches),
        f"{choice.padded_share:.2%}",
        gigabytes(choice.verdict.needed_bytes),
        "-" if seconds is None else f"{seconds * 1e3:,.1f} ms",
    ]
