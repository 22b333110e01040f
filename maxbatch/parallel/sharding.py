"""The sharding rules: which mesh axes split which dimensions of parameters, activations and
batches.

Parameters and activations name their dimensions (`logical_axes`); two tables map the names to mesh
axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.families.parameter import LAYERS
from maxbatch.parallel.trees import State, Tree
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.plan.partition import LOOKED_UP, OVER_TENSOR, SUMMED, WHOLE, partition

LogicalAxes = tuple[str | None, ...]

# dimension -> the mesh axis that splits it
ACTIVATION_RULES: dict[str, str | None] = {
    "stage": "pipeline",
    "length": "context",
    "experts": "expert",
    # so that the columns of their tables need not move
    **dict.fromkeys(LOOKED_UP, "fsdp"),
    **dict.fromkeys(OVER_TENSOR, "tensor"),
    **dict.fromkeys((*WHOLE, *SUMMED), None),
}
OVER_ROWS = "over_rows"  # a dimension split in place of the rows
OVER_HEADS = "over_heads"  # heads split in place of the length
OVER_TOKENS = "over_tokens"  # a dimension split as rows and length are


@dataclasses.dataclass(frozen=True)
class Constrain:
    """A constraint on activations: pins them to the mesh by the names of their dimensions.

    The model knows nothing else of its devices. Without a mesh the compiler places activations.
    """

    mesh: Mesh | None = None  # of the devices to compile for, here or not; None: the default device
    # The partition of an array, from its shape and its logical axes. Under `jax.vmap` neither has
    # the mapped axis.
    spec: Callable[[tuple[int, ...], LogicalAxes], P] = lambda shape, _: P(*(None for _ in shape))

    def __call__(self, x: jax.Array, logical_axes: LogicalAxes) -> jax.Array:
        """Returns x with its sharding."""
        return x if self.mesh is None else _placed(x, self.mesh, self.spec(x.shape, logical_axes))

    def like_parameter(self, x: jax.Array, logical_axes: tuple[str, ...]) -> jax.Array:
        """Returns x, such as a gradient, with the sharding of the parameter that has its shape and
        its axes.
        """
        return (
            x
            if self.mesh is None
            else _placed(x, self.mesh, parameter_spec(logical_axes, x.shape, self.mesh))
        )

    def like_layer(self, x: jax.Array, logical_axes: tuple[str, ...]) -> jax.Array:
        """Returns x with the sharding of one layer of a stacked parameter, whose other axes are
        `logical_axes`.
        """
        if self.mesh is None:
            return x
        stacked = (self.mesh.shape["pipeline"], *x.shape)
        _, *spec = parameter_spec((LAYERS, *logical_axes), stacked, self.mesh)
        return _placed(x, self.mesh, P(*spec))

    @property
    def platform(self) -> str:
        """The kind of the devices: "cpu", "gpu" or "tpu"."""
        return jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform


def _placed(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    array: jax.Array = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return array


unconstrained = Constrain()


def num_shards(mesh: Mesh, axes: Iterable[str] = BATCH_AXES) -> int:
    """Returns the parts that mesh axes split a dimension into; by default those that split the
    batch.
    """
    return math.prod(mesh.shape[axis] for axis in axes)


def activation_constraint(mesh: Mesh, batch_axes: tuple[str, ...]) -> Constrain:
    """Returns the constraint that follows from `ACTIVATION_RULES`; `batch_axes` split the dimension
    named "batch".

    Under `jax.vmap(..., spmd_axis_name="data")` the mapped dimension has the data axis already,
    which is none of them. They also split `OVER_ROWS`: a dimension of an array that has the rows of
    the whole batch on every device. `OVER_HEADS` are heads of whole rows, which the context axis
    splits too. `OVER_TOKENS` are shares of rows, on as many devices as there are.
    """

    def axes_of(name: str, size: int) -> tuple[str, ...] | str | None:
        if name == "batch":
            return batch_axes
        if name == OVER_TOKENS:
            axes = (*batch_axes, "context")
            return axes if size % num_shards(mesh, axes) == 0 else batch_axes
        if name == OVER_ROWS:
            axes = (*batch_axes, "tensor")
            return axes if size % num_shards(mesh, axes) == 0 else None
        if name == OVER_HEADS:
            axes = ("tensor", "context")
            return axes if size % num_shards(mesh, axes) == 0 else None
        axis = ACTIVATION_RULES[name]
        return axis if axis and size % mesh.shape[axis] == 0 else None

    def spec(shape: tuple[int, ...], names: LogicalAxes) -> P:
        return P(
            *(
                axes_of(name, size) if name else None
                for name, size in zip(names, shape, strict=True)
            )
        )

    return Constrain(mesh, spec)


def parameter_spec(logical_axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the partition of one parameter, whose dimensions `logical_axes` names."""
    split = partition(logical_axes, shape, mesh.shape)
    return P(*(axes if len(axes) > 1 else next(iter(axes), None) for axes in split))


def unnamed_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the partition of a parameter without logical axes."""
    fits = [(size, axis) for axis, size in enumerate(shape) if size % mesh.shape["fsdp"] == 0]
    if not fits:
        return P()
    longest = max(fits)[1]
    return P(*("fsdp" if axis == longest else None for axis in range(len(shape))))


def parameter_shardings(params: State, mesh: Mesh) -> State:
    """Returns the sharding of every parameter, in the tree of `params` (arrays or their abstract
    shapes).

    A parameter of a user's model that names no logical axes is split over fsdp along its longest
    axis that divides.
    """
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))

    def spec(variable: nnx.Variable[jax.Array]) -> P:
        shape = variable.get_value().shape
        names = variable.get_metadata().get("logical_axes")
        return unnamed_spec(shape, mesh) if names is None else parameter_spec(names, shape, mesh)

    shardings = [NamedSharding(mesh, spec(variable)) for variable in variables]
    state: State = jax.tree.unflatten(jax.tree.structure(params), shardings)
    return state


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the placement of a global batch [A, M, L]: rows over the batch shards, tokens over
    context.
    """
    return NamedSharding(mesh, P(None, BATCH_AXES, "context"))


def shard_bytes(tree: Tree) -> int:
    """Returns the bytes of a device's shards of arrays or shapes."""
    leaves = jax.tree.leaves(tree)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )


def zeros_of(abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros in the place of a parameter."""
    zeros: jax.Array = jax.jit(
        lambda: jnp.zeros(abstract.shape, abstract.dtype), out_shardings=abstract.sharding
    )()
    return zeros
