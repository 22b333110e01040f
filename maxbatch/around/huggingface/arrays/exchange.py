"""Tensors of a Hugging Face folder onto the devices of several hosts, each of which reads a share
of them.

A device's part of a parameter is rarely contiguous in a file: if the mesh splits the columns of a
tensor, every host would read nearly all of it. So every device reads an equal, contiguous share of
rows, and the devices exchange them for their parts, one layer's tensor at a time. Together the
hosts read each tensor once.

Shapes: R rows and C columns of a tensor, or of the part of it that is a parameter's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.around.huggingface.arrays.tensors import TensorPlace
from maxbatch.system.hardware.host_arrays import copy_by_lines, empty_aligned
from maxbatch.system.storage.safetensors import StoredTensor


def read_shared(
    stored: dict[str, StoredTensor], place: TensorPlace, abstract: jax.ShapeDtypeStruct
) -> jax.Array:
    """Returns a parameter of matrices. Every host of its mesh must call this, for the same
    parameters in one order.

    Args:
      stored: the tensors by name.
      place: of the parameter; each of its tensors has two axes.
      abstract: the parameter's shape, its type, and its place on the mesh.
    """
    assert isinstance(abstract.sharding, NamedSharding)
    exchange = exchange_of(place, abstract.sharding, len(abstract.shape))
    add = adder_of(place, abstract.sharding, exchange)
    # Values that are multiplied are rounded to the parameter's type once, afterwards, as on a
    # single host.
    dtype = np.dtype(np.float32) if place.layout.is_scaled else abstract.dtype
    filled = jax.jit(
        lambda: jnp.zeros(abstract.shape, abstract.dtype), out_shardings=abstract.sharding
    )()
    with ThreadPoolExecutor() as threads:
        for number, name in enumerate(place.names):
            tensor_RxC = _by_rows(stored[name], place, exchange[0], dtype, threads)
            # Of two programs in flight on CPU devices, each can hold threads that the other's
            # collectives wait for.
            filled = add(filled.block_until_ready(), tensor_RxC, np.int32(number))
    whole: jax.Array = filled.block_until_ready()
    return whole


def exchange_of(place: TensorPlace, sharding: NamedSharding, num_axes: int) -> list[NamedSharding]:
    """Returns the successive shardings of a tensor, from equal shares of rows to the parameter's
    parts.

    First the rows are gathered along mesh axes that do not split the parameter, then exchanged
    along the others. In one move the compiler would give every device the whole tensor.
    """
    by_axis = [*sharding.spec, *[None] * (num_axes - len(sharding.spec))][
        num_axes - len(place.shape) :
    ]
    of_tensor = [by_axis[axes[0]] for axes in place.layout.axes]
    splitting = [
        axis for axes in of_tensor for axis in ((axes,) if isinstance(axes, str) else axes or ())
    ]
    others = [axis for axis in sharding.mesh.axis_names if axis not in splitting]
    steps = [P((*splitting, *others)), P(tuple(splitting)), P(*of_tensor)]
    return [NamedSharding(sharding.mesh, step) for step in steps]


def _by_rows(
    tensor: StoredTensor,
    place: TensorPlace,
    sharding: NamedSharding,
    dtype: np.dtype,
    threads: ThreadPoolExecutor,
) -> jax.Array:
    """Returns a parameter's part of a tensor, split evenly by rows, with rows of zeros at its
    end.
    """
    num_rows, num_columns = place.part_shape
    share = -(-num_rows // sharding.num_devices)
    shape = (share * sharding.num_devices, num_columns)

    def rows_of(item: tuple[jax.Device, tuple[slice, ...]]) -> jax.Array:
        device, index = item
        first = index[0].indices(shape[0])[0]
        last = min(first + share, num_rows)
        rows = empty_aligned([share, num_columns], dtype)
        rows[max(0, last - first) :] = 0
        if first < last:
            copy_by_lines(place.rows(tensor, first, last), rows[: last - first])
        held: jax.Array = jax.device_put(rows, device)
        return held

    indices = sharding.addressable_devices_indices_map(shape)
    return jax.make_array_from_single_device_arrays(
        shape, sharding, list(threads.map(rows_of, indices.items()))
    )


def adder_of(
    place: TensorPlace, sharding: NamedSharding, exchange: list[NamedSharding]
) -> Callable[[jax.Array, jax.Array, np.int32], jax.Array]:
    """Returns a compiled function that puts one of the parameter's tensors into it."""

    def add(filled: jax.Array, tensor_RxC: jax.Array, number: np.int32) -> jax.Array:
        for step in exchange:
            tensor_RxC = jax.lax.with_sharding_constraint(tensor_RxC, step)
        parameter = place.layout.to_parameter(tensor_RxC[: place.part_shape[0]], place.shape)
        numbers = jnp.arange(len(place.parts)).reshape(*place.stacked, *[1] * len(place.shape))
        return jnp.where(numbers == number, parameter.astype(filled.dtype), filled)

    return jax.jit(add, donate_argnums=0, out_shardings=sharding)
