"""`sessions.jsonl`: a line for every start of a run, with its wall time by purpose.

The line is written when a run starts, and a thread keeps it up to date. A killed start leaves its
last line, which the next start completes from `metrics.jsonl`. The next start also counts the time
of updates that it trains again as lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Self

from maxbatch.plan.checkpoint_period import MeasuredTimes
from maxbatch.run.folder.json_file import checked
from maxbatch.run.folder.metrics import UpdateSeconds, read_lines, update_seconds
from maxbatch.run.folder.run_folder import SESSIONS_FILE, RunFolder
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.processes.repeating import Repeating
from maxbatch.system.processes.threads import on_own_thread
from maxbatch.system.storage.appending import PERIOD_S as REMOTE_PERIOD_S
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.storage import AnyPath, is_remote

_PERIOD_S = 5.0
_END_WAIT_S = 5.0
# Keys by name, each with its value in the session before and in this one; null is None.
Changed = dict[str, list[str | None]]
# Larger than in any run; a line with more is damaged.
_MOST_STEPS, _MOST_UPDATES_PER_SECOND, _LATEST = 1 << 40, 10_000, 1e11
UNKNOWN_STEP = -1  # of the newest checkpoint of a session whose line does not state it


class TimePart(StrEnum):
    """A part of the wall time of a session."""

    START_UP = "start_up"  # everything else
    RESTORING = "restoring"
    COMPILING = "compiling"
    WAITING_FOR_DATA = "waiting_for_data"
    UPDATES_KEPT = "updates_kept"
    # trained again by a later session, or under way when the session ended
    UPDATES_LOST = "updates_lost"
    CHECKPOINTS = "checkpoints"
    EVAL = "eval"
    SINCE_SESSION_BEFORE = "since_session_before"


class Session(NamedTuple):
    """A start of a run."""

    started: float  # seconds since 1970
    ended: float  # when it was last known to live
    hosts: int
    devices: int
    # its first update, from 1; None if it ended before the first update was known
    first_step: int | None
    last_step: int | None  # its last update that was recorded; `first_step` - 1 if there is none
    # by `TimePart`; their sum is the time from the end of the session before to its own end
    seconds: dict[str, float]
    # `done`, `early stopping`, the name of a signal, `host 1 died` or `error`; None while it runs,
    # or if it was killed
    ended_by: str | None = None
    # of maxbatch, Python, JAX and its compilers; None in older lines
    versions: dict[str, str] | None = None
    command: str | None = None  # None in older lines
    # The newest checkpoint in run_dir that it resumed from or committed; None: there is none.
    saved_step: int | None = UNKNOWN_STEP
    # the keys whose values differ from those of the session before; None in older lines
    changed: Changed | None = None

    def to_json(self) -> dict[str, object]:
        """Returns the object of its line; times to the millisecond."""
        rounded = {name: round(value, 3) for name, value in self.seconds.items()}
        times = {"started": round(self.started, 3), "ended": round(self.ended, 3)}
        facts = {"ended_by": self.ended_by, "versions": self.versions, "command": self.command}
        line = {**times, **facts, **self._asdict(), **times, "seconds": rounded}
        if self.saved_step == UNKNOWN_STEP:
            line.pop("saved_step")
        return line

    @property
    def goodput(self) -> float | None:
        """The share of its time spent on updates that are kept; None without any time."""
        return goodput(self.seconds)

    def moved(self, source: TimePart, target: TimePart, seconds: float) -> Session:
        """Returns the session with min(seconds, all that `source` has) moved to `target`."""
        moved_s = min(max(seconds, 0.0), self.seconds[source])
        changed = dict(self.seconds)
        changed[source] -= moved_s
        changed[target] += moved_s
        return self._replace(seconds=changed)


_SHAPE = {
    "started": float,
    "ended": float,
    "hosts": int,
    "devices": int,
    "first_step": int | None,
    "last_step": int | None,
    "seconds": {part.value: float for part in TimePart},
}
# of fields that older lines lack
_LATER_SHAPE = {
    "ended_by": str | None,
    "versions": object,
    "command": str | None,
    "changed": object,
}


def read_sessions(run_dir: AnyPath) -> list[Session]:
    """Returns the sessions of a run, oldest first; leaves out lines that cannot be read.

    Raises:
      ConfigError: the file cannot be read.
    """
    return [
        session
        for line in read_lines(run_dir / SESSIONS_FILE)
        if (session := _parse(line)) is not None
    ]


def _parse(line: bytes) -> Session | None:
    try:
        fields: dict[str, Any] = checked(json.loads(line.decode()), _SHAPE)
        seconds = {part.value: float(fields["seconds"][part]) for part in TimePart}
        later = checked({name: fields.get(name) for name in _LATER_SHAPE}, _LATER_SHAPE)
        if later["versions"] is not None:
            checked(later["versions"], {str: str}, "versions")
        if later["changed"] is not None:
            checked(later["changed"], {str: [str | None]}, "changed")
        saved = fields.get("saved_step", UNKNOWN_STEP)
        if saved != UNKNOWN_STEP:
            checked(saved, int | None)
        named = {name: fields[name] for name in _SHAPE} | later
        session = Session(**named | {"seconds": seconds, "saved_step": saved})
        return session if _is_possible(session) else None
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _is_possible(session: Session) -> bool:
    """Returns whether a session is possible: all numbers within bounds, and no update without
    time.
    """
    first, last = session.first_step or 1, session.last_step
    return (
        all(
            0 <= number <= _LATEST
            for number in (*session.seconds.values(), session.started, session.ended)
        )
        and min(session.hosts, session.devices) >= 1
        and max(session.hosts, session.devices) <= _MOST_STEPS
        and 1 <= first <= _MOST_STEPS
        and (last is None or first - 1 <= last)
        and UNKNOWN_STEP <= (session.saved_step or 0) <= _MOST_STEPS
        and (last or 0) - first
        < _MOST_UPDATES_PER_SECOND * (1 + max(0.0, session.ended - session.started))
    )


def total_seconds(sessions: Sequence[Session]) -> dict[str, float]:
    """Returns the wall time of a run by `TimePart`."""
    return {part.value: sum(session.seconds[part] for session in sessions) for part in TimePart}


def goodput(seconds: Mapping[str, float]) -> float | None:
    """Returns the share of the wall time spent on updates that are kept; None without any time."""
    total = sum(seconds.values())
    return seconds[TimePart.UPDATES_KEPT] / total if total else None


def saved_of(sessions: Sequence[Session]) -> int | None:
    """Returns the newest step that a run's sessions state as saved since it last began at step 0.

    None: no checkpoint was saved since then. `UNKNOWN_STEP`: an older version wrote the lines, or
    there are none.
    """
    steps: list[int | None] = []
    for session in reversed(sessions):
        steps.append(session.saved_step)
        if session.first_step == 1:
            break
    known = [step for step in steps if step is not None]
    return max(known, default=None) if steps else UNKNOWN_STEP


def lost_updates(sessions: Sequence[Session]) -> list[int]:
    """Returns for each session the number of its updates that later sessions trained, or will
    train, again.
    """
    lost, last_kept = [], math.inf
    for session in reversed(sessions):
        first, last = session.first_step, session.last_step
        if first is None or last is None:
            lost.append(0)
            continue
        lost.append(max(0, last - max(first - 1, int(min(last, last_kept)))))
        last_kept = min(last_kept, first - 1)
    return lost[::-1]


def mean_seconds(sessions: Sequence[Session], checkpoint_period: int) -> MeasuredTimes:
    """Returns the mean times of a run whose checkpoints were `checkpoint_period` updates apart."""
    trained = [
        session
        for session in sessions
        if session.first_step and session.last_step and session.first_step <= session.last_step
    ]

    seconds = total_seconds(trained)
    steps = sum((session.last_step or 0) - (session.first_step or 0) + 1 for session in trained)
    saves = sum(
        (session.last_step or 0) // checkpoint_period
        - ((session.first_step or 1) - 1) // checkpoint_period
        for session in trained
    )

    # the parts of a start before its first update, for every start but the first
    starts = (
        TimePart.SINCE_SESSION_BEFORE,
        TimePart.START_UP,
        TimePart.RESTORING,
        TimePart.COMPILING,
    )
    again = total_seconds(trained[1:])

    return MeasuredTimes(
        seconds[TimePart.CHECKPOINTS] / saves if saves and seconds[TimePart.CHECKPOINTS] else None,
        (
            seconds[TimePart.UPDATES_KEPT]
            + seconds[TimePart.UPDATES_LOST]
            + seconds[TimePart.WAITING_FOR_DATA]
        )
        / steps
        if steps
        else None,
        sum(again[part] for part in starts) / (len(trained) - 1) if len(trained) > 1 else None,
    )


def resumed(
    sessions: Sequence[Session], step: int, now: float, times: Mapping[int, UpdateSeconds]
) -> list[Session]:
    """Returns the earlier sessions of a run for a start that continues after `step` updates.

    Args:
      sessions: the earlier sessions, oldest first.
      step: completed updates of the checkpoint; those after it are trained again.
      now: when the start began, in seconds since 1970.
      times: of updates by their number: of those after the last line of `sessions`, and of those
        after `step`.
    """
    completed = list(sessions)
    if completed:
        completed[-1] = _completed(completed[-1], now, times)
    last_kept = math.inf  # of the sessions before the current one: later sessions trained the rest
    for index in reversed(range(len(completed))):
        first, last = completed[index].first_step, completed[index].last_step
        if first is None or last is None:
            continue
        completed[index] = _without(completed[index], first, min(last, last_kept), step, times)
        last_kept = min(last_kept, first - 1)
    return completed


def _completed(session: Session, now: float, times: Mapping[int, UpdateSeconds]) -> Session:
    """Returns a session with the updates that it recorded after the last write of its line."""
    if session.last_step is None:
        return session
    late: list[UpdateSeconds] = []
    while (session.last_step + len(late) + 1) in times:
        late.append(times[session.last_step + len(late) + 1])
    waited = min(sum(update.waited for update in late), sum(update.whole for update in late))
    whole = sum(update.whole for update in late)
    # of the first of them, counted by then
    under_way = min(session.seconds[TimePart.UPDATES_LOST], whole)
    room = max(0.0, now - session.ended)
    added = min(whole - under_way, room)
    kept = max(0.0, under_way + added - waited)
    seconds = session.seconds | {
        TimePart.UPDATES_LOST: session.seconds[TimePart.UPDATES_LOST] - under_way,
        TimePart.UPDATES_KEPT: session.seconds[TimePart.UPDATES_KEPT] + kept,
        TimePart.WAITING_FOR_DATA: session.seconds[TimePart.WAITING_FOR_DATA]
        + under_way
        + added
        - kept,
    }
    return session._replace(
        ended=session.ended + added, last_step=session.last_step + len(late), seconds=seconds
    )


def _without(
    session: Session, first: int, last: float, step: int, times: Mapping[int, UpdateSeconds]
) -> Session:
    """Returns a session whose updates `first` to `last` were kept, without those after `step`."""
    if last <= step or last < first:
        return session
    if step < first:
        return session.moved(TimePart.UPDATES_KEPT, TimePart.UPDATES_LOST, math.inf)
    mean = session.seconds[TimePart.UPDATES_KEPT] / (last - first + 1)
    lost = [
        update.whole - update.waited for number, update in times.items() if step < number <= last
    ]
    seconds = sum(lost) + mean * (last - step - len(lost))
    return session.moved(TimePart.UPDATES_KEPT, TimePart.UPDATES_LOST, seconds)


_OPEN: list[SessionLog] = []  # of this process; those that write a line


def leave_sessions(cause: str, is_refusal: bool = False) -> None:
    """Writes the last lines of the sessions of this process, which is about to end, on any thread
    but the one that trains.

    Args:
      is_refusal: whether the start is refused; one that trained nothing then leaves no line.
    """
    for log in list(_OPEN):
        writer = threading.Thread(
            target=log.leave, args=(cause, is_refusal), name="maxbatch-session-end", daemon=True
        )
        writer.start()
        writer.join(_END_WAIT_S)  # a store may not answer


def end_killed_session(run_dir: AnyPath, cause: str) -> None:
    """Records what ended the last session of a run whose processes are gone, unless it recorded
    that itself.
    """
    sessions = read_sessions(run_dir)
    if sessions and sessions[-1].ended_by is None:
        ended = [*sessions[:-1], sessions[-1]._replace(ended_by=cause)]
        write_atomically(run_dir / SESSIONS_FILE, _lines(ended))


def _lines(sessions: Sequence[Session]) -> str:
    return "".join(json.dumps(session.to_json()) + "\n" for session in sessions)


class _Counted(NamedTuple):
    """The session that runs, and the part that its time counts in since its last change."""

    session: Session
    part: TimePart
    since: float  # by `time.perf_counter`


class SessionLog:
    """The line of the session that runs, and the clock of its parts.

    Its methods are called on the thread that trains, and other threads write the line. As a context
    manager it writes the line at once and once more at the end. A refused start leaves no line.

    A signal may stop the thread that trains at any moment, to end the process. Other threads then
    write the last line, so that thread never holds a lock that they need.

    Args:
      started: when the session began, in seconds since 1970.
      versions: of the software that computes.
      command: which started it.
    """

    def __init__(
        self,
        folder: RunFolder,
        started: float,
        hosts: int,
        devices: int,
        writes: bool,
        versions: dict[str, str] | None = None,
        command: str | None = None,
    ) -> None:
        self._folder, self._writes = folder, writes
        self._before = read_sessions(folder.path) if writes else []  # as it was found
        self._earlier = self._before  # as this start knows it
        seconds = {part.value: 0.0 for part in TimePart}
        if self._before:
            seconds[TimePart.SINCE_SESSION_BEFORE] = max(0.0, started - self._before[-1].ended)
        facts = Session(started, started, hosts, devices, None, None, seconds)
        self._origin = time.perf_counter() - max(0.0, time.time() - started)
        # replaced as a whole, and only by the thread that trains
        self._counted = _Counted(
            facts._replace(versions=versions, command=command), TimePart.START_UP, self._origin
        )
        # any thread may set these
        self._ended_by: str | None = None
        self._saved_step: int | None = None
        self._is_withdrawn = False
        self._writing = threading.Lock()  # so that an older line never replaces a newer one
        self._writer: Repeating | None = None

    def __enter__(self) -> Self:
        if self._writes:
            _OPEN.append(self)  # first: a signal during the write finds the session here
            try:
                on_own_thread(self._write, "maxbatch-session-start")
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):  # the line may be there already
                    self._write_end(error)
                _OPEN.remove(self)
                raise
            period = REMOTE_PERIOD_S if is_remote(self._folder.path) else _PERIOD_S
            self._writer = Repeating(self._write, period, "maxbatch-sessions")
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if self._writer and self._writer.stop(_END_WAIT_S):
                self._write_end(error)
        finally:
            if self in _OPEN:
                _OPEN.remove(self)

    def _write_end(self, error: BaseException | None) -> None:
        """Writes the last line of a session that ends by itself, or by an exception."""
        if error is not None:
            self.end_by("SIGINT" if isinstance(error, KeyboardInterrupt) else "error")
        self._is_withdrawn = self._is_withdrawn or (
            isinstance(error, ConfigError) and not self._must_stay
        )
        with contextlib.suppress(*((ConfigError, TrainingError, OSError) if error else ())):
            on_own_thread(self._write, "maxbatch-session-end")

    @property
    def part(self) -> TimePart:
        """The part that time counts in now."""
        return self._counted.part

    def end_by(self, cause: str) -> None:
        """Records what ends the session, for its last line."""
        self._ended_by = cause

    @property
    def _has_trained(self) -> bool:
        session = self._counted.session
        return session.first_step is not None and session.first_step <= (session.last_step or 0)

    @property
    def _must_stay(self) -> bool:
        """Whether its line is needed: it has trained, or `config.yml` has the keys that it
        changed.
        """
        return self._has_trained or bool(self._counted.session.changed)

    def leave(self, cause: str, is_refusal: bool = False) -> None:
        """Writes the last line of a session whose process is about to end, on any thread but the
        one that trains.
        """
        self.end_by(cause)
        self._is_withdrawn = self._is_withdrawn or (is_refusal and not self._must_stay)
        # the next start completes the line
        with contextlib.suppress(ConfigError, TrainingError, OSError):
            self._write()

    def note_changed(self, changed: Changed | None) -> None:
        """Records the keys that this session changes; None: those of the session before are
        unknown.

        Called before `stand_at`, which writes them before `config.yml` states the new values.
        """
        self._count(lambda session: session._replace(changed=changed))

    def withdraw(self) -> None:
        """Removes the line of this start, which had nothing to do."""
        self._is_withdrawn = True

    @contextlib.contextmanager
    def during(self, part: TimePart) -> Iterator[None]:
        """Counts the time of a block in a part, except for nested blocks of other parts."""
        outer = self._turn_to(part)
        try:
            yield
        finally:
            self._turn_to(outer)

    def move(self, part: TimePart, seconds: float) -> None:
        """Moves seconds that have just passed to another part."""
        self._count(lambda session: session.moved(self.part, part, seconds))

    def begin_anew(self) -> None:
        """Forgets the earlier sessions: the run that they trained was given up."""
        self._before = self._earlier = []
        self._follow_after(0.0)

    def stand_at(self, step: int, saved: int | None = None) -> None:
        """Records that the session continues after `step` updates; later updates count as lost.

        Args:
          saved: the step of the checkpoint in `run_dir` that it resumes from; None: it resumes from
            none.
        """
        self._saved_step = saved
        self._count(lambda session: session._replace(first_step=step + 1, last_step=step))
        if self._before:
            self._complete_earlier(step)
        if self._writer:
            # now: the next start of a run that is killed soon completes a line with a first step
            on_own_thread(self._write, "maxbatch-session-stands")

    def _complete_earlier(self, step: int) -> None:
        """Completes the lines of earlier sessions for a start that continues after `step`
        updates.
        """
        last, started = self._before[-1].last_step, self._counted.session.started
        times = update_seconds(self._folder.path, after=min(step, step if last is None else last))
        self._earlier = resumed(self._before, step, started, times)
        self._follow_after(max(0.0, started - self._earlier[-1].ended))

    def _follow_after(self, gap_s: float) -> None:
        """Records the seconds since the session before."""
        self._count(
            lambda session: session._replace(
                seconds=session.seconds | {TimePart.SINCE_SESSION_BEFORE: gap_s}
            )
        )

    def record(self, step: int) -> None:
        """Counts the time in updates so far as kept: the record of update `step` is written."""
        if self._writer:
            self._writer.check()
        self._count(
            lambda session: session.moved(
                TimePart.UPDATES_LOST, TimePart.UPDATES_KEPT, math.inf
            )._replace(last_step=step)
        )

    def saved(self, step: int) -> None:
        """Records a committed checkpoint at once; any thread may call it."""
        self._saved_step = step
        if self._writes:
            on_own_thread(self._write, "maxbatch-session-saved")

    def _turn_to(self, part: TimePart) -> TimePart:
        """Counts the time from now on in a part; returns the part before it."""
        outer = self.part
        self._count(lambda session: session, part)
        return outer

    def _count(self, change: Callable[[Session], Session], part: TimePart | None = None) -> None:
        """Counts the time up to now, then changes the session, and the part if one is given."""
        now = time.perf_counter()
        counted = self._counted
        self._counted = _Counted(change(self._until(now, counted)), part or counted.part, now)

    def _until(self, now: float, counted: _Counted) -> Session:
        """Returns the session with its time up to `now`."""
        session, part, since = counted
        seconds = session.seconds | {part: session.seconds[part] + now - since}
        return session._replace(ended=session.started + now - self._origin, seconds=seconds)

    def _write(self) -> None:
        self._folder.check()
        with self._writing:
            session = self._until(time.perf_counter(), self._counted)
            session = session._replace(ended_by=self._ended_by, saved_step=self._saved_step)
            lines = self._before if self._is_withdrawn else [*self._earlier, session]
            if lines:
                self._folder.write(SESSIONS_FILE, _lines(lines))
            else:
                (self._folder.path / SESSIONS_FILE).unlink(missing_ok=True)
