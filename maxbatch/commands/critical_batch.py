"""`maxbatch critical-batch`: from a run's folder to a batch size schedule."""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from fractions import Fraction
from typing import Any

from rich.console import Console

from maxbatch.around.child_runs.supervisor import Supervisor, locked
from maxbatch.around.child_runs.training_process import TrainingProcess
from maxbatch.around.critical_batch.branches import Branches, BranchProgress, BranchRuns
from maxbatch.around.critical_batch.measured_run import MeasuredRun
from maxbatch.around.critical_batch.plan import MeasurementPlan, check_plan, joined, make_plan
from maxbatch.around.critical_batch.results import TOLERANCE_UNIT, Measurement
from maxbatch.around.pages.critical_batch_section import add_critical_batch
from maxbatch.around.pages.page import Page
from maxbatch.commands.arguments import add_simulated_devices, add_svg, place, read_by, real
from maxbatch.config.sections import KEYS
from maxbatch.config.values import SUFFIXES, Bounds, Scalar, exact
from maxbatch.run.folder.json_file import read_json, write_json
from maxbatch.run.folder.run_folder import CRITICAL_BATCH_FILE
from maxbatch.system.errors import EXIT_STOPPED, ConfigError
from maxbatch.system.processes.stopping import Stopping
from maxbatch.system.storage.storage import AnyPath, as_typed
from maxbatch.system.terminal.folding import folded_command, terminal_width
from maxbatch.system.terminal.terminal import TrainingConsole

TOLERANCE = 0.01  # nats per token, as Merrill et al. 2025, section 3.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=place, metavar="RUN", help="the folder of a run that kept several checkpoints"
    )
    parser.add_argument(
        "--checkpoints",
        metavar="STEP,...",
        help="steps of the checkpoints to fork at (default: up to 4)",
        type=read_by(lambda text: _numbers(text, "int"), "different numbers of updates", "100,200"),
    )
    parser.add_argument(
        "--factors",
        metavar="F,...",
        help="multiples of the run's batch there (default: 1/2,1,2,4,8)",
        type=read_by(_factors, "different factors, 1 and a larger one among them", "1/2,1,2,4"),
    )
    parser.add_argument(
        "--samples",
        metavar="N",
        help="samples of every branch (default: 32 updates of the largest batch)",
        type=read_by(
            Scalar("", "quantity", Bounds(1)).read, f"a number of samples ({SUFFIXES})", "4K"
        ),
    )
    parser.add_argument(
        "--scaling",
        choices=KEYS["learning_rate_scaling"].choices,
        default="sqrt",
        help="how the learning rate scales with the batch (default: sqrt, for Adam)",
    )
    parser.add_argument(
        "--decay",
        action="store_true",
        help="let the rate of every branch fall to 0, as a run's does",
    )
    parser.add_argument(
        "--tolerance",
        metavar="NATS",
        default=TOLERANCE,
        help=f"loss per token that a larger batch may cost, absolute (default: {TOLERANCE})",
        type=real(Bounds(0), "from 0 on", TOLERANCE),
    )
    add_svg(parser)
    add_simulated_devices(parser, "train every branch on N CPU devices")


def run(args: argparse.Namespace) -> int:
    """Runs or continues a measurement, and returns the exit code: 75 after a signal to stop.

    Raises:
      ConfigError: the run cannot be measured with these flags; the message names flags that work.
      TrainingError: a branch failed, or every branch of a checkpoint diverged.
    """
    measured = MeasuredRun.read(as_typed(args.run), args.simulate_devices or _num_devices())
    folder = (measured.path / CRITICAL_BATCH_FILE).parent
    console = TrainingConsole()
    flags = ["--simulate-devices", str(args.simulate_devices)] if args.simulate_devices else []
    with (
        Stopping("once the branch that runs has saved") as stop,
        locked(folder, "measures") as lock,
    ):
        plan = _plan(measured, args, folder)
        branches = Branches(measured, plan, folder)
        _introduce(plan, branches, console)
        branches.fork()
        with BranchProgress(console, branches) as progress:
            runs = BranchRuns(branches, flags, progress)
            Supervisor(runs, functools.partial(TrainingProcess, lock), 1, progress.say).train(stop)
        if left := branches.left():
            console.print(
                f"stopped; {len(left)} of {len(branches.all)} branches are left. The same command "
                "continues."
            )
            return EXIT_STOPPED
        _conclude(Measurement(measured, plan, branches, args.tolerance), folder, console, args.svg)
    return 0


