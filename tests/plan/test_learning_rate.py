"""The learning rate over samples: optax's per-step schedules where there is no ramp, undistorted
where there is.
"""

from __future__ import annotations

import math

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import ConfigError, RampupBatchManager, load_config
from maxbatch.plan.learning_rate import LearningRate


def rate_of(*overrides: str, num_devices: int = 1, **keywords: int) -> LearningRate:
    config = load_config(overrides=overrides)
    return LearningRate.from_config(
        config, RampupBatchManager.from_config(config, num_devices, **keywords)
    )


def assert_follows(rate: LearningRate, schedule: optax.Schedule, steps: int) -> None:
    batch = rate.manager.batch_size_at(0)
    expected = [float(schedule(step)) for step in range(steps + 1)]
    assert [rate.at(step * batch) for step in range(steps + 1)] == pytest.approx(
        expected, rel=2e-5, abs=1e-9
    )


@pytest.mark.parametrize(("warmup", "final"), [(0.1, 0.1), (0.0, 0.0), (0.5, 0.3)])
def test_cosine_is_optaxs(warmup: float, final: float) -> None:
    rate = rate_of(
        "steps=60", f"warmup_steps_fraction={warmup}", f"learning_rate_final_fraction={final}"
    )
    init = 0.0 if warmup else 3e-3
    assert_follows(
        rate, optax.warmup_cosine_decay_schedule(init, 3e-3, int(60 * warmup), 60, 3e-3 * final), 60
    )


def test_wsd_is_a_warmup_a_plateau_and_a_linear_decay() -> None:
    rate = rate_of("steps=60", "learning_rate_schedule=wsd", "wsd_decay_steps_fraction=0.2")
    pieces = [
        optax.linear_schedule(0, 3e-3, 6),
        optax.constant_schedule(3e-3),
        optax.linear_schedule(3e-3, 3e-4, 12),
    ]
    assert_follows(rate, optax.join_schedules(pieces, [6, 48]), 60)


def test_constant_is_a_warmup_and_a_plateau() -> None:
    rate = rate_of("steps=60", "learning_rate_schedule=constant")
    assert_follows(
        rate,
        optax.join_schedules(
            [optax.linear_schedule(0, 3e-3, 6), optax.constant_schedule(3e-3)], [6]
        ),
        60,
    )


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_the_rate_at_a_position_does_not_depend_on_the_ramp(schedule: str) -> None:
    common = ("train_samples=4000", f"learning_rate_schedule={schedule}")
    constant, ramped = rate_of(*common), rate_of(*common, "enable_rampup_batch_size=true")
    assert [constant.at(s) for s in range(0, 4001, 7)] == [ramped.at(s) for s in range(0, 4001, 7)]


def test_a_rate_takes_arrays_of_positions() -> None:
    rate = LearningRate.from_config(load_config(overrides=["steps=10"]))
    positions = np.arange(6).reshape(2, 3) * 16
    assert rate(positions).shape == (2, 3)
    assert rate(positions).tolist() == [
        [rate(int(position)) for position in row] for row in positions
    ]
    assert rate(np.int64(32)) == rate(32)


def test_the_scale_multiplies_stage_by_stage() -> None:
    overrides = (
        "enable_rampup_batch_size=true",
        "learning_rate_schedule=constant",
        "warmup_steps_fraction=0",
    )
    rate = rate_of(*overrides, "learning_rate_scaling=sqrt")
    assert [rate.at(s) for s in (0, 200, 500, 10**6)] == pytest.approx(
        [3e-3 * math.sqrt(b / 16) for b in (4, 8, 16, 16)]
    )


def test_a_resume_evaluates_the_rate_over_the_anchor_plus_the_rest() -> None:
    config = load_config(overrides=["steps=100", "warmup_steps_fraction=0"])
    manager = RampupBatchManager.from_state(config, {"step": 50, "samples_seen": 800}, 2)
    rate = LearningRate.from_config(config, manager)
    assert manager.total_samples == rate.total_samples == 800 + 50 * 32
    assert rate.at(1200) == pytest.approx(3e-3 * 0.55)


def test_the_rate_stays_at_its_last_value_behind_the_end() -> None:
    for schedule in ("cosine", "wsd"):
        rate = rate_of("steps=10", f"learning_rate_schedule={schedule}")
        assert rate.at(160) == rate.at(1600) == pytest.approx(3e-4)


def test_degenerate_fractions_are_no_division_by_zero() -> None:
    assert rate_of("warmup_steps_fraction=1").at(4800) == pytest.approx(3e-3)
    wsd = rate_of(
        "learning_rate_schedule=wsd", "warmup_steps_fraction=0", "wsd_decay_steps_fraction=0"
    )
    assert wsd.at(0) == wsd.at(4799) == 3e-3


def test_an_unknown_length_is_an_error_only_where_the_rate_needs_it() -> None:
    with pytest.raises(
        ConfigError, match="num_epochs=2: learning_rate_schedule=cosine needs the run's length"
    ):
        rate_of("num_epochs=2")
    constant = ("num_epochs=2", "learning_rate_schedule=constant", "warmup_steps_fraction=0")
    assert rate_of(*constant).at(10**9) == 3e-3
    assert rate_of("num_epochs=2", samples_per_epoch=80).total_samples == 160


LENGTHS = ("steps", "train_samples", "train_tokens", "num_epochs")
SAMPLES_PER_EPOCH = 1700


