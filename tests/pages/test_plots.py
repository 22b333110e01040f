"""Figures: input of the plotting library, and content."""

from __future__ import annotations

from typing import Any

import pytest

from maxbatch.pages.plots import heat_map, loss_against_batch, metric_against_key
from tests.helpers.reports import CURVES, TRIALS

go = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed (pip install 'maxbatch[report]')")


@pytest.mark.parametrize(
    "figure",
    [
        loss_against_batch(CURVES),
        metric_against_key("learning_rate", "loss", TRIALS, True),
        metric_against_key("opt_type", "loss", [({"opt_type": "lion"}, 1.0, "trial 0")], False),
        heat_map(("global_batch_size", "learning_rate"), "loss", TRIALS),
    ],
)  # fmt: skip
def test_figures_are_what_the_plotting_library_takes(figure: Any) -> None:
    assert go.Figure({"data": figure.data, "layout": figure.layout}).data


def test_an_axis_of_one_value_shows_the_value() -> None:
    figure = metric_against_key("learning_rate", "loss", [({"learning_rate": "1e-3"}, 1.0, "trial 0")], True)
    assert figure.layout["xaxis"]["type"] == "category" and figure.data[0]["x"] == ["1e-3"]


def test_a_sweep_with_two_keys_joins_the_trials_that_share_the_other() -> None:
    figure = metric_against_key("learning_rate", "loss", TRIALS, True)
    assert [line["name"] for line in figure.data] == ["global_batch_size=8", "global_batch_size=16"]
    assert figure.data[0]["x"] == [0.001, 0.01] and figure.layout["xaxis"]["type"] == "log"
    heat = heat_map(("global_batch_size", "learning_rate"), "loss", TRIALS).data[0]
    assert heat["z"] == [[8.001, 16.001], [8.01, 16.01]]


def test_a_line_of_the_critical_batch_marks_the_tolerance_and_the_largest_batch_within_it() -> None:
    lines = loss_against_batch(CURVES).data
    assert [line["y"] for line in lines if line["mode"] == "lines"] == [[3.05, 3.05], [2.55, 2.55]]
    assert [(line["x"], line["y"]) for line in lines if line["mode"] == "markers"] == [([16], [3.01])]
