"""Small datasets on disk, and configs that read them; shared by the tests of the data room."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from maxbatch import load_config
from maxbatch.config.config import Config
from maxbatch.data.stream.reader import Order, RowBlocks
from maxbatch.data.stream.rows import RowArrays
from maxbatch.data.stream.stream import Stream

LENGTH = 16
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "it",
    "sleeps",
]


def some_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Distinct texts of 1 to about `longest` bytes."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 12))) for _ in range(count)]
    return [f"{number}{text}"[: rng.integers(1, longest) + 3] for number, text in enumerate(texts)]


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def jsonl_config(path: Path, texts: Sequence[str] | None = None, *overrides: str) -> Config:
    """A config that reads `path`, which is written first where texts are given."""
    if texts is not None:
        write_jsonl(path, [{"text": text} for text in texts])
    return load_config(
        overrides=[
            "dataset_type=jsonl",
            f"dataset_path={path}",
            f"max_target_length={LENGTH}",
            *overrides,
        ]
    )


def mixture_config(mixture: str | Path, *overrides: str) -> Config:
    """Rows of a mixture, of one document each."""
    keys = [
        "dataset_type=jsonl",
        f"dataset_path={mixture}",
        f"max_target_length={LENGTH}",
        "packing=false",
    ]
    return load_config(overrides=[*keys, *overrides])


def synthetic_config(*overrides: str) -> Config:
    return load_config(
        overrides=["dataset_type=synthetic", f"max_target_length={LENGTH}", *overrides]
    )


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    """Whether two samples or blocks are equal, bit for bit and in their types."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and np.array_equal(left[name], right[name])
        for name in left
    )


def rows_of(stream: Stream, order: Order) -> Iterator[RowArrays]:
    """The samples of an order one by one, arrays [L], read ahead in blocks."""
    with stream.reader_of(order) as reader:
        while len((block := reader.take(256))["tokens"]):
            for place in range(len(block["tokens"])):
                yield {name: array[place] for name, array in block.items()}


def row_by_row(stream: Stream, order: Order) -> grain.MapDataset:
    """A Grain dataset whose elements are the samples of an order, arrays [L]."""
    blocks = RowBlocks(stream.batch, order, 1)
    return grain.MapDataset.source(blocks).map(
        lambda block: {name: a[0] for name, a in block.items()}
    )
