"""Shards of a state as blocks of files, and back: onto any mesh, on any number of hosts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
import numpy as np

from maxbatch.parallel.hosts import gather
from maxbatch.parallel.trees import Tree, TreeOf
from maxbatch.run.folder.old_forms import refuse_old_arrays
from maxbatch.run.folder.position import DamagedError
from maxbatch.run.weights.shard_files import (
    INDEX,
    OTHER_ARRAYS,
    THREADS,
    ArrayForm,
    Spans,
    block_of,
    cut,
    in_groups,
    missing_array,
    read_blocks,
    read_index,
    sides,
    within,
)
from maxbatch.system.errors import reading
from maxbatch.system.processes.threads import in_threads
from maxbatch.system.storage.storage import AnyPath

T = TypeVar("T")
# bytes of arrays, as far as this host holds them, that are read together
_MOST_AT_A_TIME = 256 << 20


def forms_of(tree: Tree) -> tuple[ArrayForm, ...]:
    """Returns the names, shapes and types of the arrays of a tree."""
    leaves = jax.tree.leaves_with_path(tree)
    return tuple(
        ArrayForm(jax.tree_util.keystr(path), tuple(x.shape), str(x.dtype)) for path, x in leaves
    )


def spans_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Spans:
    """Returns the rectangle of a shard's index."""
    bounds = (side.indices(size) for side, size in zip(index, shape, strict=True))
    return tuple((first, last) for first, last, _ in bounds)


def blocks_here(leaves: Sequence[jax.Array], of_all_hosts: bool) -> dict[str, np.ndarray]:
    """Copies the blocks on this host's devices, each once.

    Args:
      of_all_hosts: copies only first replicas, so that each block is copied on one of all hosts.
    """
    shards = {
        (array, spans_of(shard.index, leaf.shape)): shard.data
        for array, leaf in enumerate(leaves)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0 or not of_all_hosts
    }
    for data in shards.values():
        data.copy_to_host_async()
    copies = in_threads(_copied, shards.values(), THREADS)
    return {
        name: block
        for (array, spans), copy in zip(shards, copies, strict=True)
        for name, block in cut(array, spans, copy)
    }


def _copied(data: jax.Array) -> np.ndarray:
    """Copies a device's array to the host.

    `np.asarray` of a CPU array aliases it, so it is copied here; other devices copy anyway.
    """
    (device,) = data.devices()
    return np.array(data) if device.platform == "cpu" else np.asarray(data)


def targets_here(leaf: jax.ShapeDtypeStruct) -> set[Spans]:
    """Returns the rectangles of an array that this host's devices hold."""
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    return {spans_of(index or (), leaf.shape) for index in indices}


def read_item(item: AnyPath, abstract: TreeOf, partial: bool = False) -> TreeOf:
    """Reads the arrays of an item of a checkpoint, such as `params`; each host reads the blocks of
    its devices.

    Args:
      partial: whether there may be other arrays.

    Raises:
      DamagedError: they are damaged, or others (`OTHER_ARRAYS`).
      OSError, ConfigError, TrainingError: the system or the store refuses the read, or Orbax wrote
        the arrays.
    """
    try:
        stored, _ = read_index(item / INDEX)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        refuse_old_arrays(item)
        raise DamagedError(f"{item.name}/{INDEX} is missing") from None

    forms, numbers = forms_of(abstract), {form: number for number, form in enumerate(stored.forms)}
    if not numbers.keys() >= set(forms) or (len(forms) < len(numbers) and not partial):
        differing = sorted(
            {form.name for form in set(forms) ^ (set() if partial else numbers.keys())}
        )
        raise DamagedError(f"{OTHER_ARRAYS}, such as {differing[0] if differing else 'none'}")
    if name := missing_array(stored.forms, stored.places):
        raise DamagedError(f"{name} is not whole")

    blocks: dict[int, list[tuple[Spans, str]]] = defaultdict(list)
    for name in stored.places:
        array, spans = block_of(name)
        blocks[array].append((spans, name))
    leaves, tree = jax.tree.flatten(abstract)
    made: list[jax.Array] = []
    targets = [targets_here(leaf) for leaf in leaves]
    sizes = [sum(math.prod(sides(part)) for part in parts) for parts in targets]
    num_bytes = {number: size * leaves[number].dtype.itemsize for number, size in enumerate(sizes)}

    # in groups, so that the blocks of only some arrays are in host memory at once
    for group in in_groups(num_bytes, _MOST_AT_A_TIME):
        there = {number: blocks[numbers[forms[number]]] for number in group}
        wanted = [
            name
            for number in group
            for spans, name in there[number]
            if any(common(spans, target) is not None for target in targets[number])
        ]

        values, errors = read_blocks(stored, wanted)
        if errors:
            raise errors[0]
        if bad := next((name for name in wanted if name not in values), None):
            raise DamagedError(f"{stored.forms[block_of(bad)[0]].name} does not match its checksum")
        made += [
            assembled(
                leaves[number],
                [(spans, values[name]) for spans, name in there[number] if name in values],
            )
            for number in group
        ]

    arrays: TreeOf = jax.tree.unflatten(tree, made)
    return arrays


def read_together(read: Callable[[], T], checkpoint: AnyPath) -> tuple[T | None, str | None]:
    """Reads a part of a checkpoint on all hosts; returns it, or None and its damage on one of them.

    Raises:
      ConfigError, TrainingError: the system or the store refuses the read.
    """
    part, damage = None, None
    try:
        with reading(checkpoint):
            part = read()
    except DamagedError as error:
        damage = str(error)
    damage = next(filter(None, gather(damage)), None)
    return (None, damage) if damage else (part, None)


def common(left: Spans, right: Spans) -> Spans | None:
    """Returns the intersection of two rectangles; None if empty."""
    both = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(left, right, strict=True))
    return both if all(first < last for first, last in both) else None


def assembled(leaf: jax.ShapeDtypeStruct, blocks: Iterable[tuple[Spans, np.ndarray]]) -> jax.Array:
    """Builds an array from blocks that cover this host's shards."""
    made: dict[Spans, np.ndarray] = {}

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        target = spans_of(index or (), leaf.shape)
        if target not in made:
            made[target] = np.empty(sides(target), leaf.dtype)
            for spans, block in blocks:
                if (both := common(spans, target)) is not None:
                    made[target][within(both, target)] = block[within(both, spans)]
        return made[target]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)
