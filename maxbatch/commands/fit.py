"""`maxbatch fit`: the largest `per_device_batch_size` or `max_tokens_per_pass` that fits, found by
compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from maxbatch.commands.arguments import config_arguments, count, local_path
from maxbatch.commands.targets import (
    add_target_arguments,
    config_and_target,
    plan_on,
    smaller_targets,
)
from maxbatch.config.config import Config
from maxbatch.config.loading import dump_config, resolve
from maxbatch.config.values import Value, shown_path, value_text
from maxbatch.config.yaml_file import MOST_BYTES, compose
from maxbatch.system.errors import EXIT_DONE, ConfigError, TrainingError, report, writing
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.bounded import read_text
from maxbatch.system.terminal.folding import printable
from maxbatch.system.terminal.warning import note

if TYPE_CHECKING:
    from maxbatch.around.fit.choices import Choice, Wanted
    from maxbatch.around.fit.ways import Way
    from maxbatch.run.compile.memory import Verdict
    from maxbatch.run.compile.target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    mesh = (
        "auto: also choose the data, fsdp and tensor axes that the config does not state, and the "
        "context axis if it states how rows are split (default: stated)"
    )
    parser.add_argument("--mesh", choices=("stated", "auto"), default="stated", help=mesh)
    survive = "also find what every machine down to K slices fewer needs for the same batch"
    parser.add_argument("--survive", type=count, metavar="K", help=survive)
    parser.add_argument(
        "--write", type=local_path, metavar="FILE", help="write the choice into this config file"
    )


def run(args: argparse.Namespace) -> int:
    """Finds the largest batch that fits and prints it; raises TrainingError if not even the
    smallest does.

    The first Ctrl-C ends the process at once: compilations that are under way cannot be
    interrupted, and waiting for them would take minutes.
    """
    config, target = config_and_target(args)
    if config.reproducible_sums:
        raise ConfigError(
            "reproducible_sums=true: must be false in fit, whose answer is rows of a pass, since "
            "memory follows from reproducible_rows here; maxbatch compile has the bytes; works: "
            "reproducible_sums=false"
        )
    smaller = smaller_targets(args, target)
    if args.write:
        _check_writable(Path(args.write))
        if smaller:
            raise ConfigError(
                f"--write {shown_path(args.write)}: must not be given beside --survive, whose "
                "machines may need different keys; works: --write without --survive"
            )
    from maxbatch.around.fit.surviving import FittedMachine, render_fitted
    from maxbatch.around.fit.view import record, show

    if target.memory_bytes is None:
        raise TrainingError(f"{target.name}: the device does not report its memory")
    started = time.monotonic()

    def say(text: str) -> None:
        if not args.json:
            note(f"[{time.monotonic() - started:.0f} s] {text}")

    search = _search(config, target, args, say)
    if not search.choices:
        raise _nothing_fits(search.ways, target)
    choices, wanted = search.choices, search.wanted
    rows = [FittedMachine(target, args.slices, wanted, choices[0], None)]
    for left, num_slices in smaller:
        try:
            search_left = _search(config, left, args, say)
            best = search_left.choices[0] if search_left.choices else None
            refusal = None if best else _too_large(search_left.ways, left)
        except ConfigError as error:
            best, refusal = None, str(error)
        rows.append(FittedMachine(left, num_slices, wanted, best, refusal))
    if args.write:
        write_choice(Path(args.write), config, choices[0].keys(wanted))
    if args.json:
        survive = {"survive": [row.to_dict() for row in rows]} if smaller else {}
        print(json.dumps(record(choices, search.ways, wanted, search.skipped) | survive, indent=2))
    else:
        show(choices, wanted, search.skipped)
        if smaller:
            render_fitted(rows)
        if args.write:
            print(printable(f"written to {args.write}"))
    return EXIT_DONE


class _Search(NamedTuple):
    """A finished search on devices."""

    wanted: Wanted
    ways: list[Way]
    choices: list[Choice]  # those that fit, best first
    skipped: list[str]  # ways without time


def _search(
    config: Config, target: Target, args: argparse.Namespace, say: Callable[[str], None]
) -> _Search:
    """Finds the choices that fit devices.

    Raises:
      ConfigError: no mesh can run the model and its batch.
    """
    from maxbatch.around.compile.modelled import has_clock
    from maxbatch.around.fit.choices import Wanted
    from maxbatch.around.fit.ways import find_ways

    wanted = Wanted(config, target, args.mesh == "auto")
    ways = _ways(wanted, _stated(args), say)
    cuts = wanted.states_batch and has_clock(target)
    try:
        return _Search(wanted, ways, *find_ways(ways, cuts or wanted.any_mesh, cuts, say))
    except KeyboardInterrupt as interrupt:
        code = report(interrupt, args.json)
        sys.stderr.flush()
        os._exit(code)


def _stated(args: argparse.Namespace) -> frozenset[str]:
    """Returns the keys stated above base.yml."""
    settings = resolve(*config_arguments(args))
    return frozenset(name for name, setting in settings.items() if setting.layer != "base.yml")


def _ways(wanted: Wanted, fixed: frozenset[str], say: Callable[[str], None]) -> list[Way]:
    """Returns the ways to compile: on each mesh every remat policy if the batch is stated.

    Raises:
      ConfigError: no mesh can run the model and its batch.
    """
    from maxbatch.around.fit.choices import POLICIES, Sizes
    from maxbatch.around.fit.meshes import mesh_text, proposals
    from maxbatch.around.fit.oracle import CompilerOracle
    from maxbatch.around.fit.ways import Way
    from maxbatch.parallel.mesh import num_slices

    config, target = wanted.config, wanted.target
    meshes: list[dict[str, Value]] = []
    if wanted.any_mesh:
        meshes = list(proposals(config, fixed, len(target.devices), num_slices(target.devices)))
    policies = (
        dict.fromkeys((*POLICIES, config.remat_policy))
        if wanted.states_batch
        else (config.remat_policy,)
    )
    ways, refused = [], list[ConfigError]()
    for axes in meshes or [{}]:
        on_mesh = config.replaced(axes)
        try:
            plan = plan_on(on_mesh, target)
            sizes = Sizes.of(on_mesh, plan)
        except ConfigError as error:
            refused.append(error)
            continue
        name = mesh_text(plan.mesh, config) if wanted.any_mesh else ""
        for policy in policies:
            ways.append(
                Way(
                    CompilerOracle(
                        on_mesh.replaced({"remat_policy": policy}), target, plan.mesh, say
                    ),
                    sizes,
                    name,
                )
            )
    if not ways:
        raise refused[0]
    return ways


def _least(ways: Sequence[Way]) -> Verdict:
    """Returns the verdict on the compiled program that needs the least memory."""
    verdicts = (asked.verdict for way in ways for asked in way.oracle.asked.values())
    return min(verdicts, key=lambda verdict: verdict.needed_bytes or 2**63)


def _nothing_fits(ways: Sequence[Way], target: Target) -> TrainingError:
    error, verdict = TrainingError(_too_large(ways, target)), _least(ways)
    error.figures = {
        "per_device_batch_size": None,
        "hbm_bytes_needed": verdict.needed_bytes,
        "hbm_bytes_available": verdict.available_bytes,
        "target": target.name,
    }
    return error


def _too_large(ways: Sequence[Way], target: Target) -> str:
    """Returns the message that not even the smallest micro-batch fits."""
    last = ways[-1]
    ((key, smallest),) = last.sizes.stated(last.sizes.rows[0]).items()
    more = "" if last.oracle.config.remat_policy == "full" else "remat_policy=full, "
    return (
        f"not even {key}={value_text(smallest)} fits {target.name}: {_least(ways).wants}; try "
        f"{more}a larger topology, or an axis that splits the model (ici_tensor_parallelism)"
    )


def _check_writable(path: Path) -> None:
    """Raises ConfigError if the choice could not be written to a file, before anything is
    compiled.
    """
    changed = path if path.exists() else path.parent
    if changed == path:
        compose(path)
    elif not path.parent.is_dir():
        raise ConfigError(
            f"--write {shown_path(path)}: {shown_path(path.parent)} is not a folder; "
            f"works: --write {shlex.quote(path.name)}"
        )
    if not os.access(changed, os.W_OK):
        raise ConfigError(f"--write {shown_path(path)}: cannot be written (Permission denied)")


def write_choice(path: Path, config: Config, changes: Mapping[str, Value]) -> None:
    """Writes the choice: the lines of its keys if the config file exists, else a whole config."""
    with writing(f"--write {path}"):
        if not path.exists():
            write_atomically(path, dump_config(config.replaced(changes)))
            return
        text = read_text(path, f"--write {path}", MOST_BYTES)
        for name, value in changes.items():
            line = f"{name}: {value_text(value)}"
            text, replaced = re.subn(rf"(?m)^{name}\s*:[^#\n]*?(?=\s*(#|$))", line, text)
            if not replaced:
                text = f"{text.rstrip()}\n{line}\n".lstrip()
        write_atomically(path, text)
