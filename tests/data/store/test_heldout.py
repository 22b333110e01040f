from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import load_config
from maxbatch.data.store.heldout import HeldOutFraction, Records

FRACTIONS = st.fractions(min_value=0, max_value=Fraction(999, 1000), max_denominator=1000)


@given(fraction=FRACTIONS, records=st.integers(0, 300))
def test_the_closed_form_is_the_rule_record_by_record(fraction: Fraction, records: int) -> None:
    split = HeldOutFraction(fraction)
    held_out = [i for i in range(records) if floor((i + 1) * fraction) > floor(i * fraction)]
    training = [i for i in range(records) if i not in held_out]
    for expected, which in ((held_out, True), (training, False)):
        assert split.count(records, which) == len(expected)
        assert [split.record(number, which) for number in range(len(expected))] == expected
        if which is False or fraction:
            assert split.records(len(expected), which).tolist() == expected


def test_large_denominators_and_indices_stay_exact() -> None:
    split = HeldOutFraction.of(
        load_config(overrides=["eval_fraction=0.123456789012345"]).eval_fraction
    )
    assert split.fraction == Fraction(123456789012345, 10**15)
    number = 10**15
    index = split.record(number, False)
    assert split.count(index, False) == number and split.count(index + 1, False) == number + 1
    assert split.records(1000, True).tolist() == [split.record(i, True) for i in range(1000)]


@pytest.mark.parametrize("text", ["0.1", "1e-1"])
def test_a_tenth_means_one_tenth(text: str) -> None:
    split = HeldOutFraction.of(load_config(overrides=[f"eval_fraction={text}"]).eval_fraction)
    assert split.fraction == Fraction(1, 10)
    assert split.records(3, True).tolist() == [9, 19, 29]


@given(fraction=FRACTIONS, ends=st.tuples(st.integers(0, 300), st.integers(0, 300)).map(sorted))
def test_records_between_two_places_are_those_of_the_whole(
    fraction: Fraction, ends: list[int]
) -> None:
    begin, end = ends
    for held_out in (True, False) if fraction else (False,):
        records = Records(HeldOutFraction(fraction), 300, held_out)
        whole = records.between(0, 300).tolist()
        assert len(records) == len(whole) and records.are_all == (len(whole) == 300)
        assert records.between(begin, end).tolist() == [
            index for index in whole if begin <= index < end
        ]
