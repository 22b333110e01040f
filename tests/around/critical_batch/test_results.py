"""The sentence about a checkpoint and the schedule that follows from all of them never contradict
each other.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from maxbatch.around.critical_batch.critical_size import critical_batch
from maxbatch.around.critical_batch.measured_run import Fork
from maxbatch.around.critical_batch.results import ForkResult, Measurement


def measured(losses: dict[int, float], base: int) -> Measurement:
    fork = Fork(step=100, samples_seen=base * 100, batch_size=base, learning_rate=1e-3, checksum=0)
    config = SimpleNamespace(learning_rate=1e-3, learning_rate_scaling="sqrt", steps=None)
    run = SimpleNamespace(
        first_batch_size=base, config=config, path=Path("runs/base"), reference_batch_size=base
    )
    plan = SimpleNamespace(scaling="sqrt")
    found = Measurement(cast(Any, run), cast(Any, plan), cast(Any, None), tolerance=0.01)
    vars(found)["forks"] = [ForkResult(fork, [], critical_batch(losses, base, 0.01))]
    return found


def test_a_run_whose_own_batch_is_too_large_gets_a_schedule_that_begins_below_it() -> None:
    found = measured({4: 2.0, 8: 2.5, 16: 3.0}, base=8)
    (result,) = found.forks
    assert (
        str(result)
        == "step 100 (800 samples): critical batch size at most 4, below the run's own 8"
    )
    assert found.stages == [(0, 4)]
    assert "batch_size_schedule=0:4 " in found.command.replace("'", "")


def test_a_run_whose_batch_may_grow_begins_with_its_own() -> None:
    assert measured({8: 2.0, 16: 2.0, 32: 3.0}, base=8).stages == [(0, 8), (800, 16)]
