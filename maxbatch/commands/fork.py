"""`maxbatch fork`: a new run that stands where another run stood."""

from __future__ import annotations

import argparse
import shlex

from maxbatch.commands.arguments import check_overrides, count, place
from maxbatch.config.config import Config
from maxbatch.config.loading import dump_config, load_config
from maxbatch.config.pins import changed_since, pinned_changes, read_written
from maxbatch.plan.refusal import Refusal
from maxbatch.plan.skip_samples import holes_of
from maxbatch.run.folder.foreign import new_folder
from maxbatch.run.folder.fork import Fork
from maxbatch.run.folder.holes_behind import refuse_other_holes
from maxbatch.run.folder.run_folder import config_file
from maxbatch.system.errors import EXIT_DONE, ConfigError
from maxbatch.system.storage.storage import AnyPath, as_typed
from maxbatch.system.terminal.folding import folded_command, terminal_width

_NAMES_OF_THE_FOLDER = ("run_dir", "run_name", "base_output_directory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=place, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys that the fork changes"
    )
    parser.add_argument(
        "--step", type=count, required=True, metavar="K", help="the step, which has a checkpoint"
    )
    parser.add_argument(
        "--output", type=place, required=True, metavar="NEW", help="the new run's folder"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the fork, and prints what it changes and how it goes on; returns 0."""
    check_overrides(args.overrides, "fork takes one RUN")
    source, target = as_typed(args.run), as_typed(args.output)
    written = _read_config(source)
    fork = Fork.at(source, args.step, _nearest)
    config = _config_of(args, source)
    _refuse_changes(fork, written, config)
    if _is_within(target, source):
        raise ConfigError(
            f"--output {target}: must not be in RUN, which a fork leaves as it is; works: "
            f"--output {shlex.quote(new_folder(args.run))}"
        )
    works = f"--output {shlex.quote(new_folder(args.output))}"
    identity = fork.write_new(target, dump_config(config), works)
    seen = fork.record.position.samples_seen
    print(f"{target}: a fork of {source} at step {fork.step}, after {seen:,} samples")
    print(f"its id is {identity.run_id}, that of its origin {fork.origin['run_id'] or 'unknown'}")
    for line in changed_since(written, config).values():
        print(line)
    command = "rl" if config.recipe.is_sampled else "train"
    path = shlex.quote(str(target / "config.yml"))
    print(folded_command(f"next: maxbatch {command} {path}", 6, terminal_width()))
    return EXIT_DONE


def _read_config(source: AnyPath) -> Config:
    path = config_file(source)
    config = read_written(path)
    if config is None:
        load_config(str(path))  # its error names the fault
        raise ConfigError(f"{path}: is not the config of a run of this version")
    return config


def _nearest(steps: list[int]) -> str:
    if not steps:
        return ", and none of another one"
    nearest = " and ".join(map(str, steps))
    return f"; the nearest: {nearest}; works: --step {steps[0]}"


def _config_of(args: argparse.Namespace, source: AnyPath) -> Config:
    for text in args.overrides:
        name = text.partition("=")[0]
        if name in _NAMES_OF_THE_FOLDER:
            raise ConfigError(f"{text}: --output names the folder of the fork; leave {name} out")
    return load_config(str(source / "config.yml"), [*args.overrides, f"run_dir={args.output}"])


def _refuse_changes(fork: Fork, written: Config, config: Config) -> None:
    """Raises ConfigError for keys that a resume of the run would refuse."""
    rule = "a fork goes on with the stream and the model of its run"
    for name in pinned_changes(written, config):
        raise Refusal(config, name, rule, {name: written[name]})
    if not config.enable_checkpointing:
        raise config.fault(
            "enable_checkpointing", "true in a fork, which goes on from its checkpoint", "true"
        )
    refuse_other_holes(
        fork.run, fork.record, f"its checkpoint of step {fork.step}", holes_of(config)
    )


def _is_within(target: AnyPath, folder: AnyPath) -> bool:
    inner, outer = str(target.resolve()), str(folder.resolve()).rstrip("/")
    return inner != outer and inner.startswith(f"{outer}/")
