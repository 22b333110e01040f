"""Foreign numpy files, checked before memory is allocated."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np

from maxbatch.system.storage.bounded import RefusedContent

_HEADER_BYTES = 1 << 16  # bound; numpy's own is 10,000 characters


class NpyHeader(NamedTuple):
    """The header of a file of one array."""

    size: int  # values of the array
    dtype: np.dtype
    offset: int  # bytes before the values


def npy_header(content: Any, label: str) -> NpyHeader:
    """Parses the header of a one-dimensional array.

    Args:
      content: the file as a buffer of bytes, or its first 64 KiB.
      label: its name in messages.

    Raises:
      RefusedContent: the content is not a one-dimensional array of numbers.
    """
    file = io.BytesIO(bytes(memoryview(content)[:_HEADER_BYTES]))
    try:
        if np.lib.format.read_magic(file) == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    except Exception as error:  # numpy evaluates the header as Python's literals
        raise RefusedContent(
            f"{label}: is not a NumPy array ({' '.join(str(error).split())[:80]})"
        ) from None
    if len(shape) != 1 or shape[0] < 0 or dtype.kind not in "biuf":
        raise RefusedContent(
            f"{label}: holds an array of shape {str(shape)[:80]}, and must hold a list of numbers"
        )
    return NpyHeader(shape[0], dtype, file.tell())


def read_npy(content: Any, label: str) -> np.ndarray:
    """Returns the array of a file without a copy; arguments as for `npy_header`, with the whole
    content.

    Raises:
      RefusedContent: as `npy_header`, or the number of bytes differs from the header's.
    """
    header = npy_header(content, label)
    data = memoryview(content)[header.offset :]
    if header.size * header.dtype.itemsize != len(data):
        raise RefusedContent(f"{label}: states {header.size} numbers, and {len(data)} bytes follow")
    return np.frombuffer(data, header.dtype)