def _plan(measured: MeasuredRun, args: argparse.Namespace, folder: AnyPath) -> MeasurementPlan:
    """Returns the plan of these flags as of their first use, even if the run has continued
    since.
    """
    path = folder / "plans.json"
    plans: dict[str, dict[str, object]] = read_json(path, "remove it", dict) or {}
    flags = {name: getattr(args, name) for name in ("checkpoints", "factors", "samples", "scaling")}
    texts = {
        name: joined(value) if isinstance(value, tuple) else value for name, value in flags.items()
    }
    if args.decay:
        texts["decay"] = "yes"
    key = " ".join(f"--{name} {text}" for name, text in texts.items() if text is not None)
    plan = MeasurementPlan.from_json(plans[key]) if key in plans else None
    if plan is None or not check_plan(measured, plan):
        plan = make_plan(
            measured, args.checkpoints, args.factors, args.samples, args.scaling, args.decay
        )
        write_json(path, plans | {key: plan.to_json()})
    return plan


def _introduce(plan: MeasurementPlan, branches: Branches, console: Console) -> None:
    forks = ", ".join(f"{fork.step:,}" for fork in plan.forks)
    total, rate = len(branches.all) * plan.samples, "falling to 0" if plan.decays else "constant"
    scaled = {
        "none": "",
        "linear": " x batch factor",
        "sqrt": " x square root of the batch factor",
    }[plan.scaling]
    console.print(
        f"{len(branches.all)} branches ({len(branches.left())} to train): checkpoints {forks} x "
        f"batch factors {joined(plan.factors)}, {plan.samples:,} samples each, {total:,} in "
        f"all\nlearning rate of a branch: the checkpoint's{scaled}, {rate}; its loss: the mean "
        f"over its last {plan.compared:,} samples"
    )


def _conclude(measurement: Measurement, folder: AnyPath, console: Console, svg: str | None) -> None:
    path, plan, stages = folder / CRITICAL_BATCH_FILE.name, measurement.plan, measurement.stages
    write_json(path, measurement.to_json())
    console.print(measurement.table())
    console.print(
        f"tolerance: {measurement.tolerance:g} {TOLERANCE_UNIT}; *: the critical batch size; "
        "?: the noise is larger than the distance to the tolerance"
    )
    for result in measurement.forks:
        console.print(str(result))
    page = Page(f"maxbatch critical-batch: {measurement.run.path.name}")
    add_critical_batch(page, measurement.to_json())
    console.print(page.save(folder / "critical_batch.html"))
    if svg:
        console.print(page.write_svg(as_typed(svg)))
    console.print(f"everything: {path}")
    if len(stages) == 1:
        console.print(
            f"no larger batch than {stages[0][1]:,} is within the tolerance at every later "
            "checkpoint"
        )
    if all(result.critical.is_at_least for result in measurement.forks):
        further = joined((*plan.factors, 2 * plan.factors[-1]))
        console.print(
            "the largest batch tried is within the tolerance everywhere; to go further: "
            f"--factors {further}"
        )
    if len(plan.forks) == 1:
        console.print(
            "one checkpoint does not show how the critical batch size changes; train with "
            "max_num_checkpoints_to_keep=null"
        )
    console.print(folded_command(f"next: {measurement.command}", 6, terminal_width()))


def _num_devices() -> int:
    """Returns the number of devices of a branch, counted in another process so that they stay
    free.
    """
    child = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.device_count())"],
        capture_output=True,
        text=True,
    )
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or ["JAX does not start"])[-1]
        raise ConfigError(f"no device: {reason}; works: --simulate-devices 1")
    return int(child.stdout)


def _numbers(text: str, kind: str) -> tuple[Any, ...]:
    """Returns different numbers greater than 0, sorted; raises ConfigError or ValueError for any
    other text.
    """
    values = {Scalar("", kind, Bounds(above=0)).read(word) for word in text.split(",")}
    if len(values) != text.count(",") + 1:
        raise ValueError("a number is stated twice")
    return tuple(sorted(values))


def _factors(text: str) -> tuple[Fraction, ...]:
    factors = tuple(map(exact, _numbers(text, "exact")))
    if 1 not in factors or factors[-1] == 1:
        raise ValueError("there is nothing to compare")
    return factors
