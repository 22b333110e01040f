"""`maxbatch critical-batch`: from a run's folder to the batch size schedule that follows from it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console

from maxbatch.commands.arguments import local_path
from maxbatch.commands.critical_batch.branches import Branches, locked
from maxbatch.commands.critical_batch.measured_run import MeasuredRun
from maxbatch.commands.critical_batch.plan import MeasurementPlan, check_plan, make_plan
from maxbatch.commands.critical_batch.results import (
    ForkResult,
    fork_results,
    in_words,
    results_table,
    to_json,
    train_command,
    warmup_schedule,
)
from maxbatch.commands.critical_batch.runner import BranchProgress, BranchRuns
from maxbatch.config.loading import keys
from maxbatch.config.values import shown
from maxbatch.pages.critical_batch_section import add_critical_batch
from maxbatch.pages.page import Page
from maxbatch.runs.critical_batch import CRITICAL_BATCH_FILE, CRITICAL_BATCH_FOLDER
from maxbatch.runs.supervisor import Supervisor
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.errors import EXIT_STOPPED, ConfigError
from maxbatch.system.stopping import Stopping
from maxbatch.system.terminal import TrainingConsole

_WIDTH = 400  # wider than any table here: nothing is cut off
TOLERANCE = 0.01  # nats per token, as Merrill et al. 2025, section 3.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=local_path, metavar="RUN", help="the folder of a run that kept several checkpoints"
    )
    parser.add_argument(
        "--checkpoints", metavar="STEP,...", type=_steps, help="updates to fork at (default: up to 4)"
    )
    parser.add_argument(
        "--factors", metavar="F,...", type=_factors, help="of the run's batch there (default: 1/2,1,2,4,8)"
    )
    parser.add_argument(
        "--samples", metavar="N", type=_samples,
        help="samples of every branch (default: 32 updates of the largest batch)",
    )  # fmt: skip
    parser.add_argument(
        "--scaling", choices=keys()["learning_rate_scaling"].choices, default="sqrt",
        help="how the learning rate follows the batch (default: sqrt, for Adam)",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", metavar="NATS", type=_tolerance, default=TOLERANCE,
        help=f"loss per token that a larger batch may cost, absolute (default: {TOLERANCE})",
    )  # fmt: skip
    parser.add_argument(
        "--simulate-devices", type=_count, metavar="N", help="train every branch on N CPU devices"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, or go on measuring; the exit code is 75 where it was asked to stop.

    Raises:
      ConfigError: the run cannot be measured so; the message names what works.
      TrainingError: a branch failed, or all of a checkpoint diverged.
    """
    measured = MeasuredRun.read(Path(args.run), args.simulate_devices or _num_devices())
    folder = measured.path / CRITICAL_BATCH_FOLDER
    console = TrainingConsole(width=_WIDTH, highlight=False, markup=False)
    flags = ["--simulate-devices", str(args.simulate_devices)] if args.simulate_devices else []
    with Stopping() as stop, locked(folder) as lock:
        plan = _plan(measured, args, folder)
        branches = Branches(measured, plan, folder)
        _introduce(plan, branches, console)
        branches.fork()
        with BranchProgress(console, branches) as progress:
            Supervisor(BranchRuns(branches, lock, flags, progress), 1, progress.say).train(stop)
        if left := branches.left():
            console.print(
                f"stopped; {len(left)} of {len(branches.all)} branches are left. The same command goes on."
            )
            return EXIT_STOPPED
        results = fork_results(measured, plan, branches, args.tolerance)
        _conclude(measured, plan, results, args.tolerance, folder, console)
    return 0


def _plan(measured: MeasuredRun, args: argparse.Namespace, folder: Path) -> MeasurementPlan:
    """Return the plan of this command; the one that it had when it was first given, whatever the run did since."""
    path = folder / "plans.json"
    plans = _read_plans(path)
    stated = {name: getattr(args, name) for name in ("checkpoints", "factors", "samples", "scaling")}
    key = " ".join(f"--{name} {_text(value)}" for name, value in stated.items() if value is not None)
    if key not in plans or not check_plan(measured, MeasurementPlan.from_json(plans[key])):
        plan = make_plan(measured, args.checkpoints, args.factors, args.samples, args.scaling)
        plans[key] = plan.to_json()
        write_atomically(path, json.dumps(plans, indent=1) + "\n")
    return MeasurementPlan.from_json(plans[key])


