"""The devices that `compile` and `fit` compile for, from their flags."""

from __future__ import annotations

import argparse

from ml_collections import ConfigDict

from maxbatch.commands.arguments import add_config, config_of, count
from maxbatch.commands.simulation import simulate_devices
from maxbatch.plan.batch import BatchPlan, check_batch_keys
from maxbatch.system.errors import ConfigError
from maxbatch.training.compile.flags import with_flags
from maxbatch.training.compile.target import Target, find_target
from maxbatch.training.compile.topology import parse_slice


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the config and the flags that name the devices."""
    add_config(parser)
    topology = "a TPU slice that is not here, in chips: v5p:4x4x4 (default: this machine)"
    parser.add_argument("--topology", metavar="T", help=topology)
    slices = "slices of that topology (default 1)"
    parser.add_argument("--slices", type=count, metavar="S", default=1, help=slices)
    simulated = "compile for N CPU devices made in this process"
    parser.add_argument("--simulate-devices", type=count, metavar="N", help=simulated)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def planned(args: argparse.Namespace) -> tuple[ConfigDict, Target, BatchPlan]:
    """Returns the config, the devices that the flags name, and the batch plan on the mesh of those devices.

    Raises:
      ConfigError: the flags contradict each other, the devices cannot run the model, or a rule of the batch is broken.
    """
    config = config_of(args)
    check_batch_keys(config)
    if args.topology and args.simulate_devices:
        raise ConfigError(f"--simulate-devices {args.simulate_devices}: must not be given beside --topology, which "
                          f"says how many devices there are; works: --topology {args.topology}")  # fmt: skip
    if args.simulate_devices:
        simulate_devices(args.simulate_devices)
    config = with_flags(config, parse_slice(args.topology).version if args.topology else None)
    target = find_target(args.topology, args.slices)
    from maxbatch.data.stream.sources import samples_per_epoch_if_cached
    from maxbatch.training.compile.lowering import checked_mesh_shape

    shape = checked_mesh_shape(config, target.devices)
    epoch = samples_per_epoch_if_cached(config)
    return config, target, BatchPlan.on_mesh(config, shape, target.num_hosts, samples_per_epoch=epoch)
