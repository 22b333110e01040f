"""`maxbatch rl`: GRPO post-training, in this process."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from maxbatch.commands.arguments import add_config, config_of, count
from maxbatch.commands.refusing import refusing_together
from maxbatch.config.loading import configs_dir
from maxbatch.system.errors import EXIT_FAILED, EXIT_STOPPED, ConfigError, report

if TYPE_CHECKING:
    from maxbatch.config.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `maxbatch rl`."""
    add_config(parser)
    devices = "train on N CPU devices made in this process"
    parser.add_argument("--simulate-devices", type=count, metavar="N", help=devices)
    hosts = "train in H processes of N / H devices each (default N: H)"
    parser.add_argument("--simulate-hosts", type=count, metavar="H", help=hosts)


def run(args: argparse.Namespace) -> int:
    """Trains the policy of a config; returns the exit code."""
    from maxbatch.plan.batch import BatchPlan

    with refusing_together():
        config = config_of(args, default=str(configs_dir() / "post_train" / "rl.yml"))
        if not config.recipe.is_sampled:
            raise ConfigError(
                "batch_size=null: must be the number of prompts in a batch; works: batch_size=32, or a config built on "
                "configs/post_train/rl.yml"
            )
    if args.simulate_hosts:
        from maxbatch.commands.simulation import check_hosts, run_hosts

        num_devices = args.simulate_devices or args.simulate_hosts
        check_hosts(num_devices, args.simulate_hosts)
        BatchPlan.from_config(config, num_devices, args.simulate_hosts)
        per_host = str(num_devices // args.simulate_hosts)
        command = ["rl", *args.config, "--simulate-devices", per_host]
        return run_hosts(command, args.simulate_hosts, partial(newest_saved, config), config.heartbeat_timeout_s)
    if args.simulate_devices:
        from maxbatch.commands.simulation import simulate_devices

        simulate_devices(args.simulate_devices)
    from maxbatch.parallel.hosts import together
    from maxbatch.rl.run import train_policy
    from maxbatch.training.compile.flags import state_flags

    with refusing_together():
        state_flags(config.libtpu_flags, config.data_cache_dir)  # to join the other hosts starts JAX
    with together(report, config.heartbeat_timeout_s, partial(newest_saved, config)):
        outcome = train_policy(config)
    if outcome.stopped_by is None:
        return 0
    return EXIT_STOPPED if config.enable_checkpointing else EXIT_FAILED


def newest_saved(config: Config) -> int | None:
    """Returns the newest step from which the same command would continue, or else that of the warm start.

    None if there is neither.
    """
    from maxbatch.runs.position import last_saved
    from maxbatch.runs.run_folder import WARM_START
    from maxbatch.system.storage import as_path

    if not config.enable_checkpointing:
        return None
    own = last_saved(as_path(config.run_dir))
    return last_saved(as_path(config.run_dir) / WARM_START) if own is None else own
