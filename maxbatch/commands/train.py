"""`maxbatch train`: a run in this process, on its share of several hosts, or on simulated ones."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from maxbatch.commands.arguments import add_config, config_of, count
from maxbatch.commands.refusing import refusing_together
from maxbatch.system.errors import EXIT_FAILED, EXIT_STOPPED, ConfigError, report

if TYPE_CHECKING:
    from maxbatch.config.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `maxbatch train`."""
    add_config(parser)
    devices = "train on N CPU devices made in this process"
    parser.add_argument("--simulate-devices", type=count, metavar="N", help=devices)
    hosts = "train in H processes of N / H devices each (default N: H)"
    parser.add_argument("--simulate-hosts", type=count, metavar="H", help=hosts)
    tiny = "try the config on this machine: a tiny model of its form, synthetic data, and a look at the real data"
    parser.add_argument("--try", action="store_true", dest="is_trial", help=tiny)


def run(args: argparse.Namespace) -> int:
    """Trains the run of a config; returns the exit code."""
    from maxbatch.plan.batch import check_batch_keys

    with refusing_together():
        config = config_of(args)
        check_batch_keys(config.plan)
    if args.is_trial:
        return _try(config, args)
    if args.simulate_hosts:
        return _run_simulated_hosts(args, args.simulate_hosts, config)
    if args.simulate_devices:
        from maxbatch.commands.simulation import simulate_devices

        simulate_devices(args.simulate_devices)
    from maxbatch.parallel.hosts import together
    from maxbatch.training.compile.flags import state_flags
    from maxbatch.training.pretraining import train

    with refusing_together():
        state_flags(config.libtpu_flags, config.data_cache_dir)  # to join the other hosts starts JAX
    with together(report, config.heartbeat_timeout_s, partial(newest_saved, config)):
        outcome = train(config)
    if outcome.stopped_by is None:
        return 0
    return EXIT_STOPPED if config.enable_checkpointing else EXIT_FAILED


def _try(config: Config, args: argparse.Namespace) -> int:
    from maxbatch.commands.simulation import simulate_devices
    from maxbatch.commands.trial_run import make_trial, try_run

    if args.simulate_devices or args.simulate_hosts:
        flag = "--simulate-devices" if args.simulate_devices else "--simulate-hosts"
        raise ConfigError(f"{flag}: must not be given beside --try, which makes the devices that the mesh needs")
    trial = make_trial(config)
    simulate_devices(trial.num_devices)
    return try_run(config, trial)


def newest_saved(config: Config) -> int | None:
    """Returns the newest step from which the same command would continue; None if there is none."""
    from maxbatch.runs.position import last_saved
    from maxbatch.system.storage import as_path

    if not config.enable_checkpointing:
        return None
    run_dir, directory = as_path(config.run_dir), config.local_checkpoint_directory
    steps = [last_saved(run_dir)]
    if directory:
        from maxbatch.training.weights.local_files import saved_here

        steps.append(saved_here(directory, run_dir))
    return max((step for step in steps if step is not None), default=None)


def _run_simulated_hosts(args: argparse.Namespace, num_hosts: int, config: Config) -> int:
    from maxbatch.commands.simulation import check_hosts, run_hosts

    num_devices = args.simulate_devices or num_hosts
    check_hosts(num_devices, num_hosts)
    per_host = str(num_devices // num_hosts)
    command, last_saved = ["train", *args.config, "--simulate-devices", per_host], partial(newest_saved, config)
    return run_hosts(command, num_hosts, last_saved, config.heartbeat_timeout_s)
