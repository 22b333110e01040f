"""Runs of one config that differ in devices, cut, mesh, ramp execution or a resume only are the
same run.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import pytest

from maxbatch import BatchPlan
from maxbatch.run.pretraining import train
from tests.helpers.tiny import MEASURED, SAME, UNSAVED, assert_same_run, read_metrics, tiny_config

pytestmark = pytest.mark.runs

RUN = (
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    "checkpoint_period=1000",
    "packing=false",
)
BATCHES = {
    "constant": "global_batch_size=24",
    "ramp": "batch_size_schedule=0:8 32:16 96:24",
    "up and down": "batch_size_schedule=0:24 48:8 64:16",
}
# devices, most rows per device, mesh
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "one device, one pass": (1, "24", ()),
    "one device, a row at a time": (1, "1", (MEASURED,)),
    "two devices": (2, "4", ()),
    "four devices, fsdp": (4, "2", ()),
    "four devices, data": (4, "1", ("ici_data_parallelism=4",)),
    "eight devices, data and fsdp": (8, "1", ("ici_data_parallelism=2",)),
    "four devices, context and tensor": (
        4,
        "2",
        (
            "ici_context_parallelism=2",
            "ici_tensor_parallelism=2",
            "context_parallel_strategy=ring",
            "context_parallel_load_balance=true",
        ),
    ),
    "eight devices, pipeline, data and fsdp": (
        8,
        "1",
        ("ici_pipeline_parallelism=2", "ici_data_parallelism=2"),
    ),
    "eight devices, data, fsdp and tensor": (
        8,
        "0.5",
        ("ici_data_parallelism=2", "ici_tensor_parallelism=2", MEASURED),
    ),
}
# Whole runs of these are left to the resumes below: each is another layout of the table with fewer
# devices.
RESUMED = ("two devices", "four devices, fsdp")


def run(run_dir: Path, layout: str, *overrides: str) -> list[dict[str, Any]]:
    num_devices, rows, mesh = LAYOUTS[layout]
    config = tiny_config(
        *RUN, *mesh, f"per_device_batch_size={rows}", f"run_dir={run_dir}", *overrides
    )
    train(config, jax.devices()[:num_devices])
    return read_metrics(run_dir)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return {
        name: run(
            tmp_path_factory.mktemp("reference"), "one device, one pass", batch, "steps=12", UNSAVED
        )
        for name, batch in BATCHES.items()
    }


# A ramp has updates of its last batch, which the constant one is, so the constant one needs no
# layout twice.
@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        *((name, "ramp") for name in LAYOUTS if name not in ("one device, one pass", *RESUMED)),
        ("one device, a row at a time", "constant"),
        ("eight devices, data, fsdp and tensor", "constant"),
    ],
)
def test_all_layouts_of_one_batch_are_one_run(
    tmp_path: Path, reference: dict[str, list[dict[str, Any]]], layout: str, batch: str
) -> None:
    assert_same_run(
        run(tmp_path, layout, BATCHES[batch], "steps=12", UNSAVED),
        reference[batch],
        (*SAME, "tokens_seen", "learning_rate"),
    )


@pytest.mark.parametrize(
    ("batch", "stops", "layouts"),
    [
        ("constant", (5,), ("four devices, fsdp", "two devices")),
        (
            "ramp",
            (3, 7),
            ("eight devices, data and fsdp", "one device, a row at a time", "four devices, data"),
        ),
        ("up and down", (2,), ("two devices", "eight devices, data and fsdp")),
        (
            "ramp",
            (2, 5),
            (
                "eight devices, pipeline, data and fsdp",
                "two devices",
                "four devices, context and tensor",
            ),
        ),
    ],
)
def test_a_resume_onto_another_layout_is_not_noticed(
    tmp_path: Path,
    reference: dict[str, list[dict[str, Any]]],
    batch: str,
    stops: tuple[int, ...],
    layouts: tuple[str, ...],
) -> None:
    for stop, layout in zip((*stops, 12), layouts, strict=True):
        metrics = run(tmp_path, layout, BATCHES[batch], f"steps={stop}")
    assert_same_run(metrics, reference[batch], (*SAME, "tokens_seen", "learning_rate"))


def test_decays_in_tokens_follow_the_ramp_on_any_layout_and_over_a_resume(
    tmp_path: Path, reference: dict[str, list[dict[str, Any]]]
) -> None:
    stated = "adam_b1_half_life=2000t", "adam_b2_half_life=9Kt", "weight_decay_timescale=20Kt"
    whole = run(
        tmp_path / "whole", "one device, one pass", BATCHES["ramp"], *stated, "steps=12", UNSAVED
    )
    assert abs(whole[-1]["loss"] - reference["ramp"][-1]["loss"]) > 1e-3, (
        "they differ from decays per update"
    )
    run(tmp_path / "cut", "four devices, data", BATCHES["ramp"], *stated, "steps=5")
    cut = run(tmp_path / "cut", "two devices", BATCHES["ramp"], *stated, "steps=12")
    assert_same_run(cut, whole, (*SAME, "tokens_seen", "learning_rate"))


def test_with_one_batch_decays_in_tokens_are_those_per_update(
    tmp_path: Path, reference: dict[str, list[dict[str, Any]]]
) -> None:
    tokens = reference["constant"][0]["tokens_seen"]
    half_lives = [
        f"adam_b{i}_half_life={-tokens / math.log2(decay)!r}t" for i, decay in ((1, 0.9), (2, 0.95))
    ]
    timescale = f"weight_decay_timescale={tokens / (0.1 * 1e-2)!r}t"
    metrics = run(
        tmp_path,
        "one device, one pass",
        BATCHES["constant"],
        *half_lives,
        timescale,
        "steps=12",
        UNSAVED,
    )
    losses, wanted = ([m["loss"] for m in some] for some in (metrics, reference["constant"]))
    assert losses == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("devices", "batch", "rows", "mesh"),
    [
        (3, "ramp", "2", ()),  # no dimension of the model is a multiple of 3
        (5, "constant", "1", ("ici_data_parallelism=5",)),
        (6, "ramp", "1", ("ici_pipeline_parallelism=2", "ici_data_parallelism=3")),
    ],
)
def test_padding_makes_any_devices_train_on_the_same_batch(
    tmp_path: Path,
    reference: dict[str, list[dict[str, Any]]],
    devices: int,
    batch: str,
    rows: str,
    mesh: tuple[str, ...],
) -> None:
    stated = (
        *RUN,
        *mesh,
        BATCHES[batch],
        f"per_device_batch_size={rows}",
        "batch_padding=true",
        UNSAVED,
    )
    config = tiny_config(*stated, f"run_dir={tmp_path}", "steps=12")
    plan = BatchPlan.from_config(config, num_devices=devices)
    assert any(stage.padded_slots_per_step for stage in plan.stages)
    train(config, jax.devices()[:devices])
    assert_same_run(
        read_metrics(tmp_path), reference[batch], (*SAME, "tokens_seen", "learning_rate")
    )


def test_a_resume_with_another_batch_goes_on_in_the_same_stream(
    tmp_path: Path, reference: dict[str, list[dict[str, Any]]]
) -> None:
    """Six updates of 24, then 18 of 8: the same samples in the same order, none lost and none
    twice.
    """
    run(tmp_path, "one device, one pass", "global_batch_size=24", "steps=6")
    metrics = run(tmp_path, "two devices", "global_batch_size=8", "steps=24")
    assert [m["samples_seen"] for m in metrics[6:]] == list(range(6 * 24 + 8, 12 * 24 + 1, 8))
    thirds = [
        sum(int(m["data_fingerprint"], 16) for m in metrics[i : i + 3]) % 2**64
        for i in range(6, 24, 3)
    ]
    assert thirds == [int(m["data_fingerprint"], 16) for m in reference["constant"][6:]]


def test_nothing_compiles_while_training_once_the_first_step_is_done(
    reference: dict[str, list[dict[str, Any]]],
) -> None:
    for metrics in reference.values():
        assert len({m["compiles"] for m in metrics}) == 1
