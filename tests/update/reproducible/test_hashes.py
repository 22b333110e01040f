"""Hashes of a state name the array, and the copy, in which one bit differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.system.errors import TrainingError
from maxbatch.update.reproducible.hashes import StateHasher, StateHashes, named_arrays
from maxbatch.update.state import TrainState

SHARDED = {"a": P("fsdp"), "b": P(None, ("fsdp", "data")), "count": P()}
WHOLE = dict.fromkeys(SHARDED, P())


def some_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(8, 3)).astype(np.float32),
        "b": rng.normal(size=(2, 4)).astype("bfloat16"),
        "count": np.array(7, np.int32),
    }


def hashes_of(
    arrays: dict[str, np.ndarray],
    specs: dict[str, P],
    shape: tuple[int, int],
    damage: Callable[[str, int, np.ndarray], np.ndarray] = lambda name, device, part: part,
) -> StateHashes:
    """Hashes parameters a and b and a count on a mesh; `damage` changes the part of a device."""
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = Mesh(devices, ("data", "fsdp"))

    def placed(name: str) -> jax.Array:
        x, sharding = arrays[name], NamedSharding(mesh, specs[name])
        parts = [
            jax.device_put(damage(name, device.id, x[index]), device)
            for device, index in sharding.devices_indices_map(x.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    state: Any = TrainState({name: placed(name) for name in "ab"}, placed("count"))  # type: ignore[arg-type]
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    hasher = StateHasher(abstract, mesh)
    program = hasher.lower().compile()
    return hasher.read(np.asarray(program(list(named_arrays(state).values()))), step=5)


def flipped(x: np.ndarray) -> np.ndarray:
    """Returns an array with the last bit of its last element flipped."""
    changed = np.array(x)
    words = changed.reshape(-1).view(f"u{x.itemsize}")
    words[-1] ^= 1
    return changed


def test_a_hash_depends_on_no_sharding_and_on_every_bit() -> None:
    arrays = some_arrays()
    expected = hashes_of(arrays, WHOLE, (1, 1))
    assert hashes_of(arrays, SHARDED, (2, 2)) == expected
    for name, key in (("a", "params['a']"), ("b", "params['b']"), ("count", "opt_state")):
        other = hashes_of(arrays | {name: flipped(arrays[name])}, SHARDED, (2, 2))
        assert other.of_state != expected.of_state
        assert [n for n, h in other.of_arrays.items() if h != expected.of_arrays[n]] == [key]


def test_copies_that_differ_in_one_bit_are_named() -> None:
    def damage(name: str, device: int, part: np.ndarray) -> np.ndarray:
        return flipped(part) if (name, device) == ("a", 3) else part

    message = (
        r"update 5: params\['a'\] of device 3 on host 0 differs from its copy on device 1 of host 0"
    )
    with pytest.raises(TrainingError, match=message):
        hashes_of(some_arrays(), SHARDED, (2, 2), damage)
