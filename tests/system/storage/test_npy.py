"""Arrays of numpy's file format that others wrote."""

from __future__ import annotations

import io

import numpy as np
import pytest

from maxbatch.system.storage.bounded import RefusedContent
from maxbatch.system.storage.npy import npy_header, read_npy


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    "array", [np.arange(5), np.zeros(0, np.uint8), np.array([1.5], np.float32)]
)
def test_what_numpy_saved_is_read(array: np.ndarray) -> None:
    found = read_npy(saved(array), "file")
    assert found.dtype == array.dtype and found.tolist() == array.tolist()
    assert npy_header(saved(array)[:4096], "file")[:2] == (len(array), array.dtype)


def stating(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"x" * 200,
        saved(np.arange(5))[:-1],
        saved(np.arange(5)) + b"x",
        saved(np.zeros((2, 2))),
        saved(np.array(["a"])),
        stating("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }"),
        stating("{'descr': '<i8', 'fortran_order': False, 'shape': (-8,), }"),
        stating("{'descr': '|O', 'fortran_order': False, 'shape': (8,), }"),
        stating("{'descr': '|V0', 'fortran_order': False, 'shape': (8,), }"),
        stating("(" * 5000),
        stating("{'descr': "),
    ],
)
def test_an_array_of_another_size_or_kind_than_its_bytes_is_refused_before_memory_is_taken(
    content: bytes,
) -> None:
    with pytest.raises(RefusedContent, match=r"^file: "):
        read_npy(content, "file")
