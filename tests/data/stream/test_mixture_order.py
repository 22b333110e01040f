from __future__ import annotations

import pickle
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch.data.stream import mixture_order as module
from maxbatch.data.stream.mixture_order import WINDOW, WeightedOrder

BIG = 10**12


def weights_of(shares: list[int]) -> list[Fraction]:
    return [Fraction(share, sum(shares)) for share in shares]


WEIGHTS = st.one_of(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    # Shares of which most are below one in a thousand, or next to a whole number of slots.
    st.lists(st.sampled_from([1, 3, 999, 1001, 10**5 - 1, 10**6]), min_size=2, max_size=40),
).map(weights_of)


def assert_every_window_is_within_one(weights: list[Fraction], source_n: np.ndarray) -> None:
    for source, weight in enumerate(weights):
        before = np.concatenate([[0], np.cumsum(source_n == source)])
        counts = before[WINDOW:] - before[:-WINDOW]
        assert counts.min() > WINDOW * weight - 1 and counts.max() < WINDOW * weight + 1


@settings(max_examples=150)
@given(weights=WEIGHTS, block=st.integers(0, BIG))
def test_every_window_of_1000_has_each_source_within_one_of_its_share(weights, block) -> None:
    order = WeightedOrder(weights)
    start = block * WINDOW
    for first in (0, start):
        source_n = order.at(range(first, first + 6 * WINDOW)).source_n
        assert_every_window_is_within_one(weights, source_n)


@pytest.mark.parametrize(
    "shares",
    [
        [1, 1],
        [1, 2],
        [7, 3],
        [1, 1, 1],
        [9999, 1],
        [1, 3, 5, 7, 11, 13],
        [6, 6, 6, 981],
        [1] * 17,
        [1] * 1700,
    ],
)
def test_every_window_holds_over_a_whole_period(shares: list[int]) -> None:
    weights = weights_of(shares)
    order = WeightedOrder(weights)
    blocks = min(order._steps, 40) + 2
    assert_every_window_is_within_one(weights, order.at(range(blocks * WINDOW)).source_n)


@pytest.mark.parametrize("shares", [[1, 1], [1, 2], [7, 3], [1, 3, 5, 7, 11], [2, 5, 10**4 + 1]])
def test_shares_are_exact_in_the_long_run(shares: list[int]) -> None:
    weights = weights_of(shares)
    period = WINDOW * WeightedOrder(weights)._steps
    for turns in (1, 7, 10**9):
        assert WeightedOrder(weights).counts(turns * period) == [
            turns * period * weight for weight in weights
        ]


@given(weights=WEIGHTS, position=st.integers(0, 4000))
def test_counts_are_what_counting_gives(weights, position) -> None:
    order = WeightedOrder(weights)
    source_n = order.at(range(position)).source_n
    assert order.counts(position) == np.bincount(source_n, minlength=len(weights)).tolist()


@settings(max_examples=40)
@given(weights=WEIGHTS, first=st.integers(0, 10**30), step=st.integers(0, 3000))
def test_places_are_counts_at_any_index(weights, first, step) -> None:
    order = WeightedOrder(weights)
    source_n, place_n = order.at([first, first + step])
    for index, source, place in zip((first, first + step), source_n, place_n, strict=True):
        assert order.counts(index)[source] == place
        after = order.counts(index + 1)
        assert after[source] == place + 1 and sum(after) == index + 1


@pytest.mark.parametrize("first", [0, 999, BIG - 7, 2**31 - 3, 2**62, 2**63 - 500, 10**30])
def test_places_of_a_source_follow_each_other(first: int) -> None:
    order = WeightedOrder(weights_of([5, 1, 13]))
    source_n, place_n = order.at(range(first, first + 2500))
    for source in range(3):
        places = place_n[source_n == source].tolist()
        assert places == list(
            range(order.counts(first)[source], order.counts(first + 2500)[source])
        )


def test_indices_in_any_order_have_the_same_origins() -> None:
    order = WeightedOrder(weights_of([5, 1, 13]))
    indices = np.random.default_rng(0).integers(0, 10_000, 300)
    in_order, mixed = order.at(range(10_000)), order.at(indices)
    assert np.array_equal(mixed.source_n, in_order.source_n[indices])
    assert np.array_equal(mixed.place_n, in_order.place_n[indices])
    assert order.at([]).source_n.tolist() == []


@given(weights=st.lists(st.integers(1, 10**6), min_size=2, max_size=8).map(weights_of))
def test_the_count_of_any_first_samples_stays_near_its_share(weights) -> None:
    order = WeightedOrder(weights)
    widest = max(WINDOW * weight % 1 for weight in weights)
    for block in (1, 10, 100, 1000, 12345, 10**6, BIG):
        for count, weight in zip(order.counts(block * WINDOW), weights, strict=True):
            assert abs(count - block * WINDOW * weight) < 10 + 1 / (1 - widest)


def test_short_stretches_hold_every_source() -> None:
    source_n = WeightedOrder(weights_of([6, 3, 1])).at(range(4 * WINDOW)).source_n
    for start in range(0, 4 * WINDOW - 50):
        counts = np.bincount(source_n[start : start + 50], minlength=3)
        assert np.all(np.abs(counts - [30, 15, 5]) <= 3)


def test_far_samples_cost_what_near_ones_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of([123456, 654321, 999983])

    def rounds_and_bytes(index: int) -> tuple[int, int]:
        rounds = 0

        def counted(a: int, b: int) -> tuple[int, int]:
            nonlocal rounds
            rounds += 1
            return divmod(a, b)

        order = WeightedOrder(weights)
        monkeypatch.setattr(module, "divmod", counted, raising=False)
        tracemalloc.start()
        order.at(range(index, index + 16))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return rounds, peak

    near, far = (
        rounds_and_bytes(10 * WINDOW),
        [rounds_and_bytes(index) for index in (10**9, BIG, 10**18)],
    )
    # Euclid's algorithm takes more rounds with more blocks, but never more than the digits of q
    # allow.
    assert all(rounds < 6 * 3 * 3 * 30 and peak < 2 * near[1] + 4096 for rounds, peak in far)


def test_a_pickled_order_is_its_weights() -> None:
    order = WeightedOrder(weights_of([5, 1, 13]))
    order.at(range(3000))
    pickled = pickle.dumps(order)
    assert len(pickled) < 1000
    assert np.array_equal(
        pickle.loads(pickled).at(range(3000)).source_n, order.at(range(3000)).source_n
    )


@pytest.mark.parametrize("weights", [[Fraction(1, 2)], [Fraction(3, 2), Fraction(-1, 2)], [1, 0]])
def test_weights_that_are_none_are_refused(weights) -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        WeightedOrder(weights)
