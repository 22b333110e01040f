"""(k) Batch warmup by the schedule of `maxbatch critical-batch`, against a constant small and a
constant large batch.

Three runs on the same tokens, for each of three seeds (of parameters and of the order of the data):
the small batch; the schedule, measured by `critical-batch` on the small batch's run of seed 0
alone; the largest batch of that schedule from the start. Learning rates scale by the square root in
all. The bar (Merrill et al. 2025, https://arxiv.org/abs/2505.23971, saved 43%) is the small batch's
final loss, within the noise of seeds, with at least 40% fewer updates.
"""

from __future__ import annotations

import json
import shlex
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import SMALL_MODEL, finish, metrics_of, start
from benchmarks.measurement import BenchmarkError, Measurement

MOST_UPDATES = 0.6  # of the small batch's
MOST_LOSS = 1.0  # above the small batch's mean, in standard deviations of its seeds
SEEDS = (0, 1, 2)

_QUIET = ("generate_prompt=", "eval_interval=1000000", "log_period=1000000")
_SMALL = 4  # samples per update, 256 tokens


@dataclass(frozen=True)
class _Size:
    samples: int
    checkpoint_period: int
    eval_steps: int
    measuring: tuple[str, ...]  # flags of critical-batch


_FULL = _Size(24_000, 500, 400, ())  # critical-batch with its defaults
_QUICK = _Size(256, 16, 1, ("--checkpoints", "16,32", "--factors", "1,2", "--samples", "64"))


@dataclass(frozen=True)
class _Run:
    """The end of a run."""

    eval_loss: float
    updates: int
    training_s: float  # the sum of step_time_s: without evals, saves and starting
    wall_s: float


def measure(quick: bool) -> list[Measurement]:
    """Returns the final eval losses of the three, and the schedule's savings."""
    size = _QUICK if quick else _FULL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arms: dict[str, list[_Run]] = {"small": [_small(folder, size, seed) for seed in SEEDS]}
        began = time.perf_counter()
        measured = _critical_batch(folder, size)
        measuring_s = time.perf_counter() - began
        stages = [
            tuple(map(int, word.split(":"))) for word in measured["batch_size_schedule"].split()
        ]
        arms["scheduled"] = [_scheduled(folder, measured, seed) for seed in SEEDS]
        arms["large"] = [_large(folder, size, stages[-1][1], seed) for seed in SEEDS]
    return _compared(arms, measured, measuring_s)


def _small(folder: Path, size: _Size, seed: int) -> _Run:
    kept = (f"checkpoint_period={size.checkpoint_period}", "max_num_checkpoints_to_keep=null")
    return _trained(
        folder,
        f"small-{seed}",
        *SMALL_MODEL,
        *_QUIET,
        *_seeds(seed),
        *kept,
        f"global_batch_size={_SMALL}",
        f"train_samples={size.samples}",
        "learning_rate=2e-3",
        "learning_rate_scaling=sqrt",
        f"reference_batch_size={_SMALL}",
        f"eval_steps={size.eval_steps}",
    )


def _critical_batch(folder: Path, size: _Size) -> dict[str, Any]:
    log, run = folder / "log", folder / "small-0"
    finish(
        start(
            "maxbatch", "critical-batch", str(run), *size.measuring, log=log, cache=folder / "cache"
        ),
        log,
    )
    print(log.read_text())
    return json.loads((run / "critical-batch" / "critical_batch.json").read_text())


def _scheduled(folder: Path, measured: dict[str, Any], seed: int) -> _Run:
    """The command that critical-batch printed, with another seed."""
    words = [
        word for word in shlex.split(measured["command"])[2:] if not word.startswith("run_dir=")
    ]
    return _trained(folder, f"scheduled-{seed}", *words, *_seeds(seed))


def _large(folder: Path, size: _Size, batch: int, seed: int) -> _Run:
    return _trained(
        folder,
        f"large-{seed}",
        str(folder / f"small-{seed}" / "config.yml"),
        f"global_batch_size={batch}",
    )


def _seeds(seed: int) -> tuple[str, ...]:
    return f"init_weights_seed={seed}", f"data_shuffle_seed={seed}"


def _trained(folder: Path, name: str, *arguments: str) -> _Run:
    log, run = folder / "log", folder / name
    began = time.perf_counter()
    finish(
        start("maxbatch", "train", *arguments, f"run_dir={run}", log=log, cache=folder / "cache"),
        log,
    )
    wall_s = time.perf_counter() - began
    records = metrics_of(run)
    if "eval_loss" not in records[-1]:
        raise BenchmarkError(f"{name} ended without an eval:\n{log.read_text()[-2000:]}")
    ended = _Run(
        records[-1]["eval_loss"],
        records[-1]["step"],
        sum(record["step_time_s"] for record in records),
        wall_s,
    )
    print(f"{name}: {ended}", flush=True)
    return ended


def _compared(
    arms: dict[str, list[_Run]], measured: dict[str, Any], measuring_s: float
) -> list[Measurement]:
    losses = {name: [run.eval_loss for run in runs] for name, runs in arms.items()}
    noise = statistics.stdev(losses["small"])
    schedule = measured["batch_size_schedule"]
    detail = {
        "schedule": schedule,
        "measuring_s": measuring_s,
        "checkpoints": measured["checkpoints"],
    }

    def excess(name: str) -> list[float]:
        return [a - b for a, b in zip(losses[name], losses["small"], strict=True)]

    def share(name: str, figure: str) -> list[float]:
        return [
            getattr(a, figure) / getattr(b, figure)
            for a, b in zip(arms[name], arms["small"], strict=True)
        ]

    measurements = [
        Measurement(
            f"eval loss, {name}, {runs[0].updates:,} updates",
            statistics.mean(losses[name]),
            "nats",
            losses[name],
            detail={"runs": [vars(run) for run in runs], **detail},
        )
        for name, runs in arms.items()
    ]
    for name in ("scheduled", "large"):
        bars = (MOST_UPDATES, MOST_LOSS) if name == "scheduled" else (None, None)
        updates, seconds, above = share(name, "updates"), share(name, "training_s"), excess(name)
        measurements += [
            Measurement(
                f"updates, {name} / small", statistics.mean(updates), samples=updates, bar=bars[0]
            ),
            Measurement(f"eval loss above small, {name}", statistics.mean(above), "nats", above),
            Measurement(
                f"the same / deviation of small's seeds, {name}",
                statistics.mean(above) / noise,
                bar=bars[1],
                detail={"noise_nats": noise},
            ),
            Measurement(
                f"training time, {name} / small", statistics.mean(seconds), samples=seconds
            ),
        ]
    return measurements
