"""Figures: what they draw."""

from __future__ import annotations

from maxbatch.around.pages.plots import heat_map, loss_against_batch, metric_against_key
from tests.helpers.reports import CURVES, TRIALS


def test_an_axis_of_one_value_shows_the_value() -> None:
    figure = metric_against_key(
        "learning_rate", "loss", [({"learning_rate": "1e-3"}, 1.0, "trial 0")], True
    )
    assert (figure.x.kind, figure.x.categories, figure.series[0].x) == (
        "category",
        ("1e-3",),
        ["1e-3"],
    )


def test_a_sweep_with_two_keys_joins_the_trials_that_share_the_other() -> None:
    figure = metric_against_key("learning_rate", "loss", TRIALS, True)
    assert [line.name for line in figure.series] == ["global_batch_size=8", "global_batch_size=16"]
    assert figure.series[0].x == [0.001, 0.01] and figure.x.kind == "log"
    heat = heat_map(("global_batch_size", "learning_rate"), "loss", TRIALS).heat_map
    assert heat is not None and heat.values_YxX == [[8.001, 16.001], [8.01, 16.01]]


def test_a_line_of_the_critical_batch_marks_the_tolerance_and_the_largest_batch_within_it() -> None:
    lines = loss_against_batch(CURVES).series
    assert [line.y for line in lines if line.style == "dotted"] == [[3.05, 3.05], [2.55, 2.55]]
    assert [(line.x, line.y) for line in lines if line.style == "rings"] == [([16], [3.01])]


def test_sampled_values_have_no_line_and_no_legend_of_their_own() -> None:
    rates = [f"{0.001 * 1.37**i:.6g}" for i in range(8)]
    trials = [
        (
            {"learning_rate": rate, "global_batch_size": str(8 * (1 + i % 2))},
            2.0 + i / 10,
            f"trial {i}",
        )
        for i, rate in enumerate(rates)
    ]
    by_batch = metric_against_key("global_batch_size", "loss", trials, False)
    assert [(line.name, line.style) for line in by_batch.series] == [("", "dots")]
    by_rate = metric_against_key("learning_rate", "loss", trials, True)
    assert [line.name for line in by_rate.series] == ["global_batch_size=8", "global_batch_size=16"]
    assert {line.style for line in by_rate.series} == {"dots"}, (
        "sampled rates do not compare the batches"
    )


def test_a_critical_batch_has_bars_of_its_standard_errors() -> None:
    curve = CURVES[0]._replace(errors=[None, *[0.01] * (len(CURVES[0].batch_sizes) - 1)])
    figure = loss_against_batch([curve])
    assert figure.series[0].errors == curve.errors and "one standard error" in figure.note
    assert "± 0.0100" in figure.series[0].texts[-1]
    assert "one standard error" not in loss_against_batch(CURVES).note
