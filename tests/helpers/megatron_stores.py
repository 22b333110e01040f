"""Stores of Megatron-LM, byte by byte from its published format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}
Documents = list[list[list[int]]]  # tokens of sequences of documents


def write_megatron(
    prefix: Path, documents: Documents, dtype: str = "uint16", modes: Sequence[int] | None = None
) -> Path:
    """Writes PREFIX.bin and PREFIX.idx; returns the prefix."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    places = np.cumsum([0, *(sequence.nbytes for sequence in sequences)], dtype=np.int64)[:-1]
    marks = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(marks))
    arrays = (lengths, places, marks, *([] if modes is None else [np.array(modes, np.int8)]))
    Path(f"{prefix}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    Path(f"{prefix}.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    return prefix


def some_documents(count: int, seed: int = 0, vocab_size: int = 120) -> Documents:
    """Returns documents of 0 to 3 sequences of 0 to 40 tokens."""
    draw = np.random.default_rng(seed)
    return [
        [
            draw.integers(0, vocab_size, draw.integers(0, 41)).tolist()
            for _ in range(draw.integers(0, 4))
        ]
        for _ in range(count)
    ]


def joined(documents: Documents) -> list[list[int]]:
    """Returns the tokens of each document."""
    return [[token for sequence in document for token in sequence] for document in documents]
