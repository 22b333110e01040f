"""Arrays in host memory, aligned and copied for speed."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import numpy as np

_LINE = 64  # bytes of a cache line


def empty_aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialised array that a CPU device adopts without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + size].view(dtype).reshape(shape)


def zeros_to_copy(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns zeros that a CPU device copies and does not adopt, which take no memory themselves
    until they are written to.
    """
    size, unaligned = math.prod(shape) * dtype.itemsize, _LINE // 4
    # The allocator could give memory that was in use before.
    pages = mmap.mmap(-1, size + unaligned, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8, size, unaligned).view(dtype).reshape(shape)


def copy_by_lines(source: np.ndarray, target: np.ndarray) -> None:
    """Copies by cache lines of the target; a transposition along either array would miss the
    cache.
    """
    if source.dtype == target.dtype:
        source, target = (array.view(f"u{array.itemsize}") for array in (source, target))
    step = _LINE // target.itemsize
    whole = source.strides[-1] == source.itemsize
    for first in range(0, target.shape[-1], target.shape[-1] if whole else step):
        last = slice(first, None if whole else first + step)
        target[..., last] = source[..., last]


def return_freed_memory() -> None:
    """Returns freed memory to the system, where the allocator has a function for it, as glibc's.

    Otherwise the allocator keeps some of it for each thread that has used it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
