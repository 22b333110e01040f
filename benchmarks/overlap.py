"""(j) The gain of sampling and training side by side: `maxbatch rl` on two meshes of four simulated
devices each.

Without chunks the two meshes take turns: all responses, then training on them. With chunks one is
sampled while another is trained on. The updates are the same; the ratio is that of their medians.
The simulated devices share the cores, so there is no gain with fewer cores than one side can use.
The metric `busy_fraction/both` shows the overlap that two real meshes would have.
"""

from __future__ import annotations

from benchmarks.measurement import Measurement
from benchmarks.two_meshes import updates_in_turns

BAR = 0.75
_CHUNKS = {"in turns": ("micro_batch_size=-1",), "side by side": ("micro_batch_size=64",)}


def measure(quick: bool) -> list[Measurement]:
    """Seconds per update side by side over those in turns, and how long both sides had work."""
    turns, steps = (1, 3) if quick else (3, 12)
    return updates_in_turns(
        "update side by side / in turns", _CHUNKS, turns=turns, steps=steps, num_devices=8, bar=BAR
    )
