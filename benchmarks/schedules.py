"""Four schedules of the batch on the same tokens, five seeds, paired tests: `python -m
benchmarks.schedules FOLDER`.

docs/schedules-experiment.md states the hypotheses, the tests and the verdicts, which were fixed
before the first run. The runs stay in FOLDER. After an interruption the same command continues; the
tests follow when all runs have ended.

Losses are nats per byte; S seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks.commands import SMALL_MODEL, finish, metrics_of, start
from benchmarks.measurement import BenchmarkError

SAMPLES = 24_000  # of 64 bytes each
SEEDS = (0, 1, 2, 3, 4)
LEVEL = 0.05
MARGIN = 0.01  # nats per byte: a mean difference below it makes a schedule as good
CONSTANT = "constant"
_ROOT = ("learning_rate_scaling=sqrt", "reference_batch_size=4")
ARMS = {
    CONSTANT: ("global_batch_size=4",),
    "early ramp": ("batch_size_schedule=0:4 1500:8 3000:16 4500:32", *_ROOT),
    "seesaw": ("batch_size_schedule=seesaw 4 2",),
    "late switch": ("batch_size_schedule=0:4 16300:32", *_ROOT),
}
EQUAL_UPDATES = ("seesaw", "late switch")
KEYS = (
    *SMALL_MODEL,
    f"train_samples={SAMPLES}",
    "learning_rate=2e-3",
    "eval_samples=8192",
    "generate_prompt=",
    "eval_interval=1000000",
    "log_period=1000000",
    "checkpoint_period=1000",
)


class Ended(NamedTuple):
    """The end of a run."""

    loss: float  # on held-out text
    updates: int


class Difference(NamedTuple):
    """Returns the differences of two schedules' losses, seed by seed.

    Attributes:
      each: by seed.
      mean: of them.
      half_width: of the 95% interval around the mean, by Student's t.
      p: of the two-sided paired t test.
      p_signs: of the two-sided permutation of signs, exact.
      p_equal: the larger p of the two one-sided paired t tests against the margin.
    """

    each: Sequence[float]
    mean: float
    half_width: float
    p: float
    p_signs: float
    p_equal: float


def difference(
    above: Sequence[float], below: Sequence[float], margin: float = MARGIN
) -> Difference:
    """Returns the paired tests of two schedules, float[S] each."""
    each = [a - b for a, b in zip(above, below, strict=True)]
    mean, freedom = statistics.mean(each), len(each) - 1
    error = statistics.stdev(each) / math.sqrt(len(each))
    signed = [
        statistics.mean(sign * d for sign, d in zip(signs, each, strict=True))
        for signs in itertools.product((1, -1), repeat=len(each))
    ]
    return Difference(
        each=each,
        mean=mean,
        half_width=float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error,
        p=2 * float(stats.t.sf(abs(mean) / error, freedom)),
        p_signs=sum(abs(other) >= abs(mean) - 1e-12 for other in signed) / len(signed),
        p_equal=float(stats.t.sf((margin - abs(mean)) / error, freedom)),
    )


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Returns p-values corrected for their number (Holm 1979)."""
    corrected, least = {}, 0.0
    for rank, name in enumerate(sorted(p, key=p.__getitem__)):
        least = max(least, min(1.0, (len(p) - rank) * p[name]))
        corrected[name] = least
    return corrected


def verdict(mean: float, p: float, p_equal: float) -> str:
    """Returns the verdict on a schedule against the constant batch, from corrected p-values."""
    differs = "" if p >= LEVEL else "worse" if mean > 0 else "better"
    if p_equal < LEVEL:
        return f"{differs}, within the margin" if differs else "as good"
    return differs or "undecided"