def _read_plans(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it") from None


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _introduce(plan: MeasurementPlan, branches: Branches, console: Console) -> None:
    forks = ", ".join(f"{fork.step:,}" for fork in plan.forks)
    total = len(branches.all) * plan.samples
    console.print(
        f"{len(branches.all)} branches ({len(branches.left())} to train): checkpoints {forks} x batch factors "
        f"{_text(plan.factors)}, {plan.samples:,} samples each, {total:,} in all"
    )
    console.print(
        f"rates as at the checkpoint, constant, scaled {plan.scaling}; compared: the mean loss of the last "
        f"{plan.compared:,} samples of a branch"
    )


def _conclude(
    measured: MeasuredRun,
    plan: MeasurementPlan,
    results: list[ForkResult],
    tolerance: float,
    folder: Path,
    console: Console,
) -> None:
    found = to_json(measured, plan, results, tolerance)
    write_atomically(folder / CRITICAL_BATCH_FILE, json.dumps(found, indent=1) + "\n")
    console.print(results_table(results, tolerance))
    console.print(
        f"tolerance: {tolerance:g} nats per token, absolute; *: the critical batch size; ?: within the noise"
    )
    for result in results:
        console.print(in_words(result))
    page = folder / "critical_batch.html"
    try:
        drawing = Page(f"maxbatch critical-batch: {measured.path.name}")
        add_critical_batch(drawing, found)
        drawing.write(page)
        console.print(f"plot: {page}")
    except ConfigError as error:
        console.print(f"plot: not written ({error})")
    console.print(f"everything: {folder / 'critical_batch.json'}")
    stages = warmup_schedule(measured, results)
    if len(stages) == 1:
        console.print(
            f"nothing larger than {stages[0][1]:,} is within the tolerance at every later checkpoint"
        )
    if all(result.critical.is_at_least for result in results):
        further = _text((*plan.factors, 2 * plan.factors[-1]))
        console.print(
            f"the largest batch tried is within the tolerance everywhere; further: --factors {further}"
        )
    if len(plan.forks) == 1:
        console.print(
            "one checkpoint says nothing of how it changes; train with max_num_checkpoints_to_keep=null"
        )
    console.print(f"next: {shlex.join(train_command(measured, plan, stages))}")


def _num_devices() -> int:
    """Return the devices that a branch will see; asked of another process, which leaves them free again."""
    found = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.device_count())"], capture_output=True, text=True
    )
    if found.returncode:
        lines = found.stderr.strip().splitlines()
        raise ConfigError(
            f"no device: {lines[-1] if lines else 'JAX does not start'}; works: --simulate-devices 1"
        )
    return int(found.stdout)


def _list_of(read: Callable[[str], Any], rule: str, works: str) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        values = [read(word) for word in text.split(",")]
        if None in values or len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{shown(text)}: must be {rule}; works: {works}")
        return tuple(sorted(values))

    return parse


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,18}", text.strip()) and int(text) > 0 else None


def _fraction(text: str) -> Fraction | None:
    if not re.fullmatch(r"\d{1,9}(/\d{1,9}|\.\d{1,9})?", text.strip()) or text.strip().endswith("/0"):
        return None
    try:
        return Fraction(text.strip()) or None
    except ZeroDivisionError:
        return None


_steps = _list_of(_whole, "different numbers of updates", "100,200")


def _factors(text: str) -> tuple[Fraction, ...]:
    rule, works = "different factors, 1 and a larger one among them", "1/2,1,2,4"
    factors: tuple[Fraction, ...] = _list_of(_fraction, rule, works)(text)
    if 1 not in factors or factors[-1] == 1:
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be {rule}; works: {works}")
    return factors


def _samples(text: str) -> int:
    key = dataclasses.replace(keys()["train_samples"], name="--samples", nullable=False, default="4K")
    try:
        value = key.read(text)
    except ConfigError:
        value = 0
    if not isinstance(value, int) or value < 1:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: must be a number of samples (suffixes K, M, B); works: 4K"
        )
    return value


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be a number from 0 on; works: {TOLERANCE}")
    return value


def _count(text: str) -> int:
    value = _whole(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be a whole number from 1 on; works: 1")
    return value
