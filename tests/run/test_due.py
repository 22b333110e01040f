"""What is due after an update is known without a run."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.plan.rampup import PlannedStep
from maxbatch.run.due import Due, Schedule, is_due
from maxbatch.run.folder.position import BestEval

SCHEDULE = Schedule(
    first_step=3,
    total_steps=12,
    checkpoint_period=5,
    eval_interval=4,
    local_checkpoint_period=2,
    patience=2,
    keeps_best=True,
)


def due_after(step: int, schedule: Schedule = SCHEDULE) -> Due:
    return schedule.after(PlannedStep(step, 8 * (step - 1), 8, 0, 8 * step), step - 1)


def names(due: Due) -> set[str]:
    return {name for name, is_due in due._asdict().items() if is_due}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (3, {"compiles"}),
        (4, {"evaluates", "saves_locally"}),
        (5, {"saves"}),
        (6, {"saves_locally"}),
        (7, set[str]()),
        (8, {"evaluates", "saves_locally"}),
        (10, {"saves", "saves_locally"}),
        (12, {"evaluates", "saves"}),
    ],
)
def test_each_action_is_due_at_its_period_and_the_last_update_saves_and_evaluates(
    step: int, expected: set[str]
) -> None:
    due = due_after(step)
    assert names(due) == expected and due.pauses == bool(expected)


def test_nothing_but_a_compile_is_due_within_a_batch() -> None:
    def due_of(step: int, last_end: int, ends: bool) -> set[str]:
        update = PlannedStep(step, 32, 8, 0, 40 if ends else 32)
        return names(SCHEDULE.after(update, last_end))

    assert due_of(3, 2, ends=False) == {"compiles"}
    assert due_of(5, 2, ends=False) == set()
    assert due_of(6, 2, ends=True) == {"saves", "evaluates", "saves_locally"}, "of updates 4 and 5"


def test_nothing_is_due_of_what_a_run_does_not_have() -> None:
    bare = dataclasses.replace(SCHEDULE, eval_interval=None, local_checkpoint_period=None)
    assert names(due_after(4, bare)) == set() and names(due_after(12, bare)) == {"saves"}


@pytest.mark.parametrize(
    ("step", "best", "expected"),
    [
        (4, BestEval(1.5, 4), {"evaluates", "saves_extra", "saves_locally"}),
        (8, BestEval(1.5, 4, 1), {"evaluates", "saves_locally"}),
        (8, BestEval(1.5, 4, 2), {"evaluates", "saves", "ends_early"}),
        (12, BestEval(1.5, 12), {"evaluates", "saves"}),
    ],
    ids=["the lowest loss", "no lower one", "patience is over", "the lowest loss is the last"],
)
def test_an_eval_saves_its_state_if_it_is_the_best_and_ends_a_run_that_no_longer_improves(
    step: int, best: BestEval, expected: set[str]
) -> None:
    assert names(SCHEDULE.after_eval(due_after(step), step, best)) == expected


@given(st.integers(1, 50), st.integers(1, 10), st.integers(1, 1000))
def test_something_is_due_once_per_period_at_the_first_end_of_a_batch(
    period: int, updates_per_batch: int, num_batches: int
) -> None:
    ends = [batch * updates_per_batch for batch in range(num_batches + 1)]
    due = [step for last, step in itertools.pairwise(ends) if is_due(period, last, step)]
    reached = range(period, ends[-1] + 1, period)
    assert due == sorted(
        {-(-multiple // updates_per_batch) * updates_per_batch for multiple in reached} & set(ends)
    )
    if updates_per_batch == 1:
        assert due == [step for step in ends[1:] if step % period == 0]
