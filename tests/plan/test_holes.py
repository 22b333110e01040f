"""Holes agree with a list that leaves the samples out, in both directions."""

from __future__ import annotations

import pickle
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import BatchPlan, ConfigError
from maxbatch.plan.holes import NO_HOLES, Holes
from maxbatch.plan.skip_samples import holes_of
from tests.helpers.tiny import LENGTH, tiny_config

END = 60
RANGES = st.lists(
    st.tuples(st.integers(0, END - 1), st.integers(1, 12)).map(
        lambda begin_and_size: (begin_and_size[0], sum(begin_and_size))
    ),
    max_size=8,
)


def kept(ranges: list[tuple[int, int]], end: int = 2 * END) -> list[int]:
    return [own for own in range(end) if not any(a <= own < b for a, b in ranges)]


def stated(text: str, *overrides: str) -> Holes:
    return holes_of(tiny_config(f"skip_samples={text}", *overrides).plan)


@given(RANGES)
def test_own_numbers_are_those_of_the_list(ranges: list[tuple[int, int]]) -> None:
    holes, left = Holes(ranges), kept(ranges)
    assert holes.own_numbers(range(len(left))) == left
    for own in range(2 * END):
        assert holes.kept_before(own) == sum(number < own for number in left)
        assert (own in holes) == (own not in left)
    for seen in range(len(left)):
        assert holes.position_after(seen) == (left[seen - 1] + 1 if seen else 0)
    far = 10**30  # own numbers have no bound
    assert holes.kept_before(holes.own_number(far)) == far


@given(RANGES)
def test_touching_and_overlapping_ranges_are_merged(ranges: list[tuple[int, int]]) -> None:
    merged = list(Holes(ranges))
    assert all(hole.end < after.first for hole, after in pairwise(merged))
    assert Holes(reversed(merged)) == Holes(ranges) and len(Holes(ranges)) == len(merged)
    assert Holes(ranges).digest == Holes(merged).digest
    assert pickle.loads(pickle.dumps(Holes(ranges))) == Holes(ranges)


@given(RANGES, st.integers(0, END), st.integers(0, END))
def test_holes_are_cut_at_own_numbers(ranges: list[tuple[int, int]], own: int, other: int) -> None:
    holes, left = Holes(ranges), kept(ranges)
    behind, ahead = holes.before(own), holes.ahead_of(own)
    assert [n for n in range(2 * END) if n in behind] == [n for n in range(own) if n not in left]
    assert [n for n in range(2 * END) if n in ahead] == [
        n for n in range(own, 2 * END) if n not in left
    ]
    assert behind.merged_with(ahead) == holes
    assert [*holes.overlapping(own, other)] == [
        hole for hole in holes if hole.first < other and hole.end > own
    ]
    if own in left:
        assert behind.own_numbers(range(left.index(own))) == left[: left.index(own)]


def test_without_holes_both_numbers_are_one() -> None:
    assert stated("") is NO_HOLES and not NO_HOLES and not NO_HOLES.digest
    assert NO_HOLES.own_number(7) == NO_HOLES.kept_before(7) == NO_HOLES.position_after(7) == 7


def test_ranges_are_counts_of_samples_or_of_tokens_in_whole_rows() -> None:
    assert [*stated("1.2M:1.3M 5M:5.01M")] == [(1_200_000, 1_300_000), (5_000_000, 5_010_000)]
    assert [*stated("3:4, 7:9,5:6")] == [(3, 4), (5, 6), (7, 9)]
    assert [*stated(f"{2 * LENGTH}t:1Mit")] == [(2, 2**20 // LENGTH)]
    assert [*stated(f"{2 * LENGTH}t:{4 * LENGTH}t", "use_dpo=true", "dataset_type=jsonl")] == [
        (1, 2)
    ]


def test_prompts_are_left_out_by_their_number() -> None:
    assert [*stated("32:64", "batch_size=2", "dataset_type=arithmetic")] == [(32, 64)]


@pytest.mark.parametrize(
    "content",
    ["5:9\n1:3", "5:9\n1:3\n", "\n1:3\n\n 5:9\n", "1:2\r\n2:3\r\n5:9\r\n", "160t:288t\n1:3"],
)
def test_a_file_holds_one_range_a_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "holes.txt").write_bytes(content.encode())
    assert stated(f"{tmp_path}/holes.txt") == Holes([(1, 3), (5, 9)])


def test_a_file_of_other_bytes_is_named(tmp_path: Path) -> None:
    (tmp_path / "holes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="this one is no text"):
        stated(f"{tmp_path}/holes.txt")


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "holes.txt"
    for number in range(3):
        file.write_text(f"{number}:9\n")
        assert [*stated(str(file))] == [(number, 9)]


def test_a_million_holes_are_read_in_a_second(tmp_path: Path) -> None:
    file = tmp_path / "holes.txt"
    file.write_text("".join(f"{10 * number}:{10 * number + 3}\n" for number in range(10**6)))
    config = tiny_config(f"skip_samples={file}").plan
    started = time.process_time()
    holes = holes_of(config)
    assert time.process_time() - started < 1
    started = time.process_time()
    assert [holes.own_number(n) for n in (0, 6, 7, 7 * 10**6 - 1)] == [3, 9, 13, 10**7 - 1]
    assert holes.kept_before(10**7) == 7 * 10**6 and holes_of(config) is holes
    assert time.process_time() - started < 0.1


def test_a_length_in_epochs_ends_with_its_own_number() -> None:
    def plan(*overrides: str) -> BatchPlan:
        config = tiny_config("skip_samples=90:120 180:500", "per_device_batch_size=8", *overrides)
        return BatchPlan.from_config(config, 1, samples_per_epoch=100)

    epochs = plan("num_epochs=2")
    assert (epochs.total_samples, epochs.total_steps) == (150, 19)
    assert (epochs.epochs, epochs.samples_left_out) == (1.8, 30)
    assert plan("num_epochs=0.95").total_samples == 90
    assert plan("num_epochs=6").samples_left_out == 350
    samples = plan("train_samples=150")
    assert (samples.total_samples, samples.epochs) == (150, 1.8)
    assert plan("steps=10").total_samples == 80
    assert BatchPlan.from_config(tiny_config("skip_samples=3:9")).samples_left_out == 6
