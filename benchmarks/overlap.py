"""(j) What sampling and training side by side is worth: `maxbatch rl` on two meshes of four simulated devices each.

Without chunks the two meshes take turns: all responses, then training on them. With chunks one is sampled while another
is trained on. The updates are the same; the ratio is that of their medians. The simulated devices share the cores, so
where there are fewer cores than one side can use by itself nothing can be won, and `busy_fraction/both` of the metrics
says what two real meshes would have had in hand together.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.measurement import Measurement, ratio
from benchmarks.two_meshes import records_of_run

BAR = 0.75
_CHUNKS = {"in turns": "micro_batch_size=-1", "side by side": "micro_batch_size=64"}


def measure(quick: bool) -> list[Measurement]:
    """Seconds per update side by side over those in turns, and how long both sides had work."""
    times: dict[str, list[float]] = {name: [] for name in _CHUNKS}
    both: dict[str, list[float]] = {name: [] for name in _CHUNKS}
    steps = 3 if quick else 12
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1 if quick else 3):
            for name, chunks in _CHUNKS.items():
                run_dir = Path(folder) / f"{name}{turn}".replace(" ", "")
                records = records_of_run(run_dir, (chunks,), steps, num_devices=8)
                times[name].append(statistics.median(r["step_time_s"] for r in records))
                both[name].append(statistics.median(r["busy_fraction/both"] for r in records))
    return [
        ratio("update side by side / in turns", times["side by side"], times["in turns"], bar=BAR),
        *(
            Measurement(
                f"share of an update in which both sides have work, {name}", statistics.median(values), samples=values
            )
            for name, values in both.items()
        ),
    ]
