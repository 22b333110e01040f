"""`maxbatch fit`: the largest `per_device_batch_size` that fits, found by compiling."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from maxbatch.commands.arguments import local_path, note
from maxbatch.commands.targets import add_target_arguments, planned
from maxbatch.config.loading import dump_config, keys
from maxbatch.system.errors import EXIT_DONE, ConfigError, TrainingError, report

if TYPE_CHECKING:
    from maxbatch.commands.fit.choices import Choice
    from maxbatch.commands.fit.oracle import CompilerOracle
    from maxbatch.training.compile.target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `maxbatch fit`."""
    add_target_arguments(parser)
    parser.add_argument("--write", type=local_path, metavar="FILE", help="put the choice into this config file")


def run(args: argparse.Namespace) -> int:
    """Finds the largest batch that fits and prints it; raises TrainingError if not even the smallest does.

    The first Ctrl-C ends the process at once: compilations that are under way cannot be interrupted, and waiting for
    them would take minutes.
    """
    config, target, plan = planned(args)
    from maxbatch.commands.fit.choices import POLICIES, Sizes
    from maxbatch.commands.fit.oracle import CompilerOracle
    from maxbatch.commands.fit.view import record, show
    from maxbatch.commands.fit.ways import find_ways

    if target.memory_bytes is None:
        raise TrainingError(f"{target.name}: the device does not say how much memory it has")
    wants_batch = config.gradient_accumulation_steps is None
    policies = POLICIES if wants_batch else (config.remat_policy,)
    sizes, started = Sizes.of(config, plan), time.monotonic()

    def say(text: str) -> None:
        if not args.json:
            note(f"[{time.monotonic() - started:.0f} s] {text}")

    configs = [_with(config, remat_policy=policy) for policy in policies]
    oracles = [CompilerOracle(one, target, plan.mesh, say) for one in configs]
    try:
        choices, skipped = find_ways(oracles, sizes, wants_batch, say)
    except KeyboardInterrupt as interrupt:
        code = report(interrupt)
        sys.stderr.flush()
        os._exit(code)
    if not choices:
        raise _nothing_fits(args.json, oracles, target, sizes.per_device(sizes.rows[0]))
    if args.write:
        _write(Path(args.write), config, choices[0], wants_batch)
    if args.json:
        print(json.dumps(record(choices, oracles, wants_batch, skipped), indent=2))
    else:
        show(choices, target, wants_batch)
        if args.write:
            print(f"written to {args.write}")
    return EXIT_DONE


def _with(config: ConfigDict, **changes: Any) -> ConfigDict:
    changed = ConfigDict(config.to_dict())
    changed.update(changes)
    return changed.lock()


def _nothing_fits(as_json: bool, oracles: Sequence[CompilerOracle], target: Target, smallest: object) -> TrainingError:
    from maxbatch.training.compile.memory import gigabytes

    last = oracles[-1]
    verdict = min((asked.verdict for asked in last.asked.values()), key=lambda v: v.needed_bytes or 2**63)
    if as_json:
        record = {
            "per_device_batch_size": None,
            "hbm_bytes_needed": verdict.needed_bytes,
            "hbm_bytes_available": verdict.available_bytes,
            "target": target.name,
        }
        print(json.dumps(record, indent=2))
    more = "" if last.config.remat_policy == "full" else "remat_policy=full, "
    return TrainingError(
        f"not even per_device_batch_size={smallest} fits {target.name}: it needs "
        f"{gigabytes(verdict.needed_bytes)} per device of {gigabytes(verdict.available_bytes)}; try {more}"
        "a larger topology, or an axis that splits the model (ici_tensor_parallelism)"
    )


def _write(path: Path, config: ConfigDict, best: Choice, wants_batch: bool) -> None:
    """Writes the choice: the lines of its keys if the config file exists, else a whole config."""
    changes: dict[str, Any] = {"per_device_batch_size": best.per_device_batch_size}
    if wants_batch:
        changes["remat_policy"] = best.remat_policy
    try:
        if not path.exists():
            path.write_text(dump_config(_with(config, **changes)))
            return
        text = path.read_text()
        for name, value in changes.items():
            line = f"{name}: {keys()[name].write(value)}"
            text, replaced = re.subn(rf"(?m)^{name}\s*:[^#\n]*?(?=\s*(#|$))", line, text)
            if not replaced:
                text = f"{text.rstrip()}\n{line}\n".lstrip()
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--write {path}: cannot be written ({error.strerror})") from error
