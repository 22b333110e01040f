"""The machines after a loss of slices or hosts: their batch, their memory, their modelled step."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.survival import Machine, smaller_machines
from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from maxbatch.config.config import Config


_OF_BATCH = (
    "global_batch_size_to_train_on",
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "micro_batch_size_to_train_on",
    "padded_slots_per_step",
    "padded_share",
)


class UpdateFigures(NamedTuple):
    """The compiler's figures of the update that needs the most memory, by their names in `plan
    --json`.
    """

    hbm_bytes_needed: int | None
    hbm_bytes_available: int | None
    fits: bool
    modelled_step_s: float | None  # a model of the compiler's schedule; nothing is measured


class SurvivingMachine(NamedTuple):
    """A row of `--survive`."""

    machine: Machine
    plan: BatchPlan | None  # None if the run is refused there
    refusal: str | None  # why; None if it is not
    # None without `--topology`, or if the run is refused or the slice is not whole
    figures: UpdateFigures | None

    def to_dict(self) -> dict[str, object]:
        """Returns the row for `plan --json`."""
        machine = self.machine
        numbers = {
            "slices": machine.num_slices,
            "hosts": machine.num_hosts,
            "devices": machine.num_devices,
        }
        batch = {name: getattr(self.plan, name, None) for name in _OF_BATCH}
        batch = {
            name: float(value) if isinstance(value, Fraction) else value
            for name, value in batch.items()
        }
        return (
            numbers
            | batch
            | {"refusal": self.refusal}
            | (self.figures._asdict() if self.figures else {})
        )


def topology_machine(config: Config, topology: str, num_slices: int) -> tuple[Config, Machine]:
    """Returns the config with the compiler flags of a topology's chip, and the topology's slices as
    numbers.
    """
    from maxbatch.commands.targets import with_flags_of
    from maxbatch.run.compile.flags import state_flags
    from maxbatch.run.compile.target import find_target
    from maxbatch.run.compile.topology import parse_slice

    state_flags(config.libtpu_flags, config.data_cache_dir, parse_slice(topology).version)
    target = find_target(topology, num_slices)
    return with_flags_of(config, target), Machine(len(target.devices), target.num_hosts, num_slices)


def survivors(
    config: Config,
    machine: Machine,
    survive: int,
    samples_per_epoch: int | None,
    topology: str | None,
) -> list[SurvivingMachine]:
    """Returns a row for the machine, and for the machine without 1 to `survive` of its parts.

    Raises:
      ConfigError: nothing would be left.
    """
    machines = []
    for left in smaller_machines(machine, survive):
        try:
            plan = BatchPlan.from_config(
                config,
                left.num_devices,
                left.num_hosts,
                num_slices=left.num_slices,
                samples_per_epoch=samples_per_epoch,
            )
        except ConfigError as error:
            machines.append(SurvivingMachine(left, None, str(error), None))
            continue
        # The compiler knows no part of a slice.
        has_program = topology and (machine.num_slices > 1 or left == machine)
        machines.append(
            SurvivingMachine(
                left,
                plan,
                None,
                _figures(config, topology, left.num_slices) if has_program else None,
            )
        )
    return machines


def _figures(config: Config, topology: str | None, num_slices: int) -> UpdateFigures:
    from maxbatch.around.compile.compiling import largest_update
    from maxbatch.commands.targets import plan_on
    from maxbatch.run.compile.target import find_target

    target = find_target(topology, num_slices)
    done = largest_update(config, target, plan_on(config, target))
    verdict = done.verdict
    return UpdateFigures(
        verdict.needed_bytes, verdict.available_bytes, verdict.fits, done.modelled.modelled_step_s
    )


def render_survival(rows: list[SurvivingMachine], console: Console) -> None:
    """Prints the rows as a table, and the refusals below it."""
    from maxbatch.plan.view import number_text
    from maxbatch.system.terminal.terminal import PlainTable

    is_compiled = any(row.figures for row in rows)
    heads = [
        "slices",
        "hosts",
        "devices",
        "rows per device",
        "accumulation",
        "global batch",
        "padded share",
    ]
    heads += ["needed", "available", "modelled step"] if is_compiled else []
    table = PlainTable(*heads, justify="right")
    of_batch = (*_OF_BATCH[1:3], _OF_BATCH[0])
    for row in rows:
        machine, plan = row.machine, row.plan
        numbers = (machine.num_slices, machine.num_hosts, machine.num_devices)
        cells = [
            number_text(value)
            for value in (*numbers, *(getattr(plan, name, None) for name in of_batch))
        ]
        cells.append(f"{plan.padded_share:.2%}" if plan else "refused")
        table.add_row(*cells, *(_figure_cells(row.figures) if is_compiled else []))
    console.print()
    console.print(table)
    for row in rows:
        if row.refusal:
            console.print(
                f"refused on {row.machine.num_units} {row.machine.unit}: {row.refusal}",
                soft_wrap=True,
            )


def _figure_cells(figures: UpdateFigures | None) -> list[str]:
    from maxbatch.run.compile.memory import gigabytes

    if figures is None:
        return ["-"] * 3
    needed = gigabytes(figures.hbm_bytes_needed) + ("" if figures.fits else " (does not fit)")
    step = "-" if figures.modelled_step_s is None else f"{figures.modelled_step_s * 1e3:,.1f} ms"
    return [needed, gigabytes(figures.hbm_bytes_available), step]