def main(argv: list[str] | None = None) -> int:
    """Trains the missing runs, then prints the table and the tests and writes them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the runs are, and go")
    default = Path(__file__).with_suffix(".json")
    parser.add_argument(
        "--json", type=Path, default=default, help="where the results go (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    ended: dict[str, list[Ended]] = {arm: [] for arm in ARMS}
    for seed, arm in itertools.product(SEEDS, ARMS):  # a seed's runs are neighbours in time
        ended[arm].append(_trained(arguments.folder, arm, seed))
        print(f"seed {seed}, {arm}: {ended[arm][-1]}", flush=True)
    _report(ended, arguments.json)
    return 0


def _trained(folder: Path, arm: str, seed: int) -> Ended:
    run, log = folder / f"{arm.replace(' ', '-')}-{seed}", folder / "log"
    found = _ended(run)
    if found is None:
        seeds = (f"init_weights_seed={seed}", f"data_shuffle_seed={seed}")
        finish(
            start(
                "maxbatch",
                "train",
                *KEYS,
                *ARMS[arm],
                *seeds,
                f"run_dir={run}",
                log=log,
                cache=folder,
            ),
            log,
        )
        found = _ended(run)
    if found is None:
        raise BenchmarkError(f"{run} ended without its loss:\n{log.read_text()[-2000:]}")
    return found


def _ended(run: Path) -> Ended | None:
    """Returns the end of a run; None if it has not ended."""
    records = metrics_of(run) if (run / "metrics.jsonl").exists() else []
    last = records[-1] if records else {}
    if last.get("samples_seen") != SAMPLES or "eval_loss" not in last:
        return None
    return Ended(last["eval_loss"], last["step"])


def _report(ended: Mapping[str, Sequence[Ended]], output: Path) -> None:
    losses = {arm: [run.loss for run in runs] for arm, runs in ended.items()}
    differences = {
        arm: difference(losses[arm], losses[CONSTANT]) for arm in ARMS if arm != CONSTANT
    }
    p = holm({arm: found.p for arm, found in differences.items()})
    p_equal = holm({arm: found.p_equal for arm, found in differences.items()})

    runs = Table("schedule", "updates", *(f"seed {seed}" for seed in SEEDS), "mean")
    for arm, of_arm in ended.items():
        mean = statistics.mean(losses[arm])
        runs.add_row(
            arm, f"{of_arm[0].updates:,}", *(f"{run.loss:.4f}" for run in of_arm), f"{mean:.4f}"
        )
    tests = Table(
        "less constant",
        "mean",
        "95% interval",
        "p (Holm)",
        "p of signs",
        "p within (Holm)",
        "verdict",
    )
    for arm, found in differences.items():
        answer = verdict(found.mean, p[arm], p_equal[arm])
        tests.add_row(
            arm,
            *_figures(found),
            f"{p[arm]:.4f}",
            f"{found.p_signs:.4f}",
            f"{p_equal[arm]:.4f}",
            answer,
        )
    equal = difference(*(losses[arm] for arm in EQUAL_UPDATES))
    tests.add_row(
        " less ".join(EQUAL_UPDATES),
        *_figures(equal),
        f"{equal.p:.4f}",
        f"{equal.p_signs:.4f}",
        "",
        "",
    )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(runs, tests)

    written: dict[str, dict[str, Any]] = {
        arm: {"updates": of_arm[0].updates, "losses": losses[arm]} for arm, of_arm in ended.items()
    }
    for arm, found in differences.items():
        written[arm]["less_constant"] = found._asdict() | {
            "p_holm": p[arm],
            "p_equal_holm": p_equal[arm],
        }
    written[EQUAL_UPDATES[0]][f"less_{EQUAL_UPDATES[1].replace(' ', '_')}"] = equal._asdict()
    output.write_text(json.dumps(written, indent=1) + "\n")
    print(f"written to {output}")


def _figures(found: Difference) -> tuple[str, str]:
    low, high = found.mean - found.half_width, found.mean + found.half_width
    return f"{found.mean:+.4f}", f"{low:+.4f} to {high:+.4f}"


if __name__ == "__main__":
    sys.exit(main())
