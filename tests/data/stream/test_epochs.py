"""The order of rows, epoch after epoch."""

from __future__ import annotations

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.data.stream.epochs import EpochOrder, check_indices

DATA = load_config().stream


def test_every_epoch_is_another_permutation_of_all_rows() -> None:
    order = EpochOrder.of(DATA, 50, "content")
    epochs = [[order.place(index) for index in range(50 * e, 50 * e + 50)] for e in range(2)]
    rows = [[place.row for place in epoch] for epoch in epochs]
    assert [{place.epoch for place in epoch} for epoch in epochs] == [{0}, {1}]
    assert all(sorted(epoch) == list(range(50)) for epoch in rows)
    assert rows[0] != rows[1] and list(range(50)) not in rows


def test_rows_without_a_shuffle_are_in_order() -> None:
    unshuffled = load_config(overrides=["enable_data_shuffling=false"]).stream
    assert EpochOrder.of(unshuffled, 3, "content") == EpochOrder(3)
    assert [tuple(EpochOrder(3).place(index)) for index in (2, 3)] == [(0, 2, None), (1, 0, None)]


def test_an_epoch_of_more_rows_than_can_be_permuted_is_refused() -> None:
    EpochOrder.of(DATA, 1 << 32, "content")
    with pytest.raises(ConfigError, match=r"at most 4294967296 .* enable_data_shuffling=false"):
        EpochOrder.of(DATA, (1 << 32) + 1, "content")


@pytest.mark.parametrize(
    ("first", "end", "length", "rest"),
    [(-1, 0, None, ""), (-1, 0, 5, " to 4"), (4, 6, 5, " to 4"), (3, 2, None, "")],
)
def test_an_index_outside_is_refused_with_those_that_there_are(
    first: int, end: int, length: int | None, rest: str
) -> None:
    check_indices("rows are", 0, 5, length)
    with pytest.raises(IndexError, match=f"^rows are from 0{rest}$"):
        check_indices("rows are", first, end, length)