@st.composite
def ramps(draw: st.DrawFn) -> tuple[tuple[str, ...], int]:
    """Overrides that state a ramp, by its keys or as a schedule, decreases included, and the
    devices it is for.
    """
    devices, steps = draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, 3))
    if draw(st.booleans()):
        start, rise, stages = (
            draw(st.integers(1, 4)),
            draw(st.integers(1, 4)),
            draw(st.integers(1, 4)),
        )
        return (
            "enable_rampup_batch_size=true",
            f"gradient_accumulation_steps={steps}",
            f"per_device_batch_size_start={start}",
            f"per_device_batch_size_increment={rise}",
            f"per_device_batch_size={start + stages * rise}",
            f"global_rampup_samples={draw(st.integers(1, 3000))}",
        ), devices
    thresholds = sorted(draw(st.sets(st.integers(1, 3000), max_size=4)))
    pairs = [f"{t}:{devices * draw(st.integers(1, 12))}" for t in (0, *thresholds)]
    return (f"batch_size_schedule={' '.join(pairs)}",), devices


@st.composite
def lengths(draw: st.DrawFn) -> str:
    key = draw(st.sampled_from(LENGTHS))
    most = {"steps": 400, "train_samples": 5000, "train_tokens": 5000 * 256, "num_epochs": 3}[key]
    return f"{key}={draw(st.integers(1, most))}"


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, ...]:
    warmup, decay = draw(st.sampled_from(((0, 0.1), (0.01, 0), (0.1, 0.1), (0.5, 0.4), (1, 0))))
    return (
        f"learning_rate_schedule={draw(st.sampled_from(('cosine', 'wsd', 'constant')))}",
        f"warmup_steps_fraction={warmup}",
        f"wsd_decay_steps_fraction={decay}",
    )


def every_position(rate: LearningRate) -> range:
    """All positions of a short run, hundreds of a long one, some behind its end among them."""
    return range(0, rate.total_samples + 20, max(1, rate.total_samples // 500))


@given(ramps(), lengths(), shapes())
def test_with_a_ramp_the_rate_at_every_sample_is_that_of_the_run_without_one(
    ramp: tuple[tuple[str, ...], int], length: str, shape: tuple[str, ...]
) -> None:
    """Whatever states the length: the run without a ramp has the same samples."""
    overrides, devices = ramp
    ramped = rate_of(
        *overrides, length, *shape, num_devices=devices, samples_per_epoch=SAMPLES_PER_EPOCH
    )
    constant = rate_of(f"train_samples={ramped.total_samples}", *shape)
    assert [ramped.at(s) for s in every_position(ramped)] == [
        constant.at(s) for s in every_position(ramped)
    ]


@given(ramps(), lengths(), shapes(), st.sampled_from((None, 1, 7, 64)))
def test_the_scaling_multiplies_the_rate_of_every_sample_exactly(
    ramp: tuple[tuple[str, ...], int], length: str, shape: tuple[str, ...], reference: int | None
) -> None:
    """By batch / reference or its root, the reference being the last stage's batch where none is
    stated.
    """
    overrides, devices = ramp
    stated = () if reference is None else (f"reference_batch_size={reference}",)

    def scaled_by(scaling: str) -> LearningRate:
        return rate_of(
            *overrides,
            length,
            *shape,
            *stated,
            f"learning_rate_scaling={scaling}",
            num_devices=devices,
            samples_per_epoch=SAMPLES_PER_EPOCH,
        )

    none, linear, root = scaled_by("none"), scaled_by("linear"), scaled_by("sqrt")
    of = reference or none.manager.stages[-1].global_batch_size
    for s in every_position(none):
        ratio = none.manager.batch_size_at(s) / of
        assert linear.at(s) == pytest.approx(none.at(s) * ratio, rel=1e-14, abs=0)
        assert root.at(s) == pytest.approx(none.at(s) * math.sqrt(ratio), rel=1e-14, abs=0)


@given(lengths(), shapes())
def test_without_a_ramp_steps_and_samples_state_the_same_rates(
    length: str, shape: tuple[str, ...]
) -> None:
    """Update k of a run in steps has the rate of sample k x batch of the run in samples."""
    stated = rate_of(length, *shape, samples_per_epoch=SAMPLES_PER_EPOCH)
    steps = stated.manager.total_steps
    assert steps is not None
    positions = [stated.manager.position_after(k) for k in range(steps)]
    in_samples = rate_of(f"train_samples={stated.total_samples}", *shape)
    assert [stated.at(s) for s in positions] == [in_samples.at(s) for s in positions]


@pytest.mark.parametrize("steps", [7, 20, 33])
def test_by_updates_the_last_update_has_the_last_rate(steps: int) -> None:
    """MaxText's: whole updates of warm-up, then a cosine over the rest less one."""
    rate = rate_of(f"steps={steps}", "learning_rate_schedule_by=updates", "per_device_batch_size=4")
    warmup = int(steps * 0.1)
    span = steps - warmup - 1
    expected = [k / warmup for k in range(warmup)]
    expected += [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / span)) for k in range(span + 1)]
    assert [rate.at(4 * k) / 3e-3 for k in range(steps)] == pytest.approx(expected, abs=1e-12)


def test_by_updates_the_rate_is_0_after_the_schedules_own_length() -> None:
    rate = rate_of(
        "steps=10",
        "learning_rate_schedule_by=updates",
        "learning_rate_schedule_steps=6",
        "learning_rate_schedule=wsd",
        "wsd_decay_steps_fraction=0.5",
        "per_device_batch_size=1",
    )
    expected = [1, 1, 1, 1, 0.55, 0.1, 0, 0, 0, 0]
    assert [rate.at(k) / 3e-3 for k in range(10)] == pytest.approx(expected, abs=1e-12)
