"""Decays that are stated in tokens follow the batch of each update."""

from __future__ import annotations

import json

import pytest

from maxbatch import BatchPlan, RampupBatchManager, load_config
from maxbatch.cli import main
from maxbatch.plan.update_settings import UpdatePlan, UpdateSettings

RAMP = (
    "batch_size_schedule=0:64 10000:128",
    "max_target_length=256",
    "train_samples=20000",
    "learning_rate=0.001",
)
IN_TOKENS = ("adam_b1_half_life=100Kt", "adam_b2_half_life=2Mt", "weight_decay_timescale=1.0run")


def planned(*overrides: str) -> UpdatePlan:
    config = load_config(overrides=list(overrides)).plan
    return UpdatePlan.from_config(config, RampupBatchManager.from_config(config))


def settings_at(samples_seen: int, *overrides: str) -> UpdateSettings:
    return planned(*overrides).at(samples_seen)


def test_each_stage_has_the_decays_of_its_batch() -> None:
    stages = BatchPlan.from_config(
        load_config(overrides=[*RAMP, *IN_TOKENS]), num_devices=4
    ).to_dict()["stages"]
    for stage, batch in zip(stages, (64, 128), strict=True):
        tokens = batch * 256
        assert stage["adam_b1"] == pytest.approx(0.5 ** (tokens / 1e5), rel=1e-12)
        assert stage["adam_b2"] == pytest.approx(0.5 ** (tokens / 2e6), rel=1e-12)
        assert stage["adam_weight_decay"] == pytest.approx(
            tokens / (20000 * 256 * 0.001), rel=1e-12
        )


def test_the_average_of_the_parameters_follows_the_batch() -> None:
    stated = (*RAMP, "parameter_average_half_life=3Mt")
    stages = BatchPlan.from_config(load_config(overrides=list(stated)), num_devices=4).to_dict()[
        "stages"
    ]
    wanted = [pytest.approx(0.5 ** (batch * 256 / 3e6), rel=1e-12) for batch in (64, 128)]
    assert [stage["parameter_average"] for stage in stages] == wanted
    assert settings_at(19968, *stated).average_halvings == pytest.approx(32 * 256 / 3e6, rel=1e-12)
    assert settings_at(0, *RAMP).average_halvings == 0
    stages = BatchPlan.from_config(load_config(overrides=list(RAMP))).to_dict()["stages"]
    assert [stage["parameter_average"] for stage in stages] == [None, None]


def test_the_weight_decay_goes_by_the_peak_rate_of_its_stage() -> None:
    scaled = (*RAMP, "learning_rate_scaling=sqrt", "weight_decay_timescale=5Mt")
    plan = planned(*scaled)
    assert plan.at(0).adam_weight_decay == pytest.approx(
        64 * 256 / (5e6 * 0.001 * 0.5**0.5), rel=1e-12
    )
    assert plan.at(15000).adam_weight_decay == pytest.approx(128 * 256 / (5e6 * 0.001), rel=1e-12)


def test_what_is_stated_per_update_stays_as_it_is() -> None:
    stages = BatchPlan.from_config(load_config(overrides=list(RAMP))).to_dict()["stages"]
    assert {(s["adam_b1"], s["adam_b2"], s["adam_weight_decay"]) for s in stages} == {
        (0.9, 0.95, 0.1)
    }


def test_tokens_of_an_update_are_those_of_its_real_rows() -> None:
    """The last update of 20,000 samples has 32 rows; a half-life may be a fraction of a token."""
    first, last = (settings_at(s, *RAMP, "adam_b1_half_life=6725.5t") for s in (0, 19968))
    assert first.adam_b1_halvings == pytest.approx(64 * 256 / 6725.5, rel=1e-12)
    assert last.adam_b1_halvings == pytest.approx(32 * 256 / 6725.5, rel=1e-12)


def test_a_higher_layer_displaces_the_other_statement_of_a_lower_one(tmp_path) -> None:
    (tmp_path / "run.yml").write_text("adam_b2_half_life: 2Mt\nadam_weight_decay: 0.3\n")
    config = load_config(tmp_path / "run.yml", ["adam_b2=0.99", "weight_decay_timescale=1Bt"])
    assert (config.adam_b2, config.adam_b2_half_life) == (0.99, None)
    assert (config.adam_weight_decay, config.weight_decay_timescale) == (None, "1Bt")


def test_plan_prints_the_decays_of_each_stage_where_they_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *RAMP, *IN_TOKENS]) == 0
    assert "0.8926" in capsys.readouterr().out  # b1 of the first stage
    assert main(["plan", *RAMP]) == 0
    assert "b1" not in capsys.readouterr().out
    assert (
        main(
            [
                "plan",
                "--json",
                "dataset_type=jsonl",
                "dataset_path=a.jsonl",
                "num_epochs=2",
                IN_TOKENS[2],
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["stages"][0]["adam_weight_decay"] is None
