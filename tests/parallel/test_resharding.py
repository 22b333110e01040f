"""Parameters move to another mesh in pieces: no device holds a whole array on the way."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.parallel.resharding import Resharding, steps
from maxbatch.plan.mesh_shape import AXES


def mesh(**sizes: int) -> Mesh:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return Mesh(np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape), AXES)


@pytest.mark.parametrize(
    ("old", "spec"), [({"data": 2, "fsdp": 2}, P(None, "fsdp", "tensor")), ({"fsdp": 2, "pipeline": 2}, P("pipeline"))]
)
def test_an_array_is_never_whole_on_the_way_to_a_mesh_of_copies(old: dict[str, int], spec: P) -> None:
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
