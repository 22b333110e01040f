"""(d) The feed, batches cut and placed on their devices, against bare Grain loops over the same
source: one row after the other, and in batches by Grain's own threads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from benchmarks.measurement import Measurement, ratio, seconds_in_turns
from maxbatch.config.loading import load_config
from maxbatch.data.feed.feed import Feed
from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.data.stream.reader import Contiguous, RowBlocks
from maxbatch.data.stream.rows import RowArrays
from maxbatch.data.stream.stream import open_stream
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.batch import BatchPlan

BAR = 0.95
_ROWS_OF_A_DEVICE = 8


def measure(quick: bool) -> list[Measurement]:
    """Ratios of rows/s, feed over bare loops, for documents joined, packed by best fit, and
    mixed.
    """
    batches, documents = (4, 300) if quick else (100, 20_000)
    with tempfile.TemporaryDirectory(prefix="maxbatch-feed-") as folder:
        web, code = (
            _documents(Path(folder, name), documents, seed)
            for seed, name in enumerate(("web", "code"))
        )
        datasets = {
            "concatenate": [f"dataset_path={web}"],
            "best_fit": [f"dataset_path={web}", "packing_strategy=best_fit"],
            "mixture": [f"dataset_path={web},0.7;{code},0.3", "packing_strategy=best_fit"],
        }
        return [
            figure
            for name, overrides in datasets.items()
            for figure in _compare(
                name, ["dataset_type=jsonl", *overrides], batches, turns=3 if quick else 9
            )
        ]


def _documents(path: Path, count: int, seed: int) -> Path:
    """Writes documents with the lengths of web text: log-normal, median 500."""
    lengths = np.random.default_rng(seed).lognormal(np.log(500), 1.25, count).astype(int) + 1
    path = path.with_suffix(".jsonl")
    path.write_text(
        "".join(json.dumps({"text": "word " * (length // 5 + 1)}) + "\n" for length in lengths)
    )
    return path


def _only_row(block: RowArrays) -> RowArrays:
    return {name: array[0] for name, array in block.items()}


def _compare(name: str, overrides: list[str], batches: int, turns: int) -> list[Measurement]:
    size = [
        f"per_device_batch_size={_ROWS_OF_A_DEVICE}",
        "gradient_accumulation_steps=2",
        f"steps={batches}",
    ]
    config = load_config(overrides=[*overrides, *size])
    stream = open_stream(config)
    manager = BatchPlan.from_config(config, num_devices=jax.device_count()).manager
    samples = manager.position_after(batches)
    micro_batch = _ROWS_OF_A_DEVICE * jax.device_count()
    placement = Placement(batch_sharding(make_mesh(config)), config.max_target_length)

    rows = grain.MapDataset.source(RowBlocks(stream.batch, Contiguous(0, samples), 1)).map(
        _only_row
    )

    def feed() -> None:
        with Feed(
            stream, manager, lambda *_: BatchShape(micro_batch, 2), placement, 0
        ) as batches_of_run:
            for staged in batches_of_run:
                jax.block_until_ready(staged.batch)

    def row_by_row() -> None:
        for _ in rows:
            pass

    def in_threads() -> None:
        in_batches = rows.batch(2 * micro_batch)
        for _ in in_batches.to_iter_dataset(
            grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)
        ):
            pass

    sides: dict[str, Callable[[], Any]] = {
        "feed": feed,
        "row by row": row_by_row,
        "in threads": in_threads,
    }
    for side in sides.values():
        side()
    seconds = seconds_in_turns(sides, turns)
    tokens = samples * config.max_target_length
    return [
        *(
            ratio(
                f"{name}: feed / bare Grain loop {bare}",
                seconds[bare],
                seconds["feed"],
                bar=BAR,
                sense="at least",
            )
            for bare in ("row by row", "in threads")
        ),
        *(
            Measurement(
                f"{name}: {side}, million tokens/s", sorted(rates)[len(rates) // 2], samples=rates
            )
            for side, rates in (
                (s, [tokens / t / 1e6 for t in values]) for s, values in seconds.items()
            )
        ),
    ]
