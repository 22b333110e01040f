"""`maxbatch rl` on two meshes of simulated devices, half of them each, as two benchmarks run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import finish, metrics_of, start

_RUN = (
    "warm_start_steps=0",
    "eval_interval=-1",
    "enable_checkpointing=false",
    "batch_size=32",
    "num_generations=8",
    "max_target_length=48",
    "base_num_decoder_layers=2",
    "gradient_noise_scale=false",
    "trainer_devices_fraction=0.5",
    "sampler_devices_fraction=0.5",
)


def records_of_run(
    run_dir: Path, arguments: Sequence[str], steps: int, num_devices: int, **variables: str
) -> list[dict[str, Any]]:
    """Trains a new run and returns the metrics of its updates but the first two, which compile.

    Args:
      run_dir: its folder; runs beside each other share a cache of compiled programs.
      arguments: keys that differ from the run that all share.
      steps: updates.
      num_devices: simulated devices, of both meshes together.
      variables: of its environment.
    """
    log, cache = run_dir.with_suffix(".log"), run_dir.parent / "cache"
    words = ("rl", *_RUN, *arguments, f"steps={steps}", f"run_dir={run_dir}", "--simulate-devices", str(num_devices))
    finish(start("maxbatch", *words, log=log, cache=cache, **variables), log)
    return metrics_of(run_dir)[2:]
