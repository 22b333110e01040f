"""The devices that `compile` and `fit` compile for, from their flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from maxbatch.commands.arguments import (
    add_config,
    add_simulated_devices,
    config_of,
    count,
    simulate_devices,
)
from maxbatch.config.config import Config
from maxbatch.plan.batch import BatchPlan, check_batch_keys
from maxbatch.plan.survival import Machine, smaller_machines
from maxbatch.run.compile.flags import flags_in_force, state_flags
from maxbatch.run.compile.target import Target, find_target
from maxbatch.run.compile.topology import stated_slice
from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    from maxbatch.around.compile.modelled import Modelled


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the config and the flags that name the devices."""
    add_config(parser)
    topology = (
        "a TPU slice that is not here, in chips (v5p:4x4x4) or by Google's name (v5p-128); "
        "default: this machine"
    )
    parser.add_argument("--topology", metavar="T", help=topology)
    slices = "slices of that topology (default 1)"
    parser.add_argument("--slices", type=count, metavar="S", default=1, help=slices)
    add_simulated_devices(parser, "compile for N CPU devices made in this process")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def config_and_target(args: argparse.Namespace) -> tuple[Config, Target]:
    """Returns the config and the devices that the flags name; raises ConfigError if the flags
    contradict each other.
    """
    config = config_before_devices(args)
    target = find_target(args.topology, args.slices)
    return with_flags_of(config, target), target


def config_before_devices(args: argparse.Namespace) -> Config:
    """Returns the config, with all set that must be set before JAX finds its devices.

    Raises:
      ConfigError: an invalid config, or flags that contradict each other.
    """
    config = config_of(args)
    check_batch_keys(config.plan)
    if args.topology and args.simulate_devices:
        raise ConfigError(
            f"--simulate-devices {args.simulate_devices}: must not be given beside --topology, "
            f"which says how many devices there are; works: --topology {args.topology}"
        )
    simulate_devices(args.simulate_devices)
    sold = stated_slice(args.topology) if args.topology else None
    args.topology = str(sold) if sold else None
    state_flags(config.libtpu_flags, config.data_cache_dir, sold.version if sold else None)
    return config


def with_flags_of(config: Config, target: Target) -> Config:
    """Returns the config with the compiler flags of the devices."""
    return config.replaced({"libtpu_flags": flags_in_force(config.libtpu_flags, target.devices)})


def smaller_targets(args: argparse.Namespace, target: Target) -> list[tuple[Target, int]]:
    """Returns the slices without 1 to `--survive` of them, and their number.

    Raises:
      ConfigError: the devices are not slices of a topology, or nothing is left.
    """
    if args.survive is None:
        return []
    if not args.topology or args.slices == 1:
        raise ConfigError(
            f"--survive {args.survive}: counts slices of a topology here, and there is one; works: "
            f"--topology {args.topology or 'v5e:16x16'} --slices {args.survive + 1}"
        )
    machines = smaller_machines(
        Machine(len(target.devices), target.num_hosts, args.slices), args.survive
    )
    return [(find_target(args.topology, left.num_slices), left.num_slices) for left in machines[1:]]


def plan_on(config: Config, target: Target) -> BatchPlan:
    """Returns the batch plan of a config on the mesh of devices.

    Raises:
      ConfigError: the devices cannot run the model, or a rule of the batch is broken.
    """
    from maxbatch.data.stream.sources import samples_per_epoch_if_cached
    from maxbatch.run.programs import checked_mesh_shape

    shape = checked_mesh_shape(config.plan, config.decoder, target.devices)
    epoch = samples_per_epoch_if_cached(config.stream)
    return BatchPlan.from_config(
        config,
        shape.num_devices,
        target.num_hosts,
        num_slices=shape.num_slices,
        samples_per_epoch=epoch,
    )


def show_time(programs: Mapping[str, Modelled]) -> None:
    """Prints the modelled time of programs by the compiler's clock, and the most expensive
    operations.
    """
    from rich.table import Table

    from maxbatch.run.compile.memory import gigabytes
    from maxbatch.system.terminal.terminal import PipeConsole

    timed = {
        name: program for name, program in programs.items() if program.modelled_step_s is not None
    }
    if not timed:
        return
    columns = (
        "program",
        "compute",
        "kernels",
        "hidden",
        "exposed",
        "run",
        "tokens/s per device",
        "MFU",
    )
    table = Table(
        *columns,
        title="modelled time of a run: a model of the compiler's schedule, nothing is measured",
    )
    for name, program in timed.items():
        cycles = (
            f"{(count or 0) / 1e6:,.1f}M"
            for count in (program.compute_cycles, program.kernel_cycles)
        )
        sent = map(gigabytes, (program.hidden_collective_bytes, program.exposed_collective_bytes))
        rate, mfu = program.modelled_tokens_per_second_per_device, program.modelled_mfu
        rates = ("" if rate is None else f"{rate:,.0f}", "" if mfu is None else f"{mfu:.1%}")
        table.add_row(
            name, *cycles, *sent, f"{(program.modelled_step_s or 0) * 1e3:,.1f} ms", *rates
        )
    PipeConsole().print(table)
    name, largest = max(timed.items(), key=lambda pair: pair[1].modelled_step_s or 0)
    dearest = Table(
        "cycles",
        "share",
        "operation",
        "source",
        title=f"most expensive operations of {name} (modelled)",
    )
    busy = (largest.compute_cycles or 0) + (largest.kernel_cycles or 0)
    for operation in largest.operations:
        share = f"{operation.cycles / max(1, busy):.1%}"
        dearest.add_row(f"{operation.cycles / 1e6:,.1f}M", share, operation.name, operation.source)
    PipeConsole().print(dearest)
