"""Checksums of arrays: the same in every release, by a program that takes few arrays at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.run.weights.checksums import array_checksums, checksums_by, lower_checksums
from maxbatch.system.hashing import mixed

# of the numbers from 0 to 23 in the shape [2, 3, 4], and to 119 in [1, 2, 3, 4, 5]
CHECKSUMS = {
    "float32": (2378902428, 2013145510),
    "int32": (3062398704, 1662637180),
    "bfloat16": (3357769991, 1851184673),
    "int8": (3062398704, 1662637180),
    "bool": (3754342463, 2821415766),
}


def checksum_of(x: np.ndarray) -> int:
    """The checksum of an array of 4-byte numbers, without JAX."""
    place = np.zeros(x.shape, np.uint32)
    for index in np.indices(x.shape, np.uint32):
        place = place * np.uint32(0x9E3779B1) + index
    words = np.ascontiguousarray(x).view(np.uint32) ^ (place * np.uint32(0xCC9E2D51))
    return int(mixed(words).sum(dtype=np.uint32))


@pytest.mark.parametrize("dtype", CHECKSUMS)
def test_checksums_are_those_of_every_release(dtype: str) -> None:
    arrays = [jnp.arange(np.prod(s)).astype(dtype).reshape(s) for s in ((2, 3, 4), (1, 2, 3, 4, 5))]
    assert tuple(array_checksums(arrays)) == CHECKSUMS[dtype]


def test_a_state_has_the_checksum_of_each_array_alone_by_a_program_of_few_arrays() -> None:
    rng = np.random.default_rng(0)
    # of parameters and two moments, and a count of steps
    shapes = 3 * [*4 * [(2, 8)], *2 * [(2, 64, 64)], (64, 256)] + [()]
    arrays = [rng.integers(0, 99, shape).astype(np.float32) for shape in shapes]
    state = [jnp.asarray(x) for x in arrays]
    found = array_checksums(state)
    assert [checksum_of(x) for x in arrays] == list(found)
    ((taken,), _) = lower_checksums(state).args_info
    assert [x.shape for x in taken] == [*4 * [(2, 8)], *2 * [(2, 64, 64)], (64, 256), ()]
    ((taken,), _) = lower_checksums([x for x in state if x.shape != (64, 256)]).args_info
    assert [x.shape for x in taken] == [*2 * [(2, 8)], (2, 64, 64), ()], "few bytes are read twice"


def test_on_several_cpu_devices_a_run_of_the_program_ends_before_the_next_one_begins() -> None:
    """Of two programs in flight, each can hold threads that the other's collectives wait for."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    state = [jax.device_put(np.ones((2, 8), np.float32), NamedSharding(mesh, P("data")))] * 4
    events: list[str] = []

    class Sums:
        def __init__(self, count: int) -> None:
            self._sums = np.zeros(count, np.uint32)

        def block_until_ready(self) -> Sums:
            events.append("end")
            return self

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return self._sums

    def program(arrays: list[jax.Array]) -> Any:
        events.append("begin")
        return Sums(len(arrays))

    checksums_by(program, state)(state)
    assert events == ["begin", "end"] * 4
