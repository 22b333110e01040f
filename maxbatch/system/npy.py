"""Arrays in numpy's file format that others wrote: checked before memory is taken for them."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np

from maxbatch.system.bounded import RefusedContent

_HEADER_BYTES = 1 << 16  # at most; numpy reads no header of more than 10,000 characters


class NpyHeader(NamedTuple):
    """The beginning of a file of one array."""

    size: int  # values of the array
    dtype: np.dtype[Any]
    offset: int  # bytes of the header


def npy_header(content: Any, what: str) -> NpyHeader:
    """Returns the header of an array of one axis.

    Args:
      content: the file as a buffer of bytes, or its first 64 KiB.
      what: names it in messages.

    Raises:
      RefusedContent: it is no such array, or not one of numbers.
    """
    file = io.BytesIO(bytes(memoryview(content)[:_HEADER_BYTES]))
    try:
        if np.lib.format.read_magic(file) == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    except Exception as error:  # numpy evaluates the header as Python's literals
        raise RefusedContent(f"{what}: is no array of numpy ({' '.join(str(error).split())[:80]})") from None
    if len(shape) != 1 or shape[0] < 0 or dtype.kind not in "biuf":
        raise RefusedContent(f"{what}: holds an array of shape {str(shape)[:80]}, and must hold a list of numbers")
    return NpyHeader(shape[0], dtype, file.tell())


def read_npy(content: Any, what: str) -> np.ndarray:
    """Returns the array of a file, without a copy; arguments and errors are as of `npy_header`, but for the size.

    Raises:
      RefusedContent: as `npy_header` does, or other bytes follow the header than it states.
    """
    header = npy_header(content, what)
    found = memoryview(content)[header.offset :]
    if header.size * header.dtype.itemsize != len(found):
        raise RefusedContent(f"{what}: states {header.size} numbers, and {len(found)} bytes follow")
    return np.frombuffer(found, header.dtype)
