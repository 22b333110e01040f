"""The meshes that `fit --mesh auto` tries: a short list, likely best first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping

from maxbatch.config.config import Config
from maxbatch.config.values import Value
from maxbatch.families.matrices import axis_sizes, parameters
from maxbatch.plan.mesh_shape import AXES, MeshShape, axis_key
from maxbatch.plan.partition import PARAMETER_RULES

# Of a slice's devices, (tensor, data); fsdp takes the rest. Weights over all devices cost the least
# memory. A tensor axis gathers smaller weights but sums activations; it also lets a batch smaller
# than the devices run. A data axis without fsdp gathers nothing, and holds the whole state on each
# device.
_LIKELY_BEST = ((1, 1), (2, 1), (1, 2), (4, 1), (8, 1), (1, None))
_TENSOR_SIZES = (1, 2, 4, 8)
_CONTEXT_SIZES = (1, 2, 4, 8)
_FREE = ("data", "fsdp", "tensor")
_OF_LONG_ROWS = ("context_parallel_strategy", "context_parallel_load_balance")


def mesh_keys(shape: MeshShape) -> dict[str, int]:
    """Returns all config keys of a mesh."""
    nets = {"ici": shape.ici, "dcn": shape.dcn}
    return {axis_key(net, axis): sizes[axis] for net, sizes in nets.items() for axis in AXES}


def keys_to_state(shape: MeshShape, config: Mapping[str, Value]) -> dict[str, int]:
    """Returns the keys that state a mesh beside a config's, without axes that have one device in
    both.
    """
    return {key: size for key, size in mesh_keys(shape).items() if size != 1 or config[key] != 1}


def mesh_text(shape: MeshShape, config: Mapping[str, Value]) -> str:
    """Returns the keys that state a mesh as overrides: `ici_fsdp_parallelism=16
    ici_tensor_parallelism=4`.
    """
    return " ".join(f"{key}={size}" for key, size in keys_to_state(shape, config).items())


def proposals(
    config: Config, fixed: Collection[str], num_devices: int, num_slices: int
) -> Iterator[dict[str, Value]]:
    """Yields axis sizes as config keys, the likely best first; the devices and the model may still
    refuse them.

    Args:
      config: the config as stated; expert and pipeline axes stay as they are there, and the context
        axis unless it is -1, or a key of `fixed` states how it splits attention.
      fixed: the keys that the user states. Other data, fsdp and tensor axes are chosen. Over slices
        it is the data axis, if no dcn axis is stated.
      num_devices: over all slices.
      num_slices: slices that the devices span.
    """
    over_slices: dict[str, Value] = {}
    if num_slices > 1 and not any(_is_fixed(config, fixed, axis_key("dcn", axis)) for axis in AXES):
        over_slices = {axis_key("dcn", axis): num_slices if axis == "data" else 1 for axis in AXES}
    across_slices = (
        num_slices
        if num_slices > 1
        else math.prod(max(1, config[axis_key("dcn", axis)]) for axis in AXES)
    )
    free = [axis for axis in _FREE if not _is_fixed(config, fixed, axis_key("ici", axis))]
    if _splits_long_rows(config, fixed):
        free.append("context")
    within_slices = math.prod(
        max(1, config[axis_key("ici", axis)]) for axis in AXES if axis not in free
    )
    rest = num_devices // across_slices // within_slices
    for sizes in _splits(free, rest):
        if _divides_model(config, sizes["tensor"]):
            yield {axis_key("ici", axis): sizes[axis] for axis in free} | over_slices


def _splits(free: Collection[str], rest: int) -> Iterator[dict[str, int]]:
    """Yields sizes of the free axes that multiply to `rest`, each once; the others are 1."""
    seen: list[dict[str, int]] = []
    for tensor, context, data in _sizes(free, rest):
        split = {"data": rest if data is None else data, "tensor": tensor, "context": context}
        split["fsdp"] = max(1, rest // max(1, math.prod(split.values())))
        is_free = all(axis in free or size == 1 for axis, size in split.items())
        if is_free and math.prod(split.values()) == rest and split not in seen:
            seen.append(split)
            yield split


def _sizes(free: Collection[str], rest: int) -> Iterator[tuple[int, int, int | None]]:
    """Yields sizes of the axes (tensor, context, data), the last None for all devices. Without a
    free fsdp axis one of them takes the rest.
    """
    contexts = _CONTEXT_SIZES if "context" in free else (1,)
    if "fsdp" in free:
        for tensor, data in _LIKELY_BEST:
            yield tensor, 1, data
            if data == 1:
                for context in contexts[1:]:
                    if tensor * context <= max(_TENSOR_SIZES):
                        yield tensor, context, data
    elif "data" in free:
        for tensor, context in itertools.product(_TENSOR_SIZES, contexts):
            yield tensor, context, rest // (tensor * context)
    elif "tensor" in free:
        for context in contexts:
            yield rest // context, context, 1
    else:
        yield 1, rest, 1


def _divides_model(config: Config, tensor: int) -> bool:
    """Returns whether a tensor axis divides all that it splits in a layer: heads of every kind,
    widths of MLPs.
    """
    sizes, rows = (
        axis_sizes(config.model),
        (row for row in parameters(config.model) if row.is_stacked),
    )
    split = {axis for row in rows for axis in row.axes if "tensor" in PARAMETER_RULES[axis]}
    return all(sizes[axis] % tensor == 0 for axis in split)


def _splits_long_rows(config: Config, fixed: Collection[str]) -> bool:
    """Returns whether the context axis is free: it is -1, or the config states a strategy for it
    and no size.
    """
    keys = [axis_key(net, "context") for net in ("ici", "dcn")]
    if any(_is_fixed(config, fixed, key) for key in keys):
        return False
    return config[keys[0]] == -1 or any(key in fixed for key in _OF_LONG_ROWS)


def _is_fixed(config: Config, fixed: Collection[str], key: str) -> bool:
    return key in fixed and config[key] != -1
