"""The marked updates of runs as a table and as lines of the terminal, with their commands."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from maxbatch.around.pages.page import heading, paragraph, table
from maxbatch.around.report.marks import Mark, counts_of, newest
from maxbatch.around.report.runs import ReportedRun
from maxbatch.run.folder.metrics_schema import Metric

_MOST_ROWS, _MOST_LINES = 10, 3  # of a run, on the page and on the terminal
_HEADS = ("run", "update", "mark", "loss", "gradient norm", "shows its samples")


def marks_section(runs: Sequence[ReportedRun]) -> list[str]:
    """Returns the marked updates of the runs as HTML; nothing without one."""
    marked = [run for run in runs if run.marks]
    if not marked:
        return []
    rows = [_row(run, mark) for run in marked for mark in newest(run.marks, _MOST_ROWS)]
    return [
        heading("Marked updates"),
        *(paragraph(_counts(run, _MOST_ROWS)) for run in marked),
        table(_HEADS, rows),
    ]


def marks_lines(run: ReportedRun) -> list[str]:
    """Returns a line with the numbers of a run's marks, and one for each of the newest; none
    without marks.
    """
    if not run.marks:
        return []
    return [
        _counts(run, _MOST_LINES),
        *(
            f"update {mark.step:,} ({mark.words}): {_command(run, mark)}"
            for mark in newest(run.marks, _MOST_LINES)
        ),
    ]


def marks_json(run: ReportedRun) -> list[dict[str, object]]:
    """Returns an object of each marked update for `maxbatch report --json`, oldest first."""
    return [
        {
            "step": mark.step,
            "skip_reason": mark.reason,
            "left_out": mark.left_out,
            "first": mark.first,
            "end": mark.end,
            "loss": run.records[mark.place][Metric.LOSS],
            "grad_norm": run.records[mark.place].get(Metric.GRAD_NORM),
            "replay": _command(run, mark),
        }
        for mark in run.marks
    ]


def _counts(run: ReportedRun, most: int) -> str:
    rest = f"; the newest {most} of {len(run.marks):,} marks:" if len(run.marks) > most else ""
    return f"{run.name}: {counts_of(run.marks)}{rest}"


def _row(run: ReportedRun, mark: Mark) -> list[object]:
    record = run.records[mark.place]
    return [
        run.name,
        mark.step,
        mark.words,
        record[Metric.LOSS],
        record.get(Metric.GRAD_NORM),
        _command(run, mark),
    ]


def _command(run: ReportedRun, mark: Mark) -> str:
    """Returns the command that takes the update again; an update before a fork is the parent's."""
    fork = run.forked_from
    folder = fork["run"] if fork and mark.step <= fork["step"] else str(run.path)
    return f"maxbatch replay {shlex.quote(folder)} --step {mark.step}"
