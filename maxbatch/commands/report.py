"""`maxbatch report`: run folders and sweep folders in, one HTML page out."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from maxbatch.around.pages.critical_batch_section import add_critical_batch
from maxbatch.around.pages.page import Page, details, heading, paragraph, table
from maxbatch.around.pages.plots import Figure, loads_over_time
from maxbatch.around.pages.sweep_section import add_sweep
from maxbatch.around.report.goodput import goodput_line, goodput_section, to_json
from maxbatch.around.report.hashes import hash_lines
from maxbatch.around.report.marks_section import marks_lines, marks_section
from maxbatch.around.report.runs import (
    FIRST_UPDATES,
    SHORT_RUN,
    STAGE_HEADS,
    SUMMARY_HEADS,
    TASK_HEADS,
    ReportedRun,
    beside_parents,
    fitted,
    panels,
    without_noise_scale,
)
from maxbatch.around.sweep.folder import SweepFolder
from maxbatch.commands.arguments import add_svg, count, place
from maxbatch.config.loading import load_config
from maxbatch.config.sections import KEYS
from maxbatch.config.values import value_text
from maxbatch.data.stream.sources import samples_per_epoch_if_cached
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.view import equation
from maxbatch.run.folder.answers_file import read_answers
from maxbatch.run.folder.devices import DevicesUsed
from maxbatch.run.folder.json_file import checked, read_json
from maxbatch.run.folder.metrics import METRICS_FILE
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.run_folder import CRITICAL_BATCH_FILE
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.processes.stopping import Stopping
from maxbatch.system.storage.storage import AnyPath, as_typed
from maxbatch.system.terminal.folding import counted, printable
from maxbatch.system.terminal.warning import note

MOST_CURVES = 12  # most trials of a sweep; more lines cannot be distinguished
_MOST_LOADS = 500  # updates in a map of the loads of experts
_LONG_S = 3 * 3600
_BRANCH = {
    "batch_size": int,
    "learning_rate": float,
    "updates": int,
    "loss": float | None,
    "difference": float | None,
}
_CRITICAL_BATCH = {
    "run": str,
    "tolerance": float,
    "tolerance_unit": str,
    "command": str,
    "checkpoints": [
        {
            "step": int,
            "samples_seen": int,
            "batch_size": int,
            "is_below_base": bool,
            "in_words": str,
            "critical_batch_size": int | None,
            "branches": [_BRANCH],
        }
    ],
}
_WATCH_S, _POLL_S = 10, 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=place, metavar="RUN", help="a run folder, or the folder of a sweep"
    )
    parser.add_argument(
        "--output",
        type=place,
        metavar="FILE",
        help="the page (default: RUN/report.html; of several runs ./report.html)",
    )
    add_svg(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; a page only with --output"
    )
    parser.add_argument(
        "--watch",
        type=count,
        nargs="?",
        const=_WATCH_S,
        metavar="SECONDS",
        help=f"follow the runs: rewrite the page every SECONDS (default {_WATCH_S}), until Ctrl-C",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page.

    Raises:
      ConfigError: a folder is not a run's, the page cannot be written, or bokeh is not installed.
    """
    paths = [as_typed(text) for text in args.runs]
    if args.json:
        if args.watch:
            raise ConfigError("--watch: must not be given beside --json, which prints once")
        folders = _read(paths)
        print(json.dumps(to_json([run for folder in folders for run in folder.runs]), indent=2))
        page = _page(paths, folders) if args.output or args.svg else None
        if page and args.output:
            page.write(as_typed(args.output))
        if page and args.svg:
            note(page.write_svg(as_typed(args.svg)))
        return 0
    beside = paths[0] if len(paths) == 1 else Path()
    output = as_typed(args.output) if args.output else beside / "report.html"
    # before they are read, so that `--watch` notices a line written meanwhile
    drawn = metrics_files(paths)
    folders = _read(paths)
    page = _page(paths, folders, args.watch or 0)
    page.write(output)
    if args.svg:
        note(page.write_svg(as_typed(args.svg)))
    for run in beside_parents(
        [run for folder in folders if folder.sweep is None for run in folder.runs]
    ):
        if line := goodput_line(run):
            note(f"{run.name}: {line}")
        for line in marks_lines(run):
            note(line)
    for line in hash_lines(
        [run for folder in folders if folder.sweep is None for run in folder.runs]
    ):
        note(line)
    print(printable(str(output)), flush=True)
    if args.watch:
        _watch(paths, output, args.watch, drawn)
        if args.svg:
            make_page(paths).write_svg(as_typed(args.svg))
    return 0


