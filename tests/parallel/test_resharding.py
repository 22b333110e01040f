"""Parameters move to another mesh in pieces: no device holds a whole array on the way."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.parallel.resharding import Resharding, steps
from maxbatch.plan.mesh_shape import AXES

Placed = tuple[tuple[int, ...], dict[str, int]]  # numbers of the devices, sizes of the axes


def mesh(order: Sequence[int] = range(8), **sizes: int) -> Mesh:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = [jax.devices()[number] for number in order[: int(np.prod(shape))]]
    return Mesh(np.asarray(devices).reshape(shape), AXES)


@pytest.mark.parametrize(
    ("old", "spec"),
    [
        ({"data": 2, "fsdp": 2}, P(None, "fsdp", "tensor")),
        ({"fsdp": 2, "pipeline": 2}, P("pipeline")),
    ],
)
def test_an_array_is_never_whole_on_the_way_to_a_mesh_of_copies(
    old: dict[str, int], spec: P
) -> None:
    array_LxDxF = np.arange(4 * 16 * 32, dtype=np.float32).reshape(4, 16, 32)
    source = jax.device_put(array_LxDxF, NamedSharding(mesh(**old), spec))
    target = NamedSharding(mesh(data=2, tensor=2), P(None, None, "tensor"))
    move = Resharding([target])
    (moved,) = move([source])
    assert moved.sharding == target and np.array_equal(moved, array_LxDxF)
    used = move._exchange.lower([source], (source.sharding,)).compile().memory_analysis()
    assert used.temp_size_in_bytes < array_LxDxF.nbytes


def test_an_array_that_the_devices_do_not_divide_takes_no_steps_and_arrives() -> None:
    target = NamedSharding(mesh(data=2, tensor=2), P())
    source = jax.device_put(np.ones(3, np.float32), NamedSharding(mesh(fsdp=4), P()))
    assert not list(steps((3,), source.sharding, target))
    (moved,) = Resharding([target])([source])
    assert moved.sharding == target and np.array_equal(moved, np.ones(3))


@pytest.mark.parametrize(
    ("old", "spec", "new"),
    [
        (
            ((2, 0, 3, 1), {"data": 2, "fsdp": 2}),
            P(None, "fsdp"),
            ((7, 5, 6, 4), {"data": 2, "tensor": 2}),
        ),
        (((0, 1, 2), {"data": 3}), P(), ((4, 5), {"tensor": 2})),  # 3 devices divide no dimension
    ],
)
def test_other_devices_get_it_in_pieces(old: Placed, spec: P, new: Placed) -> None:
    there, here = (mesh(order, **sizes) for order, sizes in (old, new))
    arrays = [
        np.arange(4 * 16 * 32, dtype=np.float32).reshape(4, 16, 32),
        np.ones(5, np.float32),
        np.float32(2),
    ]
    sources = [
        jax.device_put(array, NamedSharding(there, spec if array.ndim == 3 else P()))
        for array in arrays
    ]
    targets = [
        NamedSharding(here, P(None, None, "tensor") if array.ndim == 3 else P()) for array in arrays
    ]
    move = Resharding(targets)
    handed = move.hand_over(sources)
    most = max(piece.data.size for piece in handed.pieces[0].addressable_shards)
    assert most == handed.pieces[0].size // here.size <= 0.6 * arrays[0].size, (
        "an even share, with its padding"
    )
    moved = move.receive(handed)
    assert [array.sharding for array in moved] == targets
    assert all(map(np.array_equal, moved, arrays))
    if here.size == 4:
        split = move._split.lower(sources, tuple(array.sharding for array in sources), handed.forms)
        for program in (split, move._join.lower(handed.pieces, handed.forms)):
            assert program.compile().memory_analysis().temp_size_in_bytes < arrays[0].nbytes
