"""The shares of an update in which sampling and training had work."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from maxbatch.rl.timeline import Timeline


def shares(**works: list[tuple[float, float]]) -> dict[str, float]:
    timeline = Timeline()
    for side, intervals in works.items():
        for interval in intervals:
            done: Future[tuple[float, float]] = Future()
            done.set_result(interval)
            timeline._intervals[side].append(done)
    return timeline.shares(10.0, 20.0)


def test_overlapping_works_count_once_and_only_within_the_stretch() -> None:
    found = shares(sampling=[(5, 12), (11, 13), (19, 25)], trainer=[(12, 16), (15, 18)])
    assert found == pytest.approx({"sampling": 0.4, "trainer": 0.6, "both": 0.1})


def test_one_side_alone_never_works_beside_another() -> None:
    assert shares(sampling=[(10, 20)]) == pytest.approx({"sampling": 1.0, "both": 0.0})
    assert shares(sampling=[(1, 2)], trainer=[(10, 20)])["both"] == 0