def _watch(
    paths: Sequence[AnyPath], output: AnyPath, seconds: int, drawn: list[tuple[str, int, float]]
) -> None:
    """Rewrites the page while the runs train, until a signal; the page shows the state `drawn`
    already.
    """
    note(f"the page follows the runs and reloads itself every {seconds} s; Ctrl-C ends")
    with Stopping("after this page") as stop:
        written = time.monotonic()
        while not stop.is_asked:
            time.sleep(_POLL_S)
            if time.monotonic() - written >= seconds and (changed := metrics_files(paths)) != drawn:
                make_page(paths, seconds).write(output)
                drawn, written = changed, time.monotonic()
    make_page(paths).write(output)  # the last page stays


def metrics_files(paths: Sequence[AnyPath]) -> list[tuple[str, int, float]]:
    """Returns name, size and time of each run's metrics; they change when a run writes."""
    files = [
        file
        for path in paths
        for file in (path / METRICS_FILE, *path.glob(f"trials/*/{METRICS_FILE}"))
    ]
    statuses = [(str(file), file.stat()) for file in files if file.is_file()]
    return [(name, status.st_size, status.st_mtime) for name, status in statuses]


def make_page(paths: Sequence[AnyPath], reloads_s: int = 0) -> Page:
    """Returns the page of these folders; it reloads itself every `reloads_s` seconds, 0: never."""
    return _page(paths, _read(paths), reloads_s)


class _Folder(NamedTuple):
    """The content of a folder."""

    sweep: dict[str, Any] | None  # None for a run
    runs: list[ReportedRun]  # of a sweep, its best trials


def _read(paths: Sequence[AnyPath]) -> list[_Folder]:
    """Returns the contents of these folders."""
    return [
        _read_sweep(path, f"{name}: " if len(paths) > 1 else "")
        if _is_sweep(path)
        else _Folder(None, [ReportedRun.read(path, name)])
        for path, name in zip(paths, _names(paths), strict=True)
    ]


def _page(paths: Sequence[AnyPath], folders: Sequence[_Folder], reloads_s: int = 0) -> Page:
    names = _names(paths)
    page = Page(
        f"maxbatch: {', '.join(names) if len(names) <= 3 else f'{len(names)} runs'}", reloads_s
    )
    for folder in folders:
        if folder.sweep is not None:
            add_sweep(page, folder.sweep)
            num_trials = sum(bool(trial["steps"]) for trial in folder.sweep["trials"])
            if len(folder.runs) < num_trials:
                page.add(paragraph(f"Below: the {len(folder.runs)} best of {num_trials} trials."))
    if runs := [run for folder in folders for run in folder.runs]:
        _add_runs(page, runs)
    for path in paths:
        remedy = f"`maxbatch critical-batch {shlex.quote(str(path))}` writes it"
        measured = read_json(
            path / CRITICAL_BATCH_FILE, remedy, lambda value: checked(value, _CRITICAL_BATCH)
        )
        if measured:
            add_critical_batch(page, measured)
    return page


def _is_sweep(path: AnyPath) -> bool:
    with reading(path):
        return SweepFolder(path).is_sweep


def _read_sweep(path: AnyPath, prefix: str) -> _Folder:
    """Returns a sweep and its best trials, whose names begin with a prefix."""
    folder = SweepFolder(path)
    sweep = folder.to_dict()
    runs = []
    for trial in [trial for trial in sweep["trials"] if trial["steps"]][:MOST_CURVES]:
        overrides = {key: value_text(value) for key, value in trial["overrides"].items()}
        values = (
            overrides.values() if len(overrides) > 1 else (f"{k}={v}" for k, v in overrides.items())
        )
        name = f"{prefix}{trial['number']}: {', '.join(values)}"
        runs.append(ReportedRun.read(folder.trial_folder(trial["number"]), name))
    return _Folder(sweep, runs)


