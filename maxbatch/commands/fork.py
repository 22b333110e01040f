"""`maxbatch fork`: a new run that stands where another run stood."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path

from maxbatch.commands.arguments import check_overrides, count, place
from maxbatch.config.config import Config
from maxbatch.config.loading import dump_config, load_config
from maxbatch.config.pins import changed_since, pinned_changes, read_written
from maxbatch.plan.refusal import Refusal
from maxbatch.plan.skip_samples import holes_of
from maxbatch.run.folder.foreign import new_folder
from maxbatch.run.folder.fork import Fork
from maxbatch.run.folder.holes_behind import refuse_other_holes
from maxbatch.run.folder.run_folder import SESSIONS_FILE, config_file
from maxbatch.run.folder.sessions import read_sessions
from maxbatch.run.session_configs import SessionConfigs
from maxbatch.system.errors import EXIT_DONE, ConfigError
from maxbatch.system.storage.storage import AnyPath, as_typed
from maxbatch.system.terminal.folding import folded_command, terminal_width
from maxbatch.system.terminal.warning import note

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
    then = SessionConfigs(written, read_sessions(source)).at(args.step + 1)
    if then is None:
        note(
            f"{source}: {SESSIONS_FILE} does not state the config of update {args.step + 1} (an "
            "older maxbatch wrote it); the fork has the last session's"
        )
        then = written
    config = _config_of(args, then)
    _refuse_changes(fork, then, config)
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
    for line in changed_since(then, config).values():
        print(line)
    for line in _since(source, args.step, then, written):
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


def _config_of(args: argparse.Namespace, config: Config) -> Config:
    """Returns the config of the fork: that of its run at the step, with the user's keys."""
    for text in args.overrides:
        name = text.partition("=")[0]
        if name in _NAMES_OF_THE_FOLDER:
            raise ConfigError(f"{text}: --output names the folder of the fork; leave {name} out")
    with tempfile.TemporaryDirectory(prefix="maxbatch-fork-") as folder:
        file = Path(folder) / "config.yml"
        file.write_text(dump_config(config))
        return load_config(file, [*args.overrides, f"run_dir={args.output}"])


def _since(source: AnyPath, step: int, then: Config, written: Config) -> list[str]:
    """Returns lines about the keys that the run changed in later sessions."""
    later = changed_since(then, written).values()
    if not later:
        return []
    return [f"as in update {step + 1} of {source}, which later changed:", *later]


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
