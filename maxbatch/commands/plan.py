"""`maxbatch plan`: the whole batch plan of a run, for people and for scripts. Imports no JAX."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from maxbatch.commands.arguments import add_config, config_of, count, note
from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    from ml_collections import ConfigDict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `maxbatch plan`."""
    add_config(parser)
    parser.add_argument("--devices", type=count, metavar="N", help="plan for N devices (default 1)")
    parser.add_argument("--hosts", type=count, metavar="H", default=1, help="plan for H hosts (default 1)")
    parser.add_argument(
        "--slices", type=count, metavar="S", default=1, help="slices of the devices (default 1)"
    )
    parser.add_argument(
        "--samples-per-epoch", type=count, metavar="N", help="samples in one pass over data that is not here"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--layout", action="store_true", help="draw which sample lands on which device")
    parser.add_argument("--words", action="store_true", help="say it in the words of other frameworks")


def run(args: argparse.Namespace) -> int:
    """Print the plan of a config; return the exit code."""
    from maxbatch.config.rules import check_data_paths
    from maxbatch.plan.batch import BatchPlan

    config = config_of(args)
    check_data_paths(config)
    if args.words and config.batch_size is not None:
        raise ConfigError(
            f"--words: is for the batch of pre-training, and batch_size={config.batch_size} states one of prompts"
        )
    plan = BatchPlan.from_config(
        config,
        args.devices or 1,
        args.hosts,
        num_slices=args.slices,
        samples_per_epoch=args.samples_per_epoch or _cached_samples_per_epoch(config),
    )
    if args.devices is None:
        note("planned for 1 device and 1 host; --devices N --hosts H plans for another machine")
    for warning in plan.warnings:
        note(f"warning: {warning}")
    if args.json:
        import json

        from maxbatch.plan.words import words_of

        layout = {"layout": plan.layout()} if args.layout else {}
        words = {"words": [dataclasses.asdict(words) for words in words_of(plan)]} if args.words else {}
        print(json.dumps({**plan.to_dict(), **layout, **words}, indent=2))
        return 0
    from maxbatch.plan.view import plan_console, render_layout, render_plan, render_words

    console = plan_console()
    render_plan(plan, config, console)
    if args.layout:
        render_layout(plan, console)
    if args.words:
        render_words(plan, console)
    return 0


def _cached_samples_per_epoch(config: ConfigDict) -> int | None:
    from maxbatch.data.stream.epoch_length import samples_per_epoch_if_cached

    return samples_per_epoch_if_cached(config)
