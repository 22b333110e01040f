"""The values of swept keys: lists and ranges."""

from __future__ import annotations

from fractions import Fraction

import pytest

from maxbatch.around.sweep.space import Choices, Range
from maxbatch.config.sections import KEYS


def test_a_grid_with_a_step_is_exact() -> None:
    key = KEYS["warmup_steps_fraction"]
    assert Range.read(key, "0", "0.3", False, "0.1").grid() == ["0.0", "0.1", "0.2", "0.3"]
    assert Range.read(KEYS["steps"], "2", "9", False, "3").grid() == ["2", "5", "8"]
    assert Range.read(key, "0", "1", False, "0.25").step == Fraction(1, 4)


@pytest.mark.parametrize(
    ("name", "texts", "is_log"),
    [
        ("global_batch_size", ["8", "16", "32"], True),
        ("learning_rate", ["1e-3", "3e-3", "1e-2"], True),
        ("steps", ["1", "2", "3"], False),
        ("opt_type", ["adamw", "lion", "sgd"], False),
        ("global_batch_size", ["null", "16", "32"], False),
    ],
)
def test_lists_that_grow_by_a_ratio_are_drawn_on_a_logarithmic_axis(
    name: str, texts: list[str], is_log: bool
) -> None:
    assert Choices.read(KEYS[name], [(text, True) for text in texts]).is_log == is_log
