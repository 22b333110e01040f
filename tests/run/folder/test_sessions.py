"""Sessions: every start of a run has a line, whose parts add up to its wall time."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from maxbatch.run.folder.metrics import UpdateSeconds
from maxbatch.run.folder.run_folder import SESSIONS_FILE, RunFolder
from maxbatch.run.folder.sessions import (
    Session,
    SessionLog,
    TimePart,
    end_killed_session,
    goodput,
    leave_sessions,
    read_sessions,
    resumed,
    total_seconds,
)
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.storage.leases import Lease
from maxbatch.system.storage.storage import as_path
from tests.helpers.stores import Store

NOTHING = {part.value: 0.0 for part in TimePart}


def session(started: float, first: int | None, last: int | None, **seconds: float) -> Session:
    parts = NOTHING | seconds
    return Session(started, started + sum(parts.values()), 2, 8, first, last, parts)


def times(*steps: int) -> dict[int, UpdateSeconds]:
    return {step: UpdateSeconds(2.0, 0.5) for step in steps}


def line(step: int, seconds: float = 2.0) -> str:
    required = {
        "samples_seen": step,
        "tokens_seen": step,
        "global_batch_size": 1,
        "stage": 0,
        "loss": 1.0,
    }
    return json.dumps(
        {"step": step, **required, "learning_rate": 1.0, "step_time_s": seconds, "data_wait_s": 0.5}
    )


def test_updates_that_are_trained_again_are_lost() -> None:
    (found,) = resumed([session(0, 1, 5, updates_kept=10)], 3, 100, times(4, 5))
    assert (found.seconds["updates_kept"], found.seconds["updates_lost"]) == (7, 3), (
        "two updates of 1.5 s"
    )
    assert found.ended == 10


def test_updates_are_lost_once_however_often_the_run_starts_again() -> None:
    first = resumed([session(0, 1, 14, updates_kept=14)], 10, 100, times(11, 12, 13, 14))
    again = [*first, session(20, 11, 10, compiling=5)]
    assert resumed(again, 10, 100, times(11, 12, 13, 14))[0] == first[0]


def test_a_damaged_checkpoint_loses_updates_of_several_sessions() -> None:
    sessions = [session(0, 1, 10, updates_kept=10), session(20, 11, 14, updates_kept=4)]
    one, two = resumed(sessions, 5, 100, {})
    assert [one.seconds["updates_lost"], two.seconds["updates_lost"]] == [5, 4], (
        "by the mean where no line is left"
    )
    three = session(40, 6, 20, updates_kept=15)
    assert resumed([one, two, three], 20, 100, {}) == [one, two, three]


def test_a_killed_session_is_completed_from_the_lines_of_its_updates() -> None:
    killed = session(0, 1, 3, updates_kept=6, updates_lost=1)
    (found,) = resumed([killed], 5, 100, times(4, 5))
    assert (found.last_step, found.ended) == (5, 10), "4 s more, of which 1 s was counted"
    assert sum(found.seconds.values()) == found.ended
    assert (
        found.seconds["waiting_for_data"],
        found.seconds["updates_kept"],
        found.seconds["updates_lost"],
    ) == (
        1,
        9,
        0,
    )
    (early,) = resumed([killed], 5, 8, times(4, 5))
    assert early.ended == 8 == sum(early.seconds.values()), "not beyond the start of the next"
    (lost,) = resumed([killed], 0, 100, times(1, 2, 3, 4, 5))
    assert lost.seconds["updates_kept"] == 0 == goodput(lost.seconds)


def test_a_session_that_died_early_has_no_steps_and_costs_its_time() -> None:
    sessions = [session(0, 1, 4, updates_kept=4), session(10, None, None, start_up=3)]
    assert resumed(sessions, 4, 100, times(5)) == sessions


def test_the_parts_of_a_session_add_up_to_its_wall_time(tmp_path: Path) -> None:
    started = time.time() - 2
    with RunFolder(str(tmp_path)) as folder:
        with SessionLog(folder, started, 2, 8, writes=True) as log:
            assert read_sessions(tmp_path)[0].first_step is None, (
                "the line is there from the start on"
            )
            log.stand_at(0)
            with log.during(TimePart.UPDATES_LOST):
                time.sleep(0.02)
                log.move(TimePart.WAITING_FOR_DATA, 0.01)
                log.move(TimePart.COMPILING, 1e9)
                log.record(1)
                time.sleep(0.01)
                with log.during(TimePart.EVAL):
                    time.sleep(0.01)
                log.record(2)
                time.sleep(0.01)
        (tmp_path / "metrics.jsonl").write_text(f"{line(1)}\n{line(2, 0.505)}\n")
        with SessionLog(folder, time.time() + 1, 1, 1, writes=True) as log:
            log.stand_at(1)
    first, second = read_sessions(tmp_path)
    assert sum(first.seconds.values()) == pytest.approx(first.ended - started, abs=0.01)
    assert (first.hosts, first.devices, first.first_step, first.last_step) == (2, 8, 1, 2)
    assert first.seconds["start_up"] >= 2
    assert first.seconds["waiting_for_data"] == 0.01
    assert first.seconds["eval"] >= 0.01
    assert first.seconds["updates_kept"] >= 0.004
    assert first.seconds["updates_lost"] >= 0.014, (
        "update 2, which is trained again, and the one under way at the end"
    )
    assert second.seconds["since_session_before"] == pytest.approx(
        second.started - first.ended, abs=0.01
    )
    assert sum(total_seconds([first, second]).values()) == pytest.approx(
        second.ended - started, abs=0.02
    )


def test_time_that_is_counted_already_is_not_counted_twice() -> None:
    compiling = session(0, 1, 1, compiling=3)
    assert compiling.moved(TimePart.COMPILING, TimePart.COMPILING, 2) == compiling


def test_a_start_that_is_refused_or_has_nothing_to_do_has_no_line(tmp_path: Path) -> None:
    with RunFolder(str(tmp_path)) as folder:
        with SessionLog(folder, time.time(), 1, 1, writes=True) as log:
            log.withdraw()
        with pytest.raises(ConfigError), SessionLog(folder, time.time(), 1, 1, writes=True):
            raise ConfigError("refused")
        assert not (tmp_path / SESSIONS_FILE).exists()
        with pytest.raises(KeyboardInterrupt), SessionLog(folder, time.time(), 1, 1, writes=True):
            raise KeyboardInterrupt
    assert len(read_sessions(tmp_path)) == 1


@pytest.mark.parametrize("wrong", ["{", "[]", "null", '{"started": 1}', "\xff"])
def test_a_line_that_cannot_be_read_is_left_out(tmp_path: Path, wrong: str) -> None:
    sound = session(0, 1, 4, updates_kept=4)
    text = f"{wrong}\n{json.dumps(sound.to_json())}\n{json.dumps(sound.to_json() | {'ended': math.inf})}\n"
    (tmp_path / SESSIONS_FILE).write_text(text, encoding="latin-1")
    assert read_sessions(tmp_path) == [sound]


def test_a_run_in_a_bucket_has_its_sessions_and_writes_none_once_its_lease_is_lost(
    store: Store,
) -> None:
    run_dir = as_path(f"{store.bucket()}/run")
    with RunFolder(str(run_dir)) as folder:
        with SessionLog(folder, time.time(), 4, 16, writes=True) as log:
            log.stand_at(0)
            log.record(1)
        with (
            pytest.raises(KeyboardInterrupt),
            SessionLog(folder, time.time(), 2, 8, writes=True) as log,
        ):
            log.stand_at(1)
            assert isinstance(folder._hold, Lease)
            folder._hold.lost = "another process has taken the run over"
            log.record(2)
            raise KeyboardInterrupt
    assert [(one.hosts, one.last_step) for one in read_sessions(run_dir)] == [(4, 1), (2, 1)]


@pytest.mark.parametrize(
    "damage",
    [
        {"last_step": 10**13},
        {"first_step": 10**13, "last_step": 10**13},
        {"first_step": -(10**13)},
        {"last_step": -5},
        {"hosts": 10**400},
        {"devices": 0},
        {"started": 1e300},
        {"ended": math.nan},
        {"seconds": NOTHING | {"eval": 10**400}},
        {"seconds": NOTHING | {"eval": 1e300}},
    ],
    ids=str,
)
def test_a_line_with_numbers_that_no_run_has_is_left_out(
    tmp_path: Path, damage: dict[str, object]
) -> None:
    sound = session(1e9, 1, 5, updates_kept=10).to_json()
    (tmp_path / SESSIONS_FILE).write_text(
        "".join(json.dumps(one) + "\n" for one in (sound, sound | damage))
    )
    assert [found.last_step for found in read_sessions(tmp_path)] == [5]


def test_the_time_of_lost_updates_takes_no_time_however_many_they_are() -> None:
    (found,) = resumed([session(0, 1, 10**13, updates_kept=10**13)], 1, 100, times(2, 3))
    assert found.seconds["updates_lost"] == 10**13 - 1 + 2 * 0.5


def test_a_session_records_what_ended_it_its_versions_and_its_command(tmp_path: Path) -> None:
    facts = {"jax": "1.2.3"}, "maxbatch train steps=2"
    with RunFolder(str(tmp_path)) as folder:
        with SessionLog(folder, time.time(), 1, 1, True, *facts) as log:
            (running,) = read_sessions(tmp_path)
            assert (running.ended_by, running.versions, running.command) == (None, *facts)
            log.end_by("done")
        with pytest.raises(TrainingError), SessionLog(folder, time.time(), 1, 1, True, *facts):
            raise TrainingError("the disk is full")
        with SessionLog(folder, time.time(), 1, 1, True, *facts):
            leave_sessions("host 1 died")
            assert read_sessions(tmp_path)[-1].ended_by == "host 1 died"
        assert [found.ended_by for found in read_sessions(tmp_path)] == [
            "done",
            "error",
            "host 1 died",
        ]
        for trains in (True, False):
            with SessionLog(folder, time.time(), 1, 1, True, *facts) as log:
                if trains:
                    log.stand_at(0)
                    log.record(1)
                leave_sessions("host 1 failed", is_refusal=True)
                ends = [found.ended_by for found in read_sessions(tmp_path)]
                assert ends == ["done", "error", "host 1 died", "host 1 failed"], (
                    "a refused start leaves no line"
                )


@pytest.mark.parametrize("owner", [Session, RunFolder], ids=["counting", "writing"])
def test_a_signal_that_stops_the_thread_that_trains_anywhere_is_recorded_by_other_threads(
    owner: type[Session] | type[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of a signal that ends the process waits on that thread, in the middle of a call."""
    name = "_replace" if owner is Session else "write"
    do, stopped, goes_on = getattr(owner, name), threading.Event(), threading.Event()

    def do_once_resumed(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == "trains":
            stopped.set()
            assert goes_on.wait(60)
        return do(*arguments, **options)

    with (
        RunFolder(str(tmp_path)) as folder,
        SessionLog(folder, time.time(), 1, 1, writes=True) as log,
    ):
        monkeypatch.setattr(owner, name, do_once_resumed)
        training = threading.Thread(target=log.stand_at, args=(0,), name="trains")
        training.start()
        while training.is_alive() and not stopped.wait(0.01):
            pass
        leave_sessions("SIGTERM")
        ended_by = read_sessions(tmp_path)[-1].ended_by
        goes_on.set()
        training.join()
    assert ended_by == "SIGTERM"


def test_what_ended_a_killed_run_is_recorded_by_who_saw_it(tmp_path: Path) -> None:
    end_killed_session(tmp_path, "host 1 died")
    assert not (tmp_path / SESSIONS_FILE).exists()
    with RunFolder(str(tmp_path)) as folder, SessionLog(folder, time.time(), 1, 1, writes=True):
        pass
    end_killed_session(tmp_path, "host 1 died")
    end_killed_session(tmp_path, "host 2 died")
    assert [found.ended_by for found in read_sessions(tmp_path)] == ["host 1 died"]


def test_a_line_of_an_older_version_is_read(tmp_path: Path) -> None:
    older = session(0, 1, 4, updates_kept=4)
    fields = {
        name: value
        for name, value in older.to_json().items()
        if name not in ("ended_by", "versions", "command")
    }
    (tmp_path / SESSIONS_FILE).write_text(json.dumps(fields) + "\n")
    assert read_sessions(tmp_path) == [older]


def test_a_session_that_is_killed_soon_has_its_first_step_also_in_a_bucket(store: Store) -> None:
    with RunFolder(store.bucket() + "/run") as folder:
        killed = SessionLog(folder, time.time() - 30, 1, 1, writes=True)
        killed.__enter__()
        killed.stand_at(0)
        (found,) = read_sessions(folder.path)
        assert (found.first_step, found.last_step) == (1, 0)
        (kept,) = resumed([found], 2, time.time() + 100, times(1, 2, 3))
        assert kept.last_step == 3 and kept.seconds["updates_kept"] > 0
        killed.__exit__(None, None, None)