def _add_runs(page: Page, runs: Sequence[ReportedRun]) -> None:
    runs = fitted(beside_parents(runs))
    is_long = max(run.seconds for run in runs) > _LONG_S
    page.add(
        heading("Runs" if len(runs) > 1 else "Run"),
        table(SUMMARY_HEADS, [run.summary() for run in runs], has_swatches=True),
    )
    time = f"time in updates ({'hours' if is_long else 'seconds'})"
    units = {"steps": "updates", "samples": "samples", "tokens": "tokens", "time": time}
    windows = " or ".join(map(str, sorted({run.smoothing for run in runs})))
    first, *others = panels(runs)
    loss = first._replace(title=f"Loss (faint), and its mean over {windows} updates")
    page.panels((loss, *others), [run.columns(3600 if is_long else 1) for run in runs], units)
    page.add(
        paragraph(
            f"Smoothed loss: the mean of the last {windows} updates (a fiftieth of a run, at "
            "least 5). Time: the sum of step_time_s, which leaves evals and saves out. Diamonds: "
            "evals. Throughput, in the plot and in the medians: without the first "
            f"{FIRST_UPDATES} updates of a run of more than {SHORT_RUN}."
        )
    )
    if scores := [row for run in runs for row in run.task_scores()]:
        page.add(heading("Tasks of lm-evaluation-harness"), table(TASK_HEADS, scores))
    for fork in (run for run in runs if run.parent):
        page.add(
            paragraph(
                f"{fork.name}: a fork of {fork.parent} after {counted(fork.begin, 'update')}, "
                "where its curves begin."
            )
        )
    page.add(*marks_section(runs))
    page.add(*(paragraph(line) for line in hash_lines(runs)))
    for thinned in (run for run in runs if len(run.drawn) < len(run.drawable)):
        page.add(
            paragraph(
                f"{thinned.name}: of {len(thinned.drawable):,} updates {len(thinned.drawn):,} are "
                f"drawn: 1 in {thinned.apart}, the first of each stage, those with an eval or a "
                "mark, and the last."
            )
        )
    for run in runs:
        if reason := without_noise_scale(run):
            page.add(paragraph(f"{run.name}: no gradient noise scale: {reason}."))
    for holed in (run for run in runs if run.holes):
        lines = ", ".join(map(str, holed.holes[:5])) + (
            " and others" if len(holed.holes) > 5 else ""
        )
        page.add(
            paragraph(
                f"{holed.name}: {counted(len(holed.holes), 'line')} of metrics.jsonl (line "
                f"{lines}) with numbers that are not finite, or larger than 1e100. These numbers "
                "are left out."
            )
        )
    if loads := [figure for run in runs if (figure := _loads(run, len(runs) > 1))]:
        page.figures(loads)
    page.add(
        heading("Throughput by stage"),
        table(STAGE_HEADS, [row for run in runs for row in run.stage_rates()]),
    )
    for run in runs:
        page.add(*goodput_section(run, named=len(runs) > 1))
    for run in runs:
        if recorded := read_answers(run.path):
            step, answers = recorded
            title = f"{run.name}: answers" if len(runs) > 1 else "Answers"
            page.add(
                heading(f"{title} to held-out records, after {step:,} updates"),
                table(("question", "answer", "the record"), answers),
            )
    plans = [plan_of(run, is_open=len(runs) == 1) for run in runs]
    page.add(heading("Batch plan"), *plans, config_differences(runs))


