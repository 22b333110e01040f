"""(p) Small models end at the loss that they should: presets, a budget of tokens each, and the loss on held-out text.

The data is the source code of Python's standard library, so a bar holds for one version of Python. The losses do not
depend on the machine but for rounding; a bar is what was measured and 1% more, so that a change that hurts learning is
seen. A token is a byte.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.commands import finish, metrics_of, start
from benchmarks.measurement import Measurement

PYTHON = "3.11"  # whose standard library the bars are of


class Budget(NamedTuple):
    """What a preset trains on, and the most that its loss may be after it."""

    tokens: str
    rows: int  # of an update
    learning_rate: float
    bar: float  # nats per byte


BUDGETS = {
    "tiny": Budget("2M", 16, 1e-2, 1.517),
    "tiny-moe": Budget("2M", 16, 1e-2, 1.453),
    "small": Budget("250000", 4, 3e-3, 2.391),
}


def measure(quick: bool) -> list[Measurement]:
    """The loss of each preset on held-out text once its tokens are trained on."""
    if platform.python_version_tuple()[:2] != tuple(PYTHON.split(".")):
        print(f"benchmarks: quality: no bars: they are of Python {PYTHON}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="maxbatch-quality-") as folder:
        return [_measure(name, budget, Path(folder), quick) for name, budget in BUDGETS.items()]


def _measure(name: str, budget: Budget, folder: Path, quick: bool) -> Measurement:
    run_dir, log = folder / name, folder / f"{name}.log"
    tokens = "20000" if quick else budget.tokens
    stated = (
        f"model_name={name}", f"train_tokens={tokens}", f"global_batch_size={budget.rows}",
        f"learning_rate={budget.learning_rate}", "eval_interval=1000000", "checkpoint_period=1000000",
        "generate_prompt=", "log_to=none",
    )  # fmt: skip
    finish(start("maxbatch", "train", *stated, f"run_dir={run_dir}", log=log, cache=folder / "cache"), log)
    records = metrics_of(run_dir)
    detail = {"updates": len(records), "loss": records[-1]["loss"], "tokens": records[-1]["tokens_seen"]}
    bar = budget.bar if platform.python_version().startswith(f"{PYTHON}.") else None
    title = f"{name}: loss after {tokens} tokens"
    return Measurement(title, records[-1]["eval_loss"], "nats/byte", bar=bar, detail=detail)
