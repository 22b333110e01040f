"""`maxbatch sweep`: from a sweep file to a table of its trials, best first."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from maxbatch.around.child_runs.remote_training import RemoteTrainingProcess
from maxbatch.around.child_runs.supervisor import ChildEnd, ChildRun, Supervisor, locked
from maxbatch.around.child_runs.training_process import TrainingProcess
from maxbatch.around.pages.page import Page
from maxbatch.around.pages.sweep_section import add_sweep
from maxbatch.around.sweep.folder import SWEEP_METRICS, Result, SweepFolder, Trial
from maxbatch.around.sweep.study import SweepStudy, check_combinations
from maxbatch.around.sweep.sweep_file import SweepFile
from maxbatch.commands.arguments import add_ray, add_svg, local_path, ray_cluster
from maxbatch.config.values import shown
from maxbatch.run.folder.metrics import METRICS_FILE
from maxbatch.run.folder.outcome import OUTCOME_FILE, Status
from maxbatch.system.errors import EXIT_DONE, EXIT_STOPPED, TrainingError
from maxbatch.system.processes.stopping import Stopping
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.storage import AnyPath, as_typed
from maxbatch.system.terminal.bars import LinesAboveBar
from maxbatch.system.terminal.folding import counted, folded_command, terminal_width
from maxbatch.system.terminal.terminal import PlainTable, TrainingConsole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    file = "a sweep file, or the name of one of configs/sweeps"
    parser.add_argument("file", type=local_path, metavar="SWEEP.yml", help=file)
    again = "run failed trials again (not those that diverged)"
    parser.add_argument("--retry-failed", action="store_true", help=again)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; progress goes to standard error"
    )
    add_svg(parser)
    add_ray(parser, "trials")


def run(args: argparse.Namespace) -> int:
    """Runs a sweep, or continues one, and returns the exit code: 75 after a signal to stop.

    Raises:
      ConfigError: the sweep file, or a config that it makes, cannot be used.
      TrainingError: no trial finished.
    """
    sweep = SweepFile.read(args.file)
    check_combinations(sweep)
    folder = SweepFolder(sweep.sweep_dir)
    console = TrainingConsole(stderr=args.json)
    with (
        ray_cluster(args) as cluster,
        Stopping("once the trials that run have saved") as stop,
        locked(folder.path, "sweeps") as lock,
    ):
        start = (
            functools.partial(RemoteTrainingProcess, cluster)
            if cluster
            else functools.partial(TrainingProcess, lock)
        )
        if args.retry_failed:
            forget_failed(folder, sweep.metric)
        study = SweepStudy(sweep, folder)
        write_atomically(folder.base, sweep.base)
        with LinesAboveBar(console, study.num_trials, study.num_ended, study.counted) as progress:
            runs = TrialRuns(folder, study, sweep.metric, progress)
            has_ended = Supervisor(runs, start, sweep.parallel, progress.say).train(stop)
    results = folder.results(sweep.metric)
    if not has_ended:
        total = study.num_trials
        left = total - study.num_ended
        console.print(f"stopped; {left} of {total} trials are left. The same command continues.")
    else:
        conclude(sweep, folder, results, console, as_typed(args.svg) if args.svg else None)
    if args.json:
        print(json.dumps(folder.to_dict()))
    return EXIT_DONE if has_ended else EXIT_STOPPED


class TrialRuns:
    """The trials of a sweep for the supervisor; prints a line at the start and the end of each."""

    def __init__(
        self, folder: SweepFolder, study: SweepStudy, metric: str, progress: LinesAboveBar
    ) -> None:
        self._folder, self._study, self._metric, self._progress = folder, study, metric, progress

    def next(self) -> ChildRun[Trial] | None:
        if (trial := self._study.next()) is None:
            return None
        resumed = " resumed" if (trial.folder / METRICS_FILE).exists() else ""
        self._progress.say(f"trial {trial.number}{resumed}: {trial.title}")
        arguments = [str(self._folder.base), *trial.stated, f"run_dir={trial.folder}"]
        return ChildRun(trial, trial.folder, arguments)

    def is_exhausted(self) -> bool:
        return self._study.is_exhausted()

    def watch(self, run: ChildRun[Trial]) -> str | None:
        self._progress.show(self._study.num_ended, self._study.counted)
        return self._study.should_prune(run.subject)

    def ended(self, run: ChildRun[Trial], end: ChildEnd) -> None:
        trial = run.subject
        if end.status is not None:
            self._folder.finish(trial, end.status, end.reason)
        result = self._folder.result(trial, self._metric)
        if end.status is None:
            self._study.stopped(trial)
        else:
            self._study.finished(result)
        value = "" if result.value is None else f" {self._metric} {result.value:.4f}"
        why = result.reason or end.reason
        reason = f" ({why})" if why else ""
        ended = "" if end.status is None else f" ({self._study.counted})"
        self._progress.say(
            f"trial {trial.number} {result.status}{value}{reason}, {end.seconds:.0f} s: "
            f"{trial.title}{ended}"
        )


def forget_failed(folder: SweepFolder, metric: str) -> None:
    """Removes the outcomes of the trials that failed, so that they run again."""
    for result in folder.results(metric):
        if result.status == Status.FAILED:
            (result.trial.folder / OUTCOME_FILE).unlink(missing_ok=True)


def conclude(
    sweep: SweepFile,
    folder: SweepFolder,
    results: Sequence[Result],
    console: Console,
    svg: AnyPath | None,
) -> None:
    """Prints the table and the next command to type, and writes the page, and its plots into the
    folder `svg`.
    """
    console.print(results_table(results, sweep.metric))
    console.print(f"metric: {SWEEP_METRICS[sweep.metric]}; lower is better")
    best = results[0]
    num_failed = sum(result.status == Status.FAILED for result in results)
    again = (
        f"{counted(num_failed, 'trial')} failed; --retry-failed runs "
        f"{'it' if num_failed == 1 else 'them'} again"
    )
    if best.status != Status.DONE:
        remedy = f"; {again}" if num_failed else ""
        why = f"trial {best.trial.number}: {best.reason}"
        raise TrainingError(f"none of the {len(results)} trials finished; {why}{remedy}")
    if num_failed:
        console.print(again)
    summary = folder.to_dict()
    words = ["maxbatch", "train", str(folder.base), *best.trial.stated, "run_dir=runs/best"]
    page = Page(f"maxbatch sweep: {folder.path.name}")
    add_sweep(page, summary)
    console.print(page.save(folder.path / "sweep.html"))
    if svg is not None:
        console.print(page.write_svg(svg))
    console.print(
        f"best: trial {best.trial.number}, {sweep.metric} {best.value:.4f}, in {best.trial.folder}"
    )
    for sentence in summary["at_the_edge"]:
        console.print(sentence)
    console.print(folded_command(f"next: {shlex.join(words)}", 6, terminal_width()))


def results_table(results: Sequence[Result], metric: str) -> Table:
    """Returns the table of a sweep's trials."""
    swept = list(results[0].trial.overrides)
    compared = any(result.at_equal_tokens is not None for result in results)
    heads = [metric, *["at equal tokens"] * compared, "steps", "tokens"]
    table = PlainTable("trial", *swept, *heads, justify="right")
    table.add_column("status", no_wrap=True)
    for result in results:
        values = [
            _number(value) for value in (result.value, result.at_equal_tokens)[: 1 + compared]
        ]
        reason = f": {shown(result.reason, 100)}" if result.reason else ""
        texts = [str(result.trial.number), *(result.trial.overrides[key] for key in swept)]
        table.add_row(
            *texts,
            *values,
            f"{result.steps:,}",
            f"{result.tokens:,}",
            Text(f"{result.status}{reason}"),
            style=None if result.status == Status.DONE else "dim",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
