"""A run in a report: its panels, their columns, smoothed and thinned, its totals."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from maxbatch.around.pages.plots import Panel, RunColumns
from maxbatch.around.report.marks import COLUMNS as MARKS
from maxbatch.around.report.marks import HOLE, Mark, find_marks
from maxbatch.config.config import Config
from maxbatch.config.loading import load_config
from maxbatch.run.folder.devices import DevicesUsed, read_devices
from maxbatch.run.folder.metrics import METRICS_FILE, Record, scan_metrics
from maxbatch.run.folder.metrics_schema import Metric as M
from maxbatch.run.folder.old_forms import refuse_old_run
from maxbatch.run.folder.run_id import ForkedFrom, read_identity
from maxbatch.run.folder.sessions import Session, read_sessions
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.storage import AnyPath, missing_folder

SMOOTHED_LOSS = "smoothed loss"
PANELS = (
    Panel(
        "Loss",
        "loss per token (nats)",
        ((M.LOSS, "faint"), (SMOOTHED_LOSS, "line"), (M.EVAL_LOSS, "points")),
    ),
    Panel("Global batch", "samples per update", ((M.GLOBAL_BATCH_SIZE, "stairs"),)),
    Panel("Learning rate", "learning rate", ((M.LEARNING_RATE, "line"),), smooths=False),
    Panel(
        "Throughput, without the first updates",
        "tokens per second",
        ((M.TOKENS_PER_SECOND, "line"),),
        are_large=True,
    ),
    Panel("Step time", "seconds per update", ((M.STEP_TIME_S, "line"),), is_log=True),
    Panel("Gradient norm", "norm before clipping", ((M.GRAD_NORM, "line"),), is_log=True),
    Panel(
        "Gradient noise scale",
        "samples",
        ((M.GRADIENT_NOISE_SCALE, "faint"), (M.CRITICAL_BATCH_ESTIMATE, "line")),
        is_log=True,
    ),
    Panel("Model FLOPs utilisation", "share of the peak", ((M.MFU, "line"),)),
    Panel("Slots of all passes that hold tokens", "share", ((M.SLOT_SHARE, "line"),)),
    Panel("Slots of filled rows that hold tokens", "share", ((M.ROW_SHARE, "line"),)),
    Panel("Margin of the chosen answers", "mean over the pairs (nats)", ((M.MARGIN, "line"),)),
    Panel("Pairs whose margin is above 0", "share of the pairs", ((M.PAIR_ACCURACY, "line"),)),
    Panel(
        "Load of the fullest expert", "times the mean, worst layer", ((M.EXPERT_LOAD_MAX, "line"),)
    ),
    Panel("Balance loss", "1 for even loads", ((M.LOAD_BALANCE_LOSS, "line"),)),
    Panel("Choices beyond capacity", "choices", ((M.DROPPED_TOKENS, "line"),)),
    # Of reinforcement learning.
    Panel("Reward", "mean of a batch", ((M.REWARD, "line"),)),
    Panel(
        "pass@1 on held-out prompts, sampled",
        "share of the responses",
        ((M.EVAL_PASS_AT_1, "points"),),
    ),
    Panel(
        "pass@1 on held-out prompts, greedy",
        "share of the responses",
        ((M.EVAL_GREEDY_PASS_AT_1, "points"),),
    ),
    Panel(
        "Reward on held-out prompts", "mean of the sampled responses", ((M.EVAL_REWARD, "points"),)
    ),
    Panel("Response length", "tokens", ((M.RESPONSE_LENGTH, "line"),)),
    Panel("Entropy", "per token (nats)", ((M.ENTROPY, "line"),)),
    Panel("Divergence from the reference", "per token (nats)", ((M.KL, "line"),)),
    Panel("Clipped", "share of the tokens", ((M.CLIP_FRACTION, "line"),)),
)
COLUMNS = tuple(column for panel in PANELS for column, _ in panel.lines)
_OF_FUNCTIONS = M.REWARD_BY_FUNCTION.of("")
# of a run of more than `SHORT_RUN` updates: the machine's caches and clocks are still cold
FIRST_UPDATES = 2
SHORT_RUN = 10
MOST_POINTS = 20_000
MOST_BYTES = 1_200_000  # of the columns of all runs on a page
_MOST_DRAWN_MARKS = 1_000  # the newest of a run
_AXES = (M.STEP, M.SAMPLES_SEEN, M.TOKENS_SEEN)
_ALWAYS_DRAWN = (M.EVAL_LOSS, M.EVAL_PASS_AT_1)
_TASK = M.EVAL_TASK.of("")


@dataclasses.dataclass(frozen=True)
class ReportedRun:
    name: str  # names it on the page
    path: AnyPath
    config: Config | None  # None for a folder without one
    records: list[Record]  # the lines of its metrics
    devices: list[DevicesUsed]  # oldest first; empty if the run did not record them
    sessions: list[Session]  # oldest first; empty if the run did not record them
    holes: list[int]  # lines of the metrics with a number that is not finite
    run_id: str | None = None  # None: the folder has no record of it
    forked_from: ForkedFrom | None = None  # None: the run is no fork
    # drawn points, besides evals, marks and the starts of stages
    most_points: int = MOST_POINTS
    parent: str = ""  # name of the run of this page that it was forked from; its lines are there

    @classmethod
    def read(cls, path: AnyPath, name: str) -> ReportedRun:
        """Reads a run folder; raises ConfigError for any other folder."""
        with reading(path):
            if not is_run(path):
                raise ConfigError(f"{path}: {_no_run(path)}")
            has_config = (path / "config.yml").exists()
            identity = read_identity(path)
        refuse_old_run(path)
        config = load_config(str(path / "config.yml")) if has_config else None
        metrics = scan_metrics(path)
        return cls(
            name,
            path,
            config,
            metrics.records,
            read_devices(path),
            read_sessions(path),
            metrics.holes,
            None if identity is None else identity.run_id,
            None if identity is None else identity.forked_from,
        )

    @property
    def begin(self) -> int:
        """The update that the curves begin at: of a fork beside its parent the last one that both
        share, else 0.
        """
        return self.forked_from["step"] if self.parent and self.forked_from else 0

    @functools.cached_property
    def drawable(self) -> range:
        """Indices of the records from `begin` on."""
        shared = sum(record[M.STEP] < self.begin for record in self.records)
        return range(shared, len(self.records))

    @functools.cached_property
    def marks(self) -> list[Mark]:
        """The marked updates behind `begin`."""
        return [mark for mark in find_marks(self.records) if mark.step > self.begin]

    @property
    def apart(self) -> int:
        """The number of updates between drawn ones."""
        return max(1, -(-len(self.drawable) // self.most_points))

    @property
    def drawn(self) -> list[int]:
        """Indices of the records that are drawn: all, or every k-th, the starts of stages, the
        evals, the marked ones and the last.
        """
        marked = {mark.place for mark in self.marks[-_MOST_DRAWN_MARKS:]}
        return [
            i
            for i in self.drawable
            if (i - self.drawable.start) % self.apart == 0
            or i == self.drawable[-1]
            or i in marked
            or self.records[i][M.STAGE] != self.records[i - 1][M.STAGE]
            or any(key in self.records[i] for key in (*_ALWAYS_DRAWN, *self.tasks))
        ]

    @functools.cached_property
    def tasks(self) -> dict[str, tuple[int, float | None]]:
        """The scores of lm-evaluation-harness tasks: for each metric the step of its last eval, and
        the score.
        """
        evals = [
            record for record in self.records if any(name.startswith(_TASK) for name in record)
        ]
        return {
            name: (record[M.STEP], score)
            for record in evals
            for name, score in record.items()
            if name.startswith(_TASK)
        }

    def columns(self, seconds_per_unit: float) -> RunColumns:
        """Returns the drawn values, with time in a unit of `seconds_per_unit`."""
        records, drawn = self.records, self.drawn
        seconds = list(itertools.accumulate(self._seconds()))
        counted = {"steps": M.STEP, "samples": M.SAMPLES_SEEN}
        axes: dict[str, list[Any]] = {
            axis: [records[i][metric] for i in drawn] for axis, metric in counted.items()
        }
        axes["tokens"] = [self.tokens[i] for i in drawn]
        axes["time"] = [float(f"{seconds[i] / seconds_per_unit:.9g}") for i in drawn]
        names = (*COLUMNS, *self.named_columns)
        columns = {str(name): [records[i].get(name) for i in drawn] for name in names}
        num_left_out = sum(i < self._num_unsteady for i in drawn)
        columns[M.TOKENS_PER_SECOND][:num_left_out] = [None] * num_left_out
        smoothed_loss = self._smoothed_loss()
        columns[SMOOTHED_LOSS] = [smoothed_loss[i] for i in drawn]
        for name in MARKS:
            marked = {mark.place for mark in self.marks if name in mark.columns}
            heights = columns[SMOOTHED_LOSS]
            if name != HOLE:
                pairs = zip(columns[M.LOSS], heights, strict=True)
                heights = [mean if loss is None else loss for loss, mean in pairs]
            if marked:
                pairs = zip(drawn, heights, strict=True)
                columns[name] = [height if i in marked else None for i, height in pairs]
        return RunColumns(self.name, axes, columns)

    @functools.cached_property
    def tokens(self) -> list[int]:
        """Tokens trained on after each update; those of lines without them, of older runs, are
        slots.
        """
        totals, slots_before = list[int](), 0
        for record in self.records:
            slots = record[M.TOKENS_SEEN]
            # of a run that took another's place: what that one trained on
            if not totals and record[M.STEP] > 1:
                totals.append(slots)
            else:
                tokens = record.get(M.TOKENS, slots - slots_before)
                totals.append((totals[-1] if totals else 0) + tokens)
            slots_before = slots
        return totals

    @property
    def reward_functions(self) -> list[str]:
        """The metrics of the single reward functions, if there are several."""
        return [
            name
            for name in (self.records[-1] if self.records else ())
            if name.startswith(_OF_FUNCTIONS)
        ]

    @property
    def named_columns(self) -> list[str]:
        """The metrics whose names a config or a task gave."""
        return [*self.reward_functions, *self.tasks]

    @property
    def steady(self) -> list[Record]:
        """The records without the first updates, whose speed is not typical."""
        return self.records[self._num_unsteady :]

    @property
    def _num_unsteady(self) -> int:
        return FIRST_UPDATES if len(self.records) > SHORT_RUN else 0

    @property
    def smoothing(self) -> int:
        """The number of updates in the mean of the smoothed loss."""
        return max(5, len(self.records) // 50)

    def _smoothed_loss(self) -> list[float | None]:
        return smoothed([record[M.LOSS] for record in self.records], self.smoothing)

    def _seconds(self) -> list[float]:
        return [record.get(M.STEP_TIME_S) or 0.0 for record in self.records]

    @property
    def seconds(self) -> float:
        """Time in updates."""
        return sum(self._seconds())

    def totals(self) -> dict[str, object]:
        """Returns the progress of the run, by the names of the metrics."""
        last = self.records[-1] if self.records else {}
        evals = [record[M.EVAL_LOSS] for record in self.records if M.EVAL_LOSS in record]
        return {
            "steps": last.get(M.STEP, 0),
            "samples_seen": last.get(M.SAMPLES_SEEN, 0),
            "tokens_seen": last.get(M.TOKENS_SEEN, 0),
            "tokens": self.tokens[-1] if self.records else 0,
            "loss": last.get(M.LOSS),
            "smoothed_loss": self._smoothed_loss()[-1] if self.records else None,
            "eval_loss": evals[-1] if evals else None,
            **{name: score for name, (_, score) in self.tasks.items()},
            "update_seconds": self.seconds,
        }

    def summary(self) -> list[object]:
        """Returns the cells of `SUMMARY_HEADS`."""
        if not self.records:
            return [self.name, 0, *[None] * 9]
        last = self.records[-1]
        first = self.records[0][M.GLOBAL_BATCH_SIZE]
        most = max(record[M.GLOBAL_BATCH_SIZE] for record in self.records)
        evals = [record[M.EVAL_LOSS] for record in self.records if M.EVAL_LOSS in record]
        rates = [rate for record in self.steady if (rate := record.get(M.TOKENS_PER_SECOND))]
        return [
            self.name,
            last[M.STEP],
            last[M.SAMPLES_SEEN],
            self.tokens[-1],
            most if first == most else f"{first:,} to {most:,}",
            self._smoothed_loss()[-1],
            evals[-1] if evals else None,
            statistics.median(rates) if rates else None,
            f"{self.seconds:,.1f} s",
            *(
                [
                    f"{self.devices[-1].num_devices:,} x {self.devices[-1].device_kind}",
                    self.devices[-1].num_hosts,
                ]
                if self.devices
                else [None, None]
            ),
        ]

    def task_scores(self) -> list[list[object]]:
        """Returns the cells of `TASK_HEADS` for each score of a task, of the last eval."""
        return [
            [self.name, name.removeprefix(_TASK), score, step]
            for name, (step, score) in self.tasks.items()
        ]

    def stage_rates(self) -> list[list[object]]:
        """Returns the cells of `STAGE_HEADS` for each stage of the ramp, the medians of its
        updates.
        """
        rows: list[list[object]] = []
        for stage in sorted({record[M.STAGE] for record in self.records}):
            of_stage = [record for record in self.records if record[M.STAGE] == stage]
            steady = [record for record in self.steady if record[M.STAGE] == stage] or of_stage
            medians = (
                _median([record.get(name) for record in steady])
                for name in (M.TOKENS_PER_SECOND, M.STEP_TIME_S, M.MFU)
            )
            rows.append(
                [
                    self.name,
                    stage,
                    max(record[M.GLOBAL_BATCH_SIZE] for record in of_stage),
                    len(of_stage),
                    *medians,
                ]
            )
        return rows


def without_noise_scale(run: ReportedRun) -> str | None:
    """Returns why a run has no gradient noise scale; None if it has one, or if such runs measure
    none.
    """
    measured = [record for record in run.records if M.GRADIENT_NOISE_SCALE in record]
    if not measured:
        is_off = run.config is not None and not (
            run.config.recipe.is_sampled or run.config.gradient_noise_scale
        )
        return "gradient_noise_scale=false does not measure it" if is_off else None
    if any(record[M.GRADIENT_NOISE_SCALE] is not None for record in measured):
        return None
    if all(record.get(M.NUM_MICRO_BATCHES) == 1 for record in measured):
        return (
            "it compares parts of an update, and each update of this run is a single part: one "
            "micro-batch, and no data axis in the mesh. With gradient_accumulation_steps=2 it is "
            "measured"
        )
    return "no estimate is positive so far; it is an average over about a hundred updates"


def panels(runs: Sequence[ReportedRun]) -> list[Panel]:
    """Returns `PANELS`, with marks in the loss's, a panel for each reward function behind the
    reward's, and one for each task at the end.
    """
    kinds = {column for run in runs for mark in run.marks for column in mark.columns}
    styles = {name: MARKS[name] for name in MARKS if name in kinds}
    loss = PANELS[0]._replace(
        lines=(*PANELS[0].lines, *((name, style) for name, (style, _) in styles.items())),
        note=" ".join(sentence for _, sentence in styles.values()),
    )
    rewards = dict.fromkeys(name for run in runs for name in run.reward_functions)
    single = [
        Panel(f"Reward by {name.removeprefix(_OF_FUNCTIONS)}", "mean of a batch", ((name, "line"),))
        for name in rewards
    ]
    tasks = dict.fromkeys(name for run in runs for name in run.tasks)
    scores = [Panel(name.removeprefix(_TASK), "score", ((name, "points"),)) for name in tasks]
    place = next(i for i, panel in enumerate(PANELS, 1) if panel.lines[0][0] == M.REWARD)
    return [loss, *PANELS[1:place], *single, *PANELS[place:], *scores]


def beside_parents(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Returns the runs; each fork names its parent if that is among them."""
    parents = {run.run_id: run.name for run in reversed(runs)} | {None: ""}
    return [
        dataclasses.replace(run, parent=parents.get(run.forked_from["run_id"], ""))
        if run.forked_from
        else run
        for run in runs
    ]


