"""`maxbatch train`: a run of pre-training or fine-tuning, or a trial of its config."""

from __future__ import annotations

import argparse

from maxbatch.commands.arguments import config_of, simulate_devices
from maxbatch.commands.refusing import refusing_together
from maxbatch.commands.training_run import add_run_arguments, run_here, run_on_simulated_hosts
from maxbatch.config.config import Config
from maxbatch.system.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    tiny = (
        "try the config on this machine: a tiny model of its form, synthetic data, and a look at "
        "the real data"
    )
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
        return run_on_simulated_hosts("train", args, config)
    simulate_devices(args.simulate_devices)
    from maxbatch.run.pretraining import train

    return run_here(config, train)


def _try(config: Config, args: argparse.Namespace) -> int:
    from maxbatch.commands.trial_run import make_trial, try_run

    if args.simulate_devices or args.simulate_hosts:
        flag = "--simulate-devices" if args.simulate_devices else "--simulate-hosts"
        raise ConfigError(
            f"{flag}: must not be given beside --try, which makes the devices that the mesh needs"
        )
    trial = make_trial(config)
    simulate_devices(trial.num_devices)
    return try_run(config, trial)
