"""Packs random sets of lengths and checks what `max_tokens_per_pass` promises of them.

python -m tests.programs.passes --sets 10000 --seed 1
"""

from __future__ import annotations

import argparse

import numpy as np

from maxbatch.data.feed.passes import Passes


def some_lengths(rng: np.random.Generator, samples: int, most: int) -> np.ndarray:
    """Lengths as in real data: log-normal, a tenth at the limit."""
    lengths = np.clip(rng.lognormal(np.log(most / 8), 0.9, samples).astype(np.int64), 1, most)
    return np.where(rng.random(samples) < 0.1, most, lengths)


def check_passes(lengths: np.ndarray, row_length: int, rows_per_pass: int) -> None:
    """Raises AssertionError if a sample is lost or doubled, or a row or a pass is over its size."""
    passes = Passes.of(lengths, row_length, rows_per_pass)
    slots = np.zeros((passes.num_passes * rows_per_pass, row_length), np.int64)
    for row, begin, length in zip(passes.row_P, passes.begin_P, lengths, strict=True):
        assert begin >= 0 and begin + length <= row_length and 0 <= row < max(1, passes.num_rows)
        if length:
            slots[row, begin : begin + length] += 1
    assert slots.max(initial=0) <= 1 and slots.sum() == lengths.sum()
    # rows are filled from the left, and those without a token are behind all others
    assert (np.diff(slots, axis=1) <= 0).all()
    assert slots[: passes.num_rows].any(axis=1).all() and not slots[passes.num_rows :].any()
    again = Passes.of(lengths.tolist(), row_length, rows_per_pass)
    assert all(map(np.array_equal, passes, again))


def check_passes_of_pairs(lengths: np.ndarray, row_length: int, rows_per_pass: int) -> None:
    """Raises AssertionError if one is lost, doubled or in two passes, or a row is over its size.

    Args:
      lengths: of both answers, [S, 2].
    """
    passes = Passes.of(lengths, row_length, rows_per_pass)
    slots = np.zeros((passes.num_passes * rows_per_pass, row_length), np.int64)
    for row, begin, length in zip(passes.row_P, passes.begin_P, lengths.reshape(-1), strict=True):
        assert begin >= 0 and begin + length <= row_length
        slots[row, begin : begin + length] += 1
    assert slots.max(initial=0) <= 1 and slots.sum() == lengths.sum()
    in_pass = passes.row_P.reshape(-1, 2) // rows_per_pass
    assert (in_pass[:, 0] == in_pass[:, 1]).all()
    assert passes.num_passes <= -(-len(lengths) // (rows_per_pass // 2))
    ids = in_pass.reshape(-1) * (2 * len(lengths) + 1) + passes.number_P
    assert len(np.unique(ids)) == len(ids)


def check_rows_of_any_pass(lengths: np.ndarray, row_length: int, rows_per_sample: int) -> None:
    """Raises AssertionError if rows that hold samples whole depend on the size of a pass."""
    few, many = (
        Passes.of(lengths, row_length, rows, rows_together=rows_per_sample)
        for rows in (rows_per_sample, 6 * rows_per_sample)
    )
    assert all(map(np.array_equal, few, many._replace(rows_per_pass=rows_per_sample)))
    together = few.row_P.reshape(-1, rows_per_sample) // rows_per_sample
    assert (together == together[:, :1]).all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    for _ in range(args.sets):
        most, samples = int(rng.integers(1, 2048)), int(rng.integers(1, 300))
        lengths = some_lengths(rng, samples, most)
        if rng.random() < 0.3:
            lengths = rng.integers(0, most + 1, samples)
        check_passes(lengths, most, int(rng.integers(1, 65)))
    print(f"{args.sets:,} sets of lengths: every sample once, whole, within rows and passes")


if __name__ == "__main__":
    main()
