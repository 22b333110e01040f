"""The manager against a walk step by step: batch at a position, positions, steps, stages, totals,
resumes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maxbatch import ConfigError, RampupBatchManager, load_config
from maxbatch.config.config import Config

RAMP = ["enable_rampup_batch_size=true", "per_device_batch_size_increment=4"]


@dataclass(frozen=True)
class Statement:
    """One way to state the batch: its overrides, and the same as plain thresholds and batches."""

    overrides: tuple[str, ...]
    num_devices: int
    thresholds: tuple[Fraction, ...]
    batches: tuple[int, ...]

    def batch_at(self, samples_seen: int) -> int:
        return [b for t, b in zip(self.thresholds, self.batches, strict=True) if t <= samples_seen][
            -1
        ]


@st.composite
def ramps(draw: st.DrawFn) -> Statement:
    num_devices = draw(st.sampled_from([1, 2, 3, 4, 8]))
    a, c, n, g, samples = (draw(st.integers(1, most)) for most in (6, 5, 6, 3, 600))
    tenth = draw(st.sampled_from([1, Fraction(1, num_devices)]))
    a, c = a * tenth, c * tenth
    overrides = (
        *RAMP,
        f"per_device_batch_size_start={a}",
        f"per_device_batch_size_increment={c}",
        f"per_device_batch_size={a + n * c}",
        f"global_rampup_samples={samples}",
        f"gradient_accumulation_steps={g}",
        "ici_fsdp_parallelism=1",
        "ici_tensor_parallelism=-1",
    )
    return Statement(
        overrides,
        num_devices,
        tuple(Fraction(i * samples, n) for i in range(n + 1)),
        tuple(int((a + i * c) * num_devices * g) for i in range(n + 1)),
    )


@st.composite
def schedules(draw: st.DrawFn) -> Statement:
    num_devices = draw(st.sampled_from([1, 2, 4]))
    thresholds = [0, *sorted(draw(st.sets(st.integers(1, 700), max_size=5)))]
    batches = [num_devices * draw(st.integers(1, 40)) for _ in thresholds]
    in_tokens = draw(st.booleans())
    words = [f"{t}t" if in_tokens else f"{t}" for t in thresholds]
    schedule = " ".join(f"{w}:{b}" for w, b in zip(words, batches, strict=True))
    overrides = (
        f"batch_size_schedule={schedule}",
        f"per_device_batch_size={draw(st.integers(1, 9))}",
    )
    scale = Fraction(1, 16) if in_tokens else Fraction(1)
    return Statement(
        (*overrides, "max_target_length=16"),
        num_devices,
        tuple(t * scale for t in thresholds),
        tuple(batches),
    )


@st.composite
def constants(draw: st.DrawFn) -> Statement:
    num_devices, rows, g = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 5)),
    )
    batch = num_devices * rows * g
    stated = (
        f"global_batch_size={batch}" if draw(st.booleans()) else f"gradient_accumulation_steps={g}"
    )
    return Statement(
        (stated, f"per_device_batch_size={rows}"), num_devices, (Fraction(0),), (batch,)
    )


statements = st.one_of(ramps(), schedules(), constants())
lengths = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 60)),
    st.tuples(st.just("train_samples"), st.integers(1, 1500)),
)


def walk(
    said: Statement, length: tuple[str, int], step: int = 0, seen: int = 0
) -> Iterator[tuple[int, int, int]]:
    """Yield (step, samples_seen, rows) of every update that is left, one by one."""
    key, value = length
    while (step < value) if key == "steps" else (seen < value):
        batch = said.batch_at(seen)
        rows = batch if key == "steps" else min(batch, value - seen)
        yield step, seen, rows
        step, seen = step + 1, seen + rows


def at_anchor(
    config: Config, anchor: tuple[int, int], num_devices: int = 1, **keywords: Any
) -> RampupBatchManager:
    state = {"step": anchor[0], "samples_seen": anchor[1]}
    return RampupBatchManager.from_state(config, state, num_devices, **keywords)


def manager_of(
    said: Statement, length: tuple[str, int], anchor: tuple[int, int] = (0, 0)
) -> RampupBatchManager:
    config = load_config(overrides=[*said.overrides, f"{length[0]}={length[1]}"])
    return at_anchor(config, anchor, said.num_devices)


@given(statements, lengths)
def test_the_closed_form_is_the_walk(said: Statement, length: tuple[str, int]) -> None:
    manager = manager_of(said, length)
    updates = list(walk(said, length))
    in_stage = [[0, 0] for _ in manager.stages]
    for step, seen, rows in updates:
        stage = manager.stage_at(seen)
        assert (
            manager.batch_size_at(seen)
            == manager.stages[stage].global_batch_size
            == said.batch_at(seen)
        )
        assert manager.rows_at(seen) == rows
        assert manager.position_after(step) == seen
        assert manager.step_at(seen) == manager.step_at(seen + rows - 1) == step
        in_stage[stage] = [in_stage[stage][0] + 1, in_stage[stage][1] + rows]
    step, seen, rows = updates[-1]
    assert manager.position_after(step + 1) == manager.total_samples == seen + rows
    assert manager.step_at(seen + rows) == manager.total_steps == len(updates)
    assert [[stage.num_steps, stage.num_samples] for stage in manager.stages] == in_stage
    assert [stage.threshold for stage in manager.stages] == list(said.thresholds)


@given(statements, lengths, st.integers(0, 80))
def test_the_planned_steps_are_the_walk(
    said: Statement, length: tuple[str, int], done: int
) -> None:
    manager = manager_of(said, length)
    updates = list(walk(said, length))
    planned = list(manager.steps_from(done))
    assert [(p.step - 1, p.first_sample, p.num_rows) for p in planned] == updates[done:]
    for update in planned:
        assert update.end_sample == update.first_sample + update.num_rows
        assert update.stage == manager.stage_at(update.first_sample)
        assert manager.state_at(update.step) == {
            "step": update.step,
            "samples_seen": update.end_sample,
        }


@given(statements, lengths)
def test_stages_begin_at_the_first_step_at_or_after_their_threshold(
    said: Statement, length: tuple[str, int]
) -> None:
    manager = manager_of(said, length)
    endless = walk(said, ("steps", 10**9))
    step, seen, _ = next(endless)
    for stage in manager.stages:
        while seen < stage.threshold:
            step, seen, _ = next(endless)
        assert (stage.first_step, stage.first_sample) == (step, seen)


@given(statements, lengths, st.integers(0, 80))
def test_a_resume_where_the_plan_led_changes_nothing(
    said: Statement, length: tuple[str, int], step: int
) -> None:
    manager = manager_of(said, length)
    assert manager.total_steps is not None
    state = json.loads(json.dumps(manager.state_at(min(step, manager.total_steps))))
    config = load_config(overrides=[*said.overrides, f"{length[0]}={length[1]}"])
    resumed = RampupBatchManager.from_state(config, state, said.num_devices)
    assert (resumed.stages, resumed.total_steps) == (manager.stages, manager.total_steps)
    assert resumed.total_samples == manager.total_samples
    assert [resumed.position_after(k) for k in range(20)] == [
        manager.position_after(k) for k in range(20)
    ]


@given(statements, lengths, st.integers(0, 40), st.integers(0, 900))
def test_a_resume_from_elsewhere_goes_on_from_that_pair(
    said: Statement, length: tuple[str, int], step: int, seen: int
) -> None:
    planned = manager_of(said, length)
    assume(planned.position_after(step) != seen)
    manager = manager_of(said, length, anchor=(step, seen))
    updates = list(walk(said, length, step, seen))
    for at, position, rows in updates:
        assert (manager.position_after(at), manager.step_at(position)) == (position, at)
        assert manager.rows_at(position) == rows
    end = (updates[-1][0] + 1, updates[-1][1] + updates[-1][2]) if updates else (step, seen)
    assert (manager.total_steps, manager.total_samples) == end
    assert sum(stage.num_steps or 0 for stage in manager.stages) == end[0] - step
    if step:
        with pytest.raises(ValueError, match="before the anchor"):
            manager.position_after(step - 1)
    if seen:
        with pytest.raises(ValueError, match="before the anchor"):
            manager.step_at(seen - 1)


def test_megatrons_rule_by_hand() -> None:
    """4, 8, 12, 16 rows on 2 devices with g = 3: 24, 48, 72, 96 from 0, 100/3, 200/3 and 100
    samples on.
    """
    overrides = [*RAMP, "global_rampup_samples=100", "gradient_accumulation_steps=3", "steps=10"]
    manager = RampupBatchManager.from_config(load_config(overrides=overrides), 2)
    assert [stage.threshold for stage in manager.stages] == [
        0,
        Fraction(100, 3),
        Fraction(200, 3),
        100,
    ]
    positions = [0, 24, 48, 96, 168, 264]
    assert [manager.position_after(k) for k in range(6)] == positions
    assert [manager.batch_size_at(s) for s in positions] == [24, 24, 48, 72, 96, 96]
    assert [manager.stage_at(s) for s in (33, 34, 66, 67, 99, 100)] == [0, 1, 1, 2, 2, 3]
    with pytest.raises(ValueError, match="before the start of the stream, 0"):
        manager.batch_size_at(-1)


def test_a_step_may_jump_over_a_stage() -> None:
    config = load_config(overrides=["batch_size_schedule=0:8 2:16 4:32", "steps=3"])
    stages = RampupBatchManager.from_config(config).stages
    assert [(s.first_step, s.num_steps, s.first_sample, s.num_samples) for s in stages] == [
        (0, 1, 0, 8),
        (1, 0, 8, 0),
        (1, 2, 8, 64),
    ]


def test_a_tenth_is_a_tenth() -> None:
    overrides = [*RAMP, "per_device_batch_size_start=0.1", "per_device_batch_size_increment=0.1"]
    overrides += [
        "per_device_batch_size=0.3",
        "ici_fsdp_parallelism=1",
        "ici_tensor_parallelism=-1",
    ]
    manager = RampupBatchManager.from_config(load_config(overrides=overrides), 10)
    assert [stage.global_batch_size for stage in manager.stages] == [1, 2, 3]
    assert [stage.per_device_batch_size for stage in manager.stages] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("reference", [None, 96])
@pytest.mark.parametrize(("scaling", "power"), [("none", 0), ("linear", 1), ("sqrt", 0.5)])
def test_the_rate_scale_follows_the_batch(
    scaling: str, power: float, reference: int | None
) -> None:
    overrides = [*RAMP, f"learning_rate_scaling={scaling}"]
    overrides += [f"reference_batch_size={reference}"] if reference else []
    stages = RampupBatchManager.from_config(load_config(overrides=overrides), 2).stages
    expected = [(batch / (reference or 32)) ** power for batch in (8, 16, 24, 32)]
    assert [stage.learning_rate_scale for stage in stages] == pytest.approx(expected, rel=1e-15)


# --- the cut ------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 400),
    st.fractions(Fraction(1, 4), 40),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
)
def test_the_micro_batch_is_the_largest_that_fits_and_divides(
    units: int, cap: Fraction, num_devices: int, tensor: int
) -> None:
    assume(tensor <= num_devices)
    shards = num_devices // tensor
    batch = units * shards
    assume(cap * num_devices >= shards)
    overrides = [
        f"global_batch_size={batch}",
        f"per_device_batch_size={cap}",
        f"ici_tensor_parallelism={tensor}",
    ]
    stage = RampupBatchManager.from_config(load_config(overrides=overrides), num_devices).stages[0]
    fitting = [
        m for m in range(shards, batch + 1, shards) if batch % m == 0 and m <= cap * num_devices
    ]
    assert stage.micro_batch_size_to_train_on == max(fitting)
    assert stage.gradient_accumulation_steps * max(fitting) == stage.global_batch_size == batch
    assert Fraction(str(stage.per_device_batch_size)) * num_devices == max(
        fitting
    ) or num_devices not in (1, 2, 4, 8)


def test_stages_behind_a_resume_need_not_fit_and_those_ahead_must() -> None:
    config = load_config(overrides=["batch_size_schedule=0:6 600:8 1200:10", "steps=300"])
    with pytest.raises(ConfigError, match="stage 0 of 6, stage 2 of 10 cannot"):
        RampupBatchManager.from_config(config, 4)
    config = load_config(overrides=["batch_size_schedule=0:6 600:8 1200:12", "steps=300"])
    resumed = at_anchor(config, (100, 600), 4)
    assert [stage.micro_batch_size_to_train_on for stage in resumed.stages] == [0, 8, 12]
    assert [stage.num_steps for stage in resumed.stages] == [100, 75, 125]


def test_a_ramp_of_rows_per_device_resumes_on_other_devices() -> None:
    overrides = [*RAMP, "per_device_batch_size_start=1/4", "per_device_batch_size_increment=1/4"]
    overrides += ["per_device_batch_size=1", "global_rampup_samples=30", "ici_fsdp_parallelism=1"]
    config = load_config(
        overrides=[*overrides, "ici_data_parallelism=1", "ici_tensor_parallelism=-1"]
    )
    assert [s.global_batch_size for s in RampupBatchManager.from_config(config, 4).stages] == [
        1,
        2,
        3,
        4,
    ]
    with pytest.raises(ConfigError, match="stage 0"):
        RampupBatchManager.from_config(config, 2)
    resumed = at_anchor(config, (25, 31), 2)
    assert [s.global_batch_size for s in resumed.stages] == [0, 1, 0, 2]
    assert resumed.position_after(26) == 33


# --- lengths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "samples_per_epoch", "total"),
    [
        ("steps=10", None, (10, 160)),
        ("train_samples=155", None, (10, 155)),
        ("train_tokens=39_681", None, (10, 156)),
        ("num_epochs=1.5", 100, (10, 150)),
        ("num_epochs=0.1", 30, (1, 3)),
        ("num_epochs=2", None, (None, None)),
    ],
)
def test_a_length_in_data_is_met_exactly(
    length: str, samples_per_epoch: int | None, total: tuple[int | None, int | None]
) -> None:
    manager = RampupBatchManager.from_config(
        load_config(overrides=[length]), samples_per_epoch=samples_per_epoch
    )
    assert (manager.total_steps, manager.total_samples) == total
    stage = manager.stages[0]
    assert (stage.num_steps, stage.num_samples) == total
    if length.startswith("train_samples"):
        assert [manager.rows_at(s) for s in (0, 144, 155, 1000)] == [16, 11, 0, 0]
        assert [manager.position_after(k) for k in (9, 10, 11)] == [144, 155, 155]


def test_a_run_that_is_over_stays_at_its_anchor() -> None:
    for length in ("steps=10", "train_samples=160"):
        config = load_config(overrides=[length])
        manager = at_anchor(config, (20, 1000))
        assert (manager.total_steps, manager.total_samples) == (20, 1000)


def test_a_run_of_unknown_length_is_planned_without_end() -> None:
    manager = RampupBatchManager.from_config(load_config(overrides=["num_epochs=2"]))
    assert [p.end_sample for p in itertools.islice(manager.steps_from(10), 3)] == [176, 192, 208]


def test_many_stages_and_trillions_of_samples_take_no_time() -> None:
    thresholds = itertools.accumulate(range(5000))
    schedule = " ".join(f"{t * 1000 + i}:{i + 1}" for i, t in enumerate(thresholds))
    config = load_config(overrides=[f"batch_size_schedule={schedule}", "train_samples=900000B"])
    manager = RampupBatchManager.from_config(config)
    assert manager.total_samples == 900_000 * 10**9
    assert manager.total_steps is not None
    assert manager.position_after(manager.total_steps - 1) < manager.total_samples


@pytest.mark.parametrize(
    "file",
    [
        "steps: 10\ntrain_samples: 160",
        "train_samples: 10\ntrain_tokens: 2560",
        "num_epochs: 2\ntrain_samples: 200",
    ],
)
def test_two_lengths_in_one_layer_may_agree(tmp_path: Path, file: str) -> None:
    (tmp_path / "run.yml").write_text(file)
    RampupBatchManager.from_config(load_config(tmp_path / "run.yml"), samples_per_epoch=100)
