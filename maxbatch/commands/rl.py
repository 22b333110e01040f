"""`maxbatch rl`: GRPO post-training."""

from __future__ import annotations

import argparse

from maxbatch.commands.arguments import config_of, simulate_devices
from maxbatch.commands.refusing import refusing_together
from maxbatch.commands.training_run import add_run_arguments, run_here, run_on_simulated_hosts
from maxbatch.config.paths import configs_dir
from maxbatch.system.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Trains the policy of a config; returns the exit code."""
    with refusing_together():
        config = config_of(args, default=str(configs_dir() / "post_train" / "rl.yml"))
        if not config.recipe.is_sampled:
            raise ConfigError(
                "batch_size=null: must be the number of prompts in a batch; works: batch_size=32, "
                "or a config built on configs/post_train/rl.yml"
            )
    if args.simulate_hosts:
        return run_on_simulated_hosts("rl", args, config)
    simulate_devices(args.simulate_devices)
    from maxbatch.kinds.prompt.run import train_policy

    return run_here(config, train_policy)
