"""`maxbatch fit`: the largest `per_device_batch_size` that fits, found by compiling."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from maxbatch.commands.arguments import config_of
from maxbatch.commands.compile import add_target_arguments, chosen_target, plan_for
from maxbatch.config.loading import dump_config, keys
from maxbatch.plan.batch import check_batch_keys
from maxbatch.system.errors import EXIT_FAILED, ConfigError, TrainingError

if TYPE_CHECKING:
    from maxbatch.commands.fit.choices import Choice
    from maxbatch.commands.fit.oracle import Judge
    from maxbatch.training.compile.target import Target

# Rematerialisation from the least to the most, tried where a wanted global batch leaves the choice.
_POLICIES = ("none", "minimal", "full")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `maxbatch fit`."""
    add_target_arguments(parser)
    parser.add_argument("--write", metavar="FILE", help="put the choice into this config file")


def run(args: argparse.Namespace) -> int:
    """Finds the largest batch that fits and says so; returns the exit code."""
    config = config_of(args)
    check_batch_keys(config)
    target = chosen_target(args)
    plan = plan_for(config, target)
    from maxbatch.commands.fit.choices import Sizes, choose
    from maxbatch.commands.fit.oracle import CORES, Judge
    from maxbatch.training.compile.lowering import checked_mesh_shape

    mesh_shape = checked_mesh_shape(config, target.devices)
    if target.memory_bytes is None:
        raise TrainingError(f"{target.name}: the device does not say how much memory it has")
    wants_batch = config.gradient_accumulation_steps is None
    policies = _POLICIES if wants_batch else (config.remat_policy,)
    sizes = Sizes.of(config, plan)
    judges = [
        Judge(_with(config, remat_policy=policy), target, mesh_shape, _say(args.json)) for policy in policies
    ]
    # A size and the next one, that would have to fail, or several policies side by side.
    at_once = min(2, max(1, CORES // len(judges)))
    with ThreadPoolExecutor(len(judges), "maxbatch-fit") as pool:
        found = list(pool.map(lambda j: choose(j, plan, sizes, target.memory_bytes or 0, at_once), judges))
    choices = [choice for choice in found if choice is not None]
    if not choices:
        return _nothing_fits(args.json, judges, target, sizes.per_device(sizes.rows_at(1)))
    choices.sort(key=lambda c: c.cost.rank if c.cost else (0.0, -float(c.shape.micro_batch)))
    best = choices[0]
    if args.write:
        _write(Path(args.write), config, best, wants_batch)
    if args.json:
        record = {**best.to_dict(), **_rest(best, judges, target)}
        if wants_batch:
            record["alternatives"] = [choice.to_dict() for choice in choices]
        print(json.dumps(record, indent=2))
        return 0
    from maxbatch.commands.fit.view import show

    show(choices, target, wants_batch)
    if args.write:
        print(f"written to {args.write}")
    return 0


def _say(quiet: bool) -> Any:
    return lambda text: None if quiet else print(f"maxbatch: {text}", file=sys.stderr, flush=True)


def _with(config: ConfigDict, **changes: Any) -> ConfigDict:
    changed = ConfigDict(config.to_dict())
    changed.update(changes)
    return changed.lock()


def _rest(best: Choice, judges: Sequence[Judge], target: Target) -> dict[str, Any]:
    following = best.next_verdict
    return {
        "target": target.name,
        "num_devices": len(target.devices),
        "memory_source": target.memory_source,
        "next_size": None
        if following is None
        else {"fits": following.fits, "hbm_bytes_needed": following.needed_bytes},
        "asked": [
            {
                "remat_policy": judge.config.remat_policy,
                "micro_batch_size_to_train_on": asked.shape.micro_batch,
                "gradient_accumulation_steps": asked.shape.max_micro_batches,
                "fits": asked.verdict.fits,
                "hbm_bytes_needed": asked.verdict.needed_bytes,
                "compile_s": round(asked.verdict.seconds, 2),
                "cached": asked.cached,
            }
            for judge in judges
            for asked in judge.asked
        ],
    }


def _nothing_fits(as_json: bool, judges: Sequence[Judge], target: Target, smallest: Any) -> int:
    from maxbatch.training.compile.memory import gigabytes

    verdict = judges[-1].asked[-1].verdict
    for judge in judges:
        verdict = min((asked.verdict for asked in judge.asked), key=lambda v: v.needed_bytes or 2**63)
    more = "" if judges[-1].config.remat_policy == "full" else "remat_policy=full, "
    print(
        f"maxbatch: error: not even per_device_batch_size={smallest} fits {target.name}: it needs "
        f"{gigabytes(verdict.needed_bytes)} per device of {gigabytes(verdict.available_bytes)}; try {more}"
        "a larger topology, or an axis that splits the model (ici_tensor_parallelism)",
        file=sys.stderr,
    )
    if as_json:
        record = {
            "per_device_batch_size": None,
            "hbm_bytes_needed": verdict.needed_bytes,
            "hbm_bytes_available": verdict.available_bytes,
            "target": target.name,
        }
        print(json.dumps(record, indent=2))
    return EXIT_FAILED


def _write(path: Path, config: ConfigDict, best: Choice, wants_batch: bool) -> None:
    """Puts the choice into a config file: the lines of its keys where it is there, else the whole config."""
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
