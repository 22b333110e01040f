"""A run of `maxbatch train` or `maxbatch rl`: in this process, on its share of several hosts, or on
simulated ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from maxbatch.commands.arguments import add_config, add_simulated_devices, count
from maxbatch.commands.refusing import refusing_together
from maxbatch.config.config import Config
from maxbatch.system.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, report

if TYPE_CHECKING:
    from maxbatch.run.session import Outcome


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the config and the flags of simulated machines."""
    add_config(parser)
    add_simulated_devices(parser, "train on N CPU devices made in this process")
    hosts = "train in H processes of N / H devices each (default N: H)"
    parser.add_argument("--simulate-hosts", type=count, metavar="H", help=hosts)


def run_on_simulated_hosts(command: str, args: argparse.Namespace, config: Config) -> int:
    """Runs a command (`train` or `rl`) in the processes of `--simulate-hosts`; returns the exit
    code.
    """
    from maxbatch.commands.simulation import check_hosts, run_hosts
    from maxbatch.parallel.deaths import on_end
    from maxbatch.plan.batch import BatchPlan
    from maxbatch.run.folder.sessions import end_killed_session
    from maxbatch.run.newest import newest_saved
    from maxbatch.system.storage.storage import as_path

    num_hosts, num_devices = args.simulate_hosts, args.simulate_devices or args.simulate_hosts
    check_hosts(num_devices, num_hosts)
    # Other resumes skip this: finished stages need not fit the new hosts.
    if config.recipe.is_sampled:
        BatchPlan.from_config(config, num_devices, num_hosts)  # refused once, not by every host
    on_end(lambda cause, _: end_killed_session(as_path(config.run_dir), cause))
    words = [command, *args.config, "--simulate-devices", str(num_devices // num_hosts)]
    saved = partial(newest_saved, config.run_dir, config.checkpoint)
    return run_hosts(words, num_hosts, saved, config.heartbeat_timeout_s)


def run_here(config: Config, train: Callable[[Config], Outcome]) -> int:
    """Trains in this process, with the other hosts of the environment; returns the exit code."""
    from maxbatch.parallel.deaths import on_end
    from maxbatch.parallel.hosts import together
    from maxbatch.run.folder.sessions import leave_sessions
    from maxbatch.run.newest import newest_saved
    from maxbatch.run.opening import prepare_jax

    with refusing_together():
        # to join the other hosts starts JAX
        prepare_jax(config.libtpu_flags, config.data_cache_dir)
    on_end(leave_sessions)
    saved = partial(newest_saved, config.run_dir, config.checkpoint)
    with together(report, config.heartbeat_timeout_s, config.host_wait_s, saved):
        outcome = train(config)
    if outcome.stopped_by is None:
        return EXIT_DONE
    return EXIT_STOPPED if config.enable_checkpointing else EXIT_FAILED
