"""Arrays in a host's memory, laid out and copied as fast as the memory allows."""

from __future__ import annotations

import math

import numpy as np

_LINE = 64  # bytes of memory that a processor reads and writes at once


def empty_aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array of undefined values that a CPU device takes as its own memory instead of copying it."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + size].view(dtype).reshape(shape)


def copy_by_lines(source: np.ndarray, target: np.ndarray) -> None:
    """Copies by lines of memory of the target: a transposition that goes along either array misses the cache."""
    if source.dtype == target.dtype:
        source, target = (array.view(f"u{array.itemsize}") for array in (source, target))
    step = _LINE // target.itemsize
    whole = source.strides[-1] == source.itemsize
    for first in range(0, target.shape[-1], target.shape[-1] if whole else step):
        last = slice(first, None if whole else first + step)
        target[..., last] = source[..., last]
