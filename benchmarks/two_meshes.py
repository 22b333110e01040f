"""`maxbatch rl` on two meshes, each with half of the simulated devices, as run by two
benchmarks.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.commands import finish, metrics_of, start
from benchmarks.measurement import Measurement, ratio

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


def updates_in_turns(
    title: str,
    sides: Mapping[str, Sequence[str]],
    *,
    turns: int,
    steps: int,
    num_devices: int,
    bar: float | None = None,
    **variables: str,
) -> list[Measurement]:
    """Trains two runs in turns; returns their ratio of update times, and the share in which both
    meshes work.

    Args:
      title: of the ratio.
      sides: the keys that each of the two runs adds to the shared ones, by name.
      turns: runs of each.
      steps: updates of a run, of which the first two compile and do not count.
      num_devices: simulated devices, of both meshes together.
      bar: the largest allowed ratio.
      variables: of the environment of the runs.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    both: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            for number, (name, keys) in enumerate(sides.items()):
                run_dir = Path(folder) / f"{number}-{turn}"
                words = (
                    "rl",
                    *_RUN,
                    *keys,
                    f"steps={steps}",
                    f"run_dir={run_dir}",
                    "--simulate-devices",
                    str(num_devices),
                )
                log = run_dir.with_suffix(".log")
                finish(
                    start("maxbatch", *words, log=log, cache=Path(folder) / "cache", **variables),
                    log,
                )
                records = metrics_of(run_dir)[2:]
                times[name].append(statistics.median(r["step_time_s"] for r in records))
                both[name].append(statistics.median(r["busy_fraction/both"] for r in records))
    first, second = times.values()
    return [
        ratio(title, second, first, bar=bar),
        *(
            Measurement(
                f"share of an update in which both sides have work, {name}",
                statistics.median(values),
                samples=values,
            )
            for name, values in both.items()
        ),
    ]
