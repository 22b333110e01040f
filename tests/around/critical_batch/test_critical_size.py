"""Critical batch sizes from losses, and the schedule from critical batch sizes."""

from __future__ import annotations

import pytest

from maxbatch.around.critical_batch.critical_size import (
    Chunk,
    critical_batch,
    last_chunks,
    schedule,
    smoothed,
    standard_error,
)
from maxbatch.config.values import schedule_text
from maxbatch.plan.stages import parse_schedule

TOLERANCE = 0.01


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({4: 2.0, 8: 2.005, 16: 2.0099, 32: 2.02}, 16),
        # contiguous: what lies beyond a batch that fails does not count
        ({4: 2.0, 8: 2.02, 16: 2.0}, 4),
        ({4: 2.0, 8: 1.9, 16: 1.95, 32: 2.0}, 32),  # against the base, not against the best
        ({2: 1.995, 4: 2.0, 8: 2.02}, 4),
        ({4: 2.0, 8: None, 16: 2.0}, 4),
    ],
)
def test_the_critical_batch_is_the_largest_within_the_tolerance_of_the_base(losses, expected):
    assert critical_batch(losses, 4, TOLERANCE).batch_size == expected


def test_a_base_that_a_smaller_batch_beats_is_beyond_the_critical_batch():
    found = critical_batch({1: 1.8, 2: 1.805, 4: 2.0, 8: 2.0}, 4, TOLERANCE)
    assert found.batch_size == 2 and found.is_below_base and not found.is_at_most
    lowest = critical_batch({2: 1.9, 4: 2.0}, 4, TOLERANCE)
    assert lowest.batch_size == 2 and lowest.is_at_most
    diverged = critical_batch({2: 1.9, 4: None, 8: 1.9}, 4, TOLERANCE)
    assert diverged.batch_size == 2 and diverged.is_below_base


def test_a_bound_is_called_a_bound():
    assert critical_batch({4: 2.0, 8: 2.0}, 4, TOLERANCE).is_at_least
    assert not critical_batch({4: 2.0, 8: 2.5}, 4, TOLERANCE).is_at_least


def test_losses_are_compared_over_the_same_samples_weighted_by_tokens():
    def records(batch: int) -> list[dict]:
        return [
            {
                "samples_seen": s + batch,
                "loss": s / 100,
                "loss_weight": 10.0 * batch,
                "global_batch_size": batch,
            }
            for s in range(0, 64, batch)
        ]

    assert [chunk.weight for chunk in last_chunks(records(4), 32, 64, 8)] == [80.0] * 4
    assert smoothed(last_chunks(records(8), 32, 64, 16)) == pytest.approx((32 + 40 + 48 + 56) / 400)
    assert smoothed([Chunk(1.0, 1.0), Chunk(3.0, 3.0)]) == 2.5
    with pytest.raises(ValueError, match="do not cover"):
        last_chunks(records(8)[:-1], 32, 64, 16)
    lost = [*records(8)[:-1], {**records(8)[-1], "loss": None}]
    assert last_chunks(lost, 32, 64, 16) is None


def test_noise_that_branches_share_does_not_count():
    base = [Chunk(loss, 1.0) for loss in (1.0, 3.0, 2.0)]
    assert standard_error([Chunk(c.loss + 0.5, 1.0) for c in base], base) == pytest.approx(0)
    assert standard_error(base[:1], base[:1]) is None


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(100, 4), (400, 16)], "0:4 200:8 400:16"),  # log B over log s
        ([(100, 8), (400, 8)], "0:4 100:8"),
        ([(100, 4), (400, 4)], "0:4"),
        ([(100, 16), (400, 8), (900, 8)], "0:4 100:8"),  # no stage exceeds a later measurement
        ([(100, 2), (400, 8)], "0:4 400:8"),
        ([(100, 16)], "0:4 100:16"),
        ([(100, 12), (400, 12)], "0:4 100:8"),  # doublings alone
        ([(100, 4), (1000, 5), (2000, 8)], "0:4 2000:8"),
    ],
)
def test_the_batch_is_doubled_where_the_measured_critical_batch_allows_it(points, expected):
    text = schedule_text(schedule(points, 4))
    assert text == expected
    assert parse_schedule(text, 32)


def test_a_schedule_never_exceeds_what_was_measured_there_or_later():
    points = [(100, 8), (300, 32), (700, 8), (1500, 64), (4000, 64)]
    stages = schedule(points, 4)
    assert [batch for _, batch in stages] == sorted(batch for _, batch in stages)
    for position, measured in points:
        assert [batch for at, batch in stages if at <= position][-1] <= measured
