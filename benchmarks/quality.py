"""(p) The loss of small models: presets, a budget of tokens each, and the loss on held-out text.

Each trains in float32, in bfloat16, and with its layers' products in 8 bits beside bfloat16. The
data is the source code of Python's standard library, so the bars of float32 hold for one version of
Python. The losses depend on the machine only by rounding. A bar is 1% above the measured loss, or
above that of the wider type, so a change that hurts learning fails. A token is a byte.
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.commands import finish, metrics_of, start
from benchmarks.measurement import Measurement

PYTHON = "3.11"  # whose standard library the bars are of


class Numbers(NamedTuple):
    """The types that a run computes in, and those whose loss it may exceed by 1%."""

    keys: tuple[str, ...]
    wider: str | None


NUMBERS = {
    "float32": Numbers(("dtype=float32",), None),
    "bfloat16": Numbers(("dtype=bfloat16",), "float32"),
    "int8": Numbers(("dtype=bfloat16", "quantization=int8"), "bfloat16"),
    "fp8": Numbers(("dtype=bfloat16", "quantization=fp8"), "bfloat16"),
}


class Budget(NamedTuple):
    """The training budget of a preset, and the highest allowed loss at its end."""

    preset: str
    tokens: str
    rows: int  # of an update
    learning_rate: float
    bar: float  # nats per byte, in float32


BUDGETS = {
    "tiny": Budget("tiny", "2M", 16, 1e-2, 1.517),
    "tiny at twice its rate": Budget("tiny", "2048000", 16, 2e-2, 1.529),
    "tiny-moe": Budget("tiny-moe", "2M", 16, 1e-2, 1.453),
    "small": Budget("small", "250000", 4, 3e-3, 2.391),
}
WINDOW = 50  # updates whose mean training loss is a figure


def measure(quick: bool) -> list[Measurement]:
    """The loss of each preset on held-out text once its tokens are trained on, and its ratio to a
    wider type's.
    """
    if platform.python_version_tuple()[:2] != tuple(PYTHON.split(".")):
        print(
            f"benchmarks: quality: no bars of float32: they are of Python {PYTHON}", file=sys.stderr
        )
    with tempfile.TemporaryDirectory(prefix="maxbatch-quality-") as folder:
        found: list[Measurement] = []
        for title, budget in BUDGETS.items():
            details = {
                name: trained(budget, numbers, Path(folder), quick)
                for name, numbers in NUMBERS.items()
            }
            found += compared(title, budget, details)
        return found


def trained(budget: Budget, numbers: Numbers, folder: Path, quick: bool) -> dict[str, Any]:
    """The losses of one run: on held-out text at its end, and the training loss as means of
    `WINDOW` updates.
    """
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        log = Path(run_dir, "log")
        stated = (
            f"model_name={budget.preset}",
            f"train_tokens={20000 if quick else budget.tokens}",
            f"global_batch_size={budget.rows}",
            f"learning_rate={budget.learning_rate}",
            *numbers.keys,
            "eval_interval=1000000",
            "checkpoint_period=1000000",
            "generate_prompt=",
            "log_to=none",
        )
        finish(
            start(
                "maxbatch",
                "train",
                *stated,
                f"run_dir={run_dir}/run",
                log=log,
                cache=folder / "cache",
            ),
            log,
        )
        records = metrics_of(Path(run_dir, "run"))
    losses = [record["loss"] for record in records]
    windows = [losses[first : first + WINDOW] for first in range(0, len(losses), WINDOW)]
    return {
        "loss": records[-1]["eval_loss"],
        "updates": len(records),
        "tokens": records[-1]["tokens_seen"],
        "training_losses": [statistics.fmean(window) for window in windows],
    }


def compared(
    title: str, budget: Budget, details: Mapping[str, dict[str, Any]]
) -> Iterator[Measurement]:
    """Yields the loss in float32, and those of narrower types as ratios."""
    for name, detail in details.items():
        wider = NUMBERS[name].wider
        if wider is None:
            bar = budget.bar if platform.python_version().startswith(f"{PYTHON}.") else None
            named = f"{title}: loss after {detail['tokens']:,} tokens, {name}"
            yield Measurement(named, detail["loss"], "nats/byte", bar=bar, detail=detail)
        else:
            named = f"{title}: {name} over {wider}"
            yield Measurement(
                named, detail["loss"] / details[wider]["loss"], bar=1.01, detail=detail
            )
