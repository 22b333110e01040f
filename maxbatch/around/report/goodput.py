"""The time of a run by purpose: its sessions as a bar and a table, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from maxbatch.around.pages.page import heading, paragraph, shares_bar, table
from maxbatch.around.report.marks_section import marks_json
from maxbatch.around.report.runs import ReportedRun
from maxbatch.run.folder.sessions import Session, TimePart, goodput, lost_updates, total_seconds
from maxbatch.system.terminal.folding import counted

# The order of the bar: training, its overhead, losses.
_WORDS = {
    TimePart.UPDATES_KEPT: "updates kept",
    TimePart.WAITING_FOR_DATA: "waiting for data",
    TimePart.EVAL: "eval",
    TimePart.CHECKPOINTS: "checkpoints",
    TimePart.START_UP: "start-up",
    TimePart.RESTORING: "restoring",
    TimePart.COMPILING: "compiling",
    TimePart.UPDATES_LOST: "updates lost",
    TimePart.SINCE_SESSION_BEFORE: "between sessions",
}
_HEADS = (
    "session",
    "started (UTC)",
    "hosts",
    "devices",
    "updates",
    "updates lost",
    "wall time (s)",
    "kept (s)",
    "lost (s)",
    "away before (s)",
    "until its first update (s)",
    "goodput",
    "ended by",
)
_MOST_SESSIONS = 200
_START_PARTS = (TimePart.START_UP, TimePart.RESTORING, TimePart.COMPILING)


def goodput_line(run: ReportedRun) -> str | None:
    """Returns the goodput of a run in words; None for a run that recorded no session."""
    seconds = total_seconds(run.sessions)
    share = goodput(seconds)
    if share is None:
        return None
    updates = sum(lost_updates(run.sessions))
    lost = f", {counted(updates, 'update')} trained again" if updates else ""
    whole = f"{sum(seconds.values()):,.0f} s in {counted(len(run.sessions), 'session')}"
    return f"goodput {share:.1%} of {whole}{lost}"


def goodput_section(run: ReportedRun, named: bool) -> list[str]:
    """Returns the bar and the table of a run's sessions as HTML; `named` puts the run's name into
    the heading.
    """
    if (line := goodput_line(run)) is None:
        return []
    seconds = total_seconds(run.sessions)
    shown = run.sessions[-_MOST_SESSIONS:]
    losses = lost_updates(run.sessions)[-_MOST_SESSIONS:]
    first = len(run.sessions) - len(shown) + 1
    rows = [
        _row(number, *pair)
        for number, pair in enumerate(zip(shown, losses, strict=True), start=first)
    ]
    cut = (
        f" The table has the last {_MOST_SESSIONS} sessions."
        if len(shown) < len(run.sessions)
        else ""
    )
    return [
        heading(f"{run.name}: where the time went" if named else "Where the time went"),
        paragraph(
            line[0].upper()
            + line[1:]
            + ": updates that are kept, as a share of the wall time."
            + cut
        ),
        shares_bar([(word, seconds[part]) for part, word in _WORDS.items()]),
        table(_HEADS, rows),
    ]


def _row(number: int, session: Session, num_lost: int) -> list[object]:
    first, last, seconds = session.first_step, session.last_step, session.seconds
    trained = None if first is None or last is None or last < first else f"{first:,} to {last:,}"
    share = session.goodput
    return [
        number,
        f"{datetime.fromtimestamp(session.started, UTC):%Y-%m-%d %H:%M:%S}",
        session.hosts,
        session.devices,
        trained,
        num_lost,
        sum(seconds.values()),
        seconds[TimePart.UPDATES_KEPT],
        seconds[TimePart.UPDATES_LOST],
        seconds[TimePart.SINCE_SESSION_BEFORE],
        sum(seconds[part] for part in _START_PARTS),
        None if share is None else f"{share:.1%}",
        session.ended_by,
    ]


def to_json(runs: Sequence[ReportedRun]) -> dict[str, object]:
    """Returns the object of `maxbatch report --json`: goodput and seconds of all runs together, and
    of each, with its marked updates.
    """
    seconds = total_seconds([session for run in runs for session in run.sessions])
    return {
        "goodput": goodput(seconds),
        "seconds": _rounded(seconds),
        "runs": [_run(run) for run in runs],
    }


def _run(run: ReportedRun) -> dict[str, object]:
    seconds, losses = total_seconds(run.sessions), lost_updates(run.sessions)
    sessions = [
        session.to_json() | {"goodput": session.goodput, "updates_lost": lost}
        for session, lost in zip(run.sessions, losses, strict=True)
    ]
    return {
        "name": run.name,
        "run_dir": str(run.path),
        **run.totals(),
        "goodput": goodput(seconds),
        "updates_lost": sum(losses),
        "seconds": _rounded(seconds),
        "sessions": sessions,
        "forked_from": run.forked_from,
        "marks": marks_json(run),
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}
