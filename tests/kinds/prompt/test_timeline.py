"""The shares of an update in which sampling and training had work."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from maxbatch.kinds.prompt.timeline import Timeline, Work


def shares(**works: list[tuple[float, float | None]]) -> dict[str, float]:
    timeline = Timeline()
    for side, intervals in works.items():
        for dispatched, ended in intervals:
            done: Future[float] = Future()
            if ended is not None:
                done.set_result(ended)
            timeline._works[side].append(Work(dispatched, done))
    return timeline.shares(10.0, 20.0)


def test_overlapping_works_count_once_and_only_within_the_stretch() -> None:
    found = shares(sampling=[(5, 12), (11, 13), (19, 25)], trainer=[(12, 16), (15, 18)])
    assert found == pytest.approx({"sampling": 0.4, "trainer": 0.6, "both": 0.1})


def test_work_that_goes_on_counts_up_to_now_and_stays() -> None:
    assert shares(sampling=[(15, None)], trainer=[(10, 20)])["both"] == 0.5


def test_one_side_alone_never_works_beside_another() -> None:
    assert shares(sampling=[(10, 20)]) == pytest.approx({"sampling": 1.0, "both": 0.0})
    assert shares(sampling=[(1, 2)], trainer=[(10, 20)])["both"] == 0
