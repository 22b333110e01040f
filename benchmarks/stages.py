"""(c) What a stage change costs: the first update of every stage against the median update of that
stage, and what a ramp costs: its samples per second against those of its last stage.

Every ramp is a `maxbatch train` of its own and compiles everything, as on a first run: later
executables are compiled while its first stages train. With a smaller batch the fixed cost of an
update is shared by fewer samples. So this cost, the intercept of a line through the stages'
medians, is subtracted before samples per second are compared.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.commands import finish, metrics_of, start
from benchmarks.measurement import Measurement

BAR = 1.1
RATE_BAR = 0.98
_RUN = (
    "max_target_length=128",
    "generate_prompt=",
    "eval_interval=-1",
    "gradient_noise_scale=false",
)
# Batches of 8 to 32 at 16 rows in one pass; 20 to 60 updates in a stage.
_RAMPS = {
    "linear": (
        "enable_rampup_batch_size=true",
        "gradient_accumulation_steps=2",
        "per_device_batch_size=16",
        "per_device_batch_size_start=4",
        "per_device_batch_size_increment=4",
        "global_rampup_samples=1440",
        "train_samples=2400",
    ),
    "doubling": ("batch_size_schedule=0:8 320:16 960:32", "train_samples=1920"),
    "decreasing": ("batch_size_schedule=0:32 640:16 1120:24", "train_samples=1840"),
}
_QUICK = {
    "linear": (
        "enable_rampup_batch_size=true",
        "gradient_accumulation_steps=2",
        "per_device_batch_size=2",
        "per_device_batch_size_start=1",
        "per_device_batch_size_increment=1",
        "global_rampup_samples=12",
        "train_samples=36",
        "dataset_type=synthetic",
        "base_num_decoder_layers=1",
    )
}


def measure(quick: bool) -> list[Measurement]:
    """Per ramp: ratios per stage, each the median over five runs, compilations waited for, samples
    per second of the stages' medians over the runs.
    """
    measurements = []
    for name, ramp in (_QUICK if quick else _RAMPS).items():
        with tempfile.TemporaryDirectory() as folder:
            runs = [_train(Path(folder), number, ramp) for number in range(2 if quick else 5)]
        measurements += _measurements(name, runs)
    return measurements


def _train(folder: Path, number: int, ramp: tuple[str, ...]) -> list[dict[str, Any]]:
    run_dir, log = folder / f"ramp{number}", folder / f"ramp{number}.log"
    finish(
        start(
            "maxbatch", "train", *_RUN, *ramp, f"run_dir={run_dir}", log=log, cache=folder / "cache"
        ),
        log,
    )
    return metrics_of(run_dir)


def _measurements(name: str, runs: list[list[dict[str, Any]]]) -> list[Measurement]:
    stages = sorted({record["stage"] for record in runs[0]})
    batches = {s: next(r["global_batch_size"] for r in runs[0] if r["stage"] == s) for s in stages}
    first: dict[int, list[float]] = {stage: [] for stage in stages}
    medians: list[list[float]] = []  # of every run, a stage each
    for records in runs:
        times = {s: [r["step_time_s"] for r in records if r["stage"] == s] for s in stages}
        for stage in stages:
            first[stage].append(times[stage][0] / statistics.median(times[stage]))
        medians.append([statistics.median(times[stage]) for stage in stages])
    rates = [_rate_of_ramp(list(batches.values()), of_run) for of_run in medians]
    # One line through the stages' medians over all runs: the line of a single run is too noisy.
    rate = _rate_of_ramp(
        list(batches.values()), [statistics.median(stage) for stage in zip(*medians, strict=True)]
    )
    compiles = [float(records[-1]["compiles"] - records[1]["compiles"]) for records in runs]
    return [
        *(
            Measurement(
                f"{name}: first update / median, stage {stage} (batch {batches[stage]})",
                statistics.median(values),
                samples=values,
                bar=BAR,
            )
            for stage, values in first.items()
        ),
        Measurement(
            f"{name}: samples/s of the ramp / of its last stage, updates aside",
            rate,
            samples=rates,
            bar=RATE_BAR,
            sense="at least",
        ),
        Measurement(
            f"{name}: compilations waited for after update 2",
            max(compiles),
            samples=compiles,
            bar=0,
        ),
    ]


def _rate_of_ramp(batches: list[int], seconds: list[float]) -> float:
    """Samples per second of the earlier stages over those of the last, without the fixed cost of
    updates.
    """
    _, update = np.polyfit(batches, seconds, 1)
    update = max(0.0, float(update))
    *ramp, last = ((batch, time - update) for batch, time in zip(batches, seconds, strict=True))
    return sum(b for b, _ in ramp) / sum(t for _, t in ramp) / (last[0] / last[1])
