"""Folders of runs that never ran, for `maxbatch critical-batch`."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

from maxbatch import load_config
from maxbatch.config.loading import dump_config
from maxbatch.plan.place import Place
from maxbatch.run.folder.position import CheckpointRecord, Position
from tests.helpers.tiny import TINY_RUN


def fake_run(
    path: Path,
    *overrides: str,
    batch: int = 16,
    updates: int = 640,
    every: int = 80,
    first: int = 80,
) -> Path:
    """A run folder as a run leaves it, without the arrays."""
    config = load_config(
        overrides=[*TINY_RUN, f"global_batch_size={batch}", f"steps={updates}", *overrides]
    )
    path.mkdir(parents=True)
    (path / "config.yml").write_text(dump_config(config))
    fixed = {"global_batch_size": batch, "stage": 0, "loss": 1.0, "learning_rate": 1e-3}
    lines = [
        {"step": k, "samples_seen": k * batch, "tokens_seen": 32 * k * batch, **fixed}
        for k in range(1, updates + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in range(first, updates + 1, every):
        write_position(path, Position(step, Place(step * batch)), checksum=step)
    return path


def write_position(path: Path, position: Position, checksum: int) -> None:
    folder = path / "checkpoints" / str(position.step) / "position"
    folder.mkdir(parents=True, exist_ok=True)
    record = CheckpointRecord(position, {"data": {}, "model": {}}, checksum, (1, 1))
    (folder / "metadata").write_text(json.dumps(record.to_json()))


def factors(text: str) -> tuple[Fraction, ...]:
    return tuple(map(Fraction, text.split(",")))
