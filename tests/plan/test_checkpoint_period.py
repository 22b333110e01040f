"""The checkpoint period that a rate of failures asks for: Young's and Daly's formulas, and the
least cost.
"""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.cli import main
from maxbatch.plan.checkpoint_period import MeasuredTimes, daly, period_for, young

UNKNOWN = MeasuredTimes(None, None, None)


def test_youngs_and_dalys_periods_are_those_of_the_papers() -> None:
    """Daly 2006, section 5: with δ of 5 minutes and M of 6 hours the first-order period is 60
    minutes.
    """
    assert young(300, 6 * 3600) == 3600
    ratio = 300 / (2 * 6 * 3600)
    assert daly(300, 6 * 3600) == pytest.approx(3600 * (1 + math.sqrt(ratio) / 3 + ratio / 9) - 300)
    assert daly(100, 50) == 50, (
        "where failures come faster than checkpoints can be saved, Daly's period is M"
    )


@given(st.floats(0.1, 100), st.floats(1e4, 1e6))
def test_the_period_costs_nearly_the_least(save: float, between: float) -> None:
    """Expected wall time per useful second under exponential failures (Daly 2006, equation 21,
    without restarts).
    """

    def cost(period: float) -> float:
        return between / period * math.expm1((period + save) / between)

    best = daly(save, between)
    assert cost(best) <= min(cost(best * factor) for factor in (0.5, 0.8, 1.25, 2.0)) * 1.0001


def test_times_are_stated_measured_or_assumed_in_this_order() -> None:
    assumed = period_for(4, None, None, UNKNOWN)
    assert (assumed.save_seconds_source, assumed.checkpoint_period) == ("assumed", None)
    measured = period_for(4, None, None, MeasuredTimes(2.0, 0.5, 60.0))
    assert (measured.save_seconds, measured.save_seconds_source) == (2.0, "measured")
    assert measured.checkpoint_period == round(measured.daly_seconds / 0.5)
    stated = period_for(4, 3.0, 1.0, MeasuredTimes(2.0, 0.5, 60.0))
    assert (stated.save_seconds, stated.save_seconds_source, stated.step_seconds) == (
        3.0,
        "stated",
        1.0,
    )
    assert stated.lost_share == pytest.approx(3 / 363 + (180 + 60) / 21600, rel=0.01)


def test_plan_prints_the_checkpoint_period(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--failures-per-day", "4", "--step-seconds", "1"]
    assert main([*arguments, "--save-seconds", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpointing"]
    assert (found["young_seconds"], found["checkpoint_period"]) == (360, 358)
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert (
        "checkpoint period for 4 failures a day and 10 s per checkpoint (assumed): " in captured.out
    )
    assert "--save-seconds states it" in captured.err