def _loads(run: ReportedRun, is_one_of_many: bool) -> Figure | None:
    """Returns the loads of a run's experts, at most `_MOST_LOADS` updates of them; None without
    experts.
    """
    records = [
        record for record in run.records if isinstance(record.get(Metric.EXPERT_CHOICES), dict)
    ]
    records = records[:: -(-len(records) // _MOST_LOADS)] if records else []
    title = f"{run.name}: load of each expert" if is_one_of_many else "Load of each expert"
    choices = [record[Metric.EXPERT_CHOICES] for record in records]
    return (
        loads_over_time(title, [record[Metric.STEP] for record in records], choices)
        if records
        else None
    )


def _names(paths: Sequence[AnyPath]) -> list[str]:
    """Returns the shortest distinct ends of the paths."""
    real = [os.path.realpath(path) if isinstance(path, Path) else str(path) for path in paths]
    split = [PurePosixPath(text).parts for text in real]
    for depth in range(1, max(map(len, split)) + 1):
        names = ["/".join(part[-depth:]) for part in split]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


_STAGES = {
    "from sample": "first_sample",
    "from step": "first_step",
    "steps": "num_steps",
    "samples": "num_samples",
    "p": "per_device_batch_size",
    "g": "gradient_accumulation_steps",
    "micro": "micro_batch_size_to_train_on",
    "global": "global_batch_size",
    "lr scale": "learning_rate_scale",
}
_MOST_STAGES = 200


def plan_of(run: ReportedRun, is_open: bool) -> str:
    """Returns the devices of a run, its batch plan and its table of stages, as a foldable part of
    HTML.
    """
    if run.config is None:
        return ""
    blocks = [_devices_table(run.devices)] if run.devices else []
    now = run.devices[-1] if run.devices else DevicesUsed(1, "", 1, 1, 1, {})
    try:
        plan = BatchPlan.from_config(
            run.config,
            now.num_devices,
            now.num_hosts,
            num_slices=now.num_slices,
            samples_per_epoch=samples_per_epoch_if_cached(run.config.stream),
        )
    except ConfigError as error:
        return details(
            run.name, *blocks, paragraph(f"cannot be planned here: {error}"), is_open=is_open
        )
    blocks.append(paragraph(equation(plan)))
    if not run.devices:
        blocks.append(
            paragraph(
                "Planned for 1 device: the run did not record its devices. The global batch and "
                "the steps are the same on any number."
            )
        )
    figures = plan.to_dict()
    stages = figures.pop("stages")
    rows = [
        [i, *(stage[key] for key in _STAGES.values())]
        for i, stage in enumerate(stages[:_MOST_STAGES])
    ]
    blocks.append(table(("stage", *_STAGES), rows))
    if len(stages) > _MOST_STAGES:
        blocks.append(paragraph(f"The first {_MOST_STAGES} of {len(stages)} stages."))
    numbers = [[name, value] for name, value in figures.items() if name != "warnings"]
    half = -(-len(numbers) // 2)
    pairs = itertools.zip_longest(numbers[:half], numbers[half:], fillvalue=["", ""])
    blocks.append(table(("",) * 4, [[*left, *right] for left, right in pairs]))
    return details(run.name, *blocks, is_open=is_open)


def _devices_table(history: Sequence[DevicesUsed]) -> str:
    rows = [
        [
            used.first_step,
            used.device_kind,
            used.num_devices,
            used.num_hosts,
            used.num_slices,
            ", ".join(f"{axis} {size}" for axis, size in used.mesh.items() if size > 1)
            or "one device",
        ]
        for used in history
    ]
    return table(("from step", "device", "devices", "hosts", "slices", "mesh"), rows)


def config_differences(runs: Sequence[ReportedRun]) -> str:
    """Returns, as HTML, the keys in which the runs' configs differ; for one run, from base.yml."""
    configs = [(run.name, run.config) for run in runs if run.config is not None]
    title = "where the runs differ"
    if len(configs) == 1:
        title, configs = "where it differs from base.yml", [("base.yml", load_config()), *configs]
    texts = {
        name: [value_text(config[name]) for _, config in configs]
        for name in KEYS
        if name != "run_dir"
    }
    rows = [[name, *values] for name, values in texts.items() if len(set(values)) > 1]
    content = (
        table(["key", *(name for name, _ in configs)], rows)
        if rows
        else paragraph("No key differs.")
    )
    return heading(f"Config, {title}") + content if configs else ""
