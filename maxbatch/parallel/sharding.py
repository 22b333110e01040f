"""One table of sharding rules, and the shardings that follow from it.

Parameters name their dimensions (`logical_axes`), activations too; the table says which mesh axes split which.
A mesh axis splits one dimension of an array, the first that asks for it: of the layers' parameters the pipeline axis
splits the layers, of all others the width, since outside of the pipeline its devices share the work by rows.
A dimension that its mesh axes do not divide stays whole; the fsdp axis then takes the largest other dimension
that it divides, so that a width of 128 on 3 devices costs memory and not correctness.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.parallel.activations import Constrain, LogicalAxes
from maxbatch.plan.mesh_shape import BATCH_AXES

# dimension -> mesh axes that split it
PARAMETER_RULES: dict[str, tuple[str, ...]] = {
    "layers": ("pipeline",),
    "vocab": ("tensor",),
    "embed": ("fsdp", "pipeline"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "norm": (),
}
ACTIVATION_RULES: dict[str, str | None] = {
    "stage": "pipeline",
    "length": "context",
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
}


def parameter_spec(logical_axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> P:
    """The partition of one parameter: `shape` dimensions named by `logical_axes`."""
    taken: list[tuple[str, ...]] = []
    for name, size in zip(logical_axes, shape, strict=True):
        wanted = tuple(axis for axis in PARAMETER_RULES[name] if (axis,) not in taken)
        if mesh.shape["pipeline"] == 1 and name != "layers":
            wanted = tuple(axis for axis in wanted if axis != "pipeline")
        while wanted and size % math.prod(mesh.shape[axis] for axis in wanted):
            wanted = wanted[:-1]
        taken.append(wanted)
    if "embed" in logical_axes and not any("fsdp" in axes for axes in taken):
        whole = [(size, i) for i, size in enumerate(shape) if not taken[i] and logical_axes[i] != "layers"]
        fits = [(size, i) for size, i in whole if size % mesh.shape["fsdp"] == 0]
        if fits:
            taken[max(fits)[1]] = ("fsdp",)
    return P(*(axes if len(axes) > 1 else next(iter(axes), None) for axes in taken))


def parameter_shardings(params: nnx.State, mesh: Mesh) -> nnx.State:
    """The sharding of every parameter, in the tree of `params` (arrays or their abstract shapes)."""

    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    shardings = [
        NamedSharding(mesh, parameter_spec(v.get_metadata()["logical_axes"], v.get_value().shape, mesh))
        for v in variables
    ]
    return jax.tree.unflatten(jax.tree.structure(params), shardings)


def activation_constraint(mesh: Mesh, batch_axes: tuple[str, ...]) -> Constrain:
    """A function that pins an activation to the mesh by the names of its dimensions.

    Args:
      mesh: the device mesh.
      batch_axes: mesh axes that split the dimension named "batch". Under `jax.vmap(..., spmd_axis_name="data")`
        the data axis is already taken by the mapped dimension, and this is ("fsdp",).
    """

    def spec(shape: tuple[int, ...], names: LogicalAxes) -> P:
        axes: list[Any] = []
        for name, size in zip(names, shape, strict=True):
            axis = batch_axes if name == "batch" else ACTIVATION_RULES[name] if name else None
            axes.append(axis if name == "batch" or (axis and size % mesh.shape[axis] == 0) else None)
        return P(*axes)

    return Constrain(mesh, spec)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The placement of a global batch `[A, M, L]`: rows over the batch shards, tokens over context."""
    return NamedSharding(mesh, P(None, BATCH_AXES, "context"))