def fitted(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Returns the runs, thinned until their columns fit into `MOST_BYTES` of a page."""
    fitting = []
    for run in runs:
        sample = run.records[:: max(1, len(run.records) // 100)]
        names = (*_AXES, *COLUMNS, *run.named_columns)
        drawn = [[record.get(name) for name in names] for record in sample]
        # and the time and the smoothed loss
        each = len(json.dumps(drawn)) / max(1, len(sample)) + 25
        most = max(100, min(MOST_POINTS, int(MOST_BYTES / len(runs) / each)))
        fitting.append(dataclasses.replace(run, most_points=most))
    return fitting


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


TASK_HEADS = ("run", "score of a task", "last", "after updates")
STAGE_HEADS = (
    "run",
    "stage",
    "global batch",
    "updates",
    "median tokens/s",
    "median step time (s)",
    "median MFU",
)
SUMMARY_HEADS = (
    "run",
    "steps",
    "samples",
    "tokens",
    "global batch",
    "smoothed loss",
    "last eval loss",
    "median tokens/s",
    "time in updates",
    "devices",
    "hosts",
)


def smoothed(values: Sequence[float | None], window: int) -> list[float | None]:
    """Returns the running mean of the last `window` values, fewer at the start; ignores None."""
    sums = [0.0, *itertools.accumulate(value or 0.0 for value in values)]
    counts = [0, *itertools.accumulate(int(value is not None) for value in values)]
    starts = (max(0, end - window) for end in range(1, len(values) + 1))
    return [
        (sums[end] - sums[start]) / (counts[end] - counts[start])
        if counts[end] > counts[start]
        else None
        for end, start in enumerate(starts, start=1)
    ]


def is_run(path: AnyPath) -> bool:
    return (path / METRICS_FILE).is_file() or (path / "config.yml").is_file()


def _no_run(path: AnyPath) -> str:
    if missing := missing_folder(path):
        return f"{missing}; a run folder is what run_dir names"
    inside = sorted(child for child in path.iterdir() if child.is_dir() and is_run(child))
    works = f"; works: {shlex.join(map(str, inside[:3]))}" if inside else ""
    return f"holds no metrics.jsonl and no config.yml of a run{works}"
