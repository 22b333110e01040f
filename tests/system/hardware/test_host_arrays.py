"""Arrays in host memory: alignment, and content of copies."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from maxbatch.system.hardware.host_arrays import copy_by_lines, empty_aligned


@pytest.mark.parametrize("shape", [[3], [5, 7], [2, 3, 4]])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_an_array_begins_at_a_line_of_memory(shape: list[int], dtype: type) -> None:
    array = empty_aligned(shape, np.dtype(dtype))
    assert (array.ctypes.data % 64, array.shape, array.dtype) == (0, tuple(shape), dtype)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_copy_is_the_source_whatever_the_order_of_its_axes(turned: bool, dtype: type) -> None:
    source = np.arange(70 * 50).reshape(70, 50).astype(dtype)
    source = source.T if turned else source
    target = empty_aligned(list(source.shape), np.dtype(np.float32))
    copy_by_lines(source, target)
    np.testing.assert_array_equal(target, source.astype(np.float32))
