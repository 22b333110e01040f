"""The parameters of a decoder: their paths, their logical axes, dtype and first values."""

from __future__ import annotations

import collections
import dataclasses
import math
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.sections import ModelConfig
from maxbatch.families.matrices import norms_add_one, parameters, shape_of, weight_factor
from maxbatch.families.parameter import Parameter, ParameterPath
from maxbatch.parallel.trees import KeyPath, State
from maxbatch.plan.partition import PARAMETER_RULES, WHOLE

# Standard deviation of a unit normal that is truncated at two.
_TRUNCATED_STDDEV = 0.87962566103423978
_DECAYS = (0.01, 16.0)  # per token, before the softplus that a token scales them by


class Later(nnx.Rngs):
    """Seeds of a layer whose random values `drawn` makes together, after the layer is built."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """The random value of a parameter, still to be made."""

    key: jax.Array
    kind: Literal["normal", "uniform", "decays"]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    factors: tuple[float, ...]  # the value is multiplied by one after the other
    dtype: Any

    @cached_property
    def _joined(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The shape and the axes, without axes that no mesh axis splits: their sizes join those
        before them.

        The values are the same, and the TPU compiler takes a third of the time for two axes.
        """
        sizes, axes = list(self.shape), list(self.axes)
        for i in reversed(range(1, len(axes))):
            if axes[i] in WHOLE and len(sizes) > 2:
                sizes[i - 1 : i + 1] = [sizes[i - 1] * sizes[i]]
                del axes[i]
        return tuple(sizes), tuple(axes)

    @property
    def group(self) -> tuple[object, ...]:
        """Equal for draws of one loop, whose arrays have one shape and one placement on a mesh."""
        sizes, axes = self._joined
        return self.kind, sizes, tuple(PARAMETER_RULES[axis] for axis in axes), self._bound

    @property
    def _bound(self) -> float | None:
        return self.shape[-1] ** -0.5 if self.kind == "uniform" else None

    def unit(self, key: jax.Array) -> jax.Array:
        """Returns a random array of the group."""
        shape, _ = self._joined
        if self.kind == "decays":
            return jnp.log(jax.random.uniform(key, shape, jnp.float32, *_DECAYS))
        if self._bound is not None:
            return jax.random.uniform(key, shape, jnp.float32, -self._bound, self._bound)
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)

    def made(self, unit: jax.Array) -> jax.Array:
        """Returns the value from the random array of its group."""
        if unit.shape != self.shape:  # the compiler would draw in the other shape
            unit = jax.lax.optimization_barrier(unit).reshape(self.shape)
        for factor in self.factors:
            unit = unit * factor
        return unit.astype(self.dtype)


def drawn(state: State) -> State:
    """Returns parameters with the values of their draws.

    Draws of one group are a loop over their keys: a TPU compiler takes a second or more for each
    random array of a program, and a layer, or a cycle of layers, has many of few shapes.
    """
    leaves, treedef = jax.tree.flatten(state)
    groups: dict[tuple[object, ...], list[int]] = collections.defaultdict(list)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Draw):
            groups[leaf.group].append(place)
    for places in groups.values():
        draw, keys = leaves[places[0]].unit, [leaves[place].key for place in places]
        units = jax.lax.map(draw, jnp.stack(keys)) if keys[1:] else [draw(keys[0])]
        for place, unit in zip(places, units, strict=True):
            leaves[place] = leaves[place].made(unit)
    parameters: State = jax.tree.unflatten(treedef, leaves)
    return parameters


def parameter_path(path: KeyPath) -> ParameterPath:
    """Returns the names that lead to a parameter, from its path in a tree of `jax.tree_util`."""
    return tuple(str(entry.key) for entry in path if hasattr(entry, "key"))


def add_parameters(
    module: nnx.Module, config: ModelConfig, *names: str, rngs: nnx.Rngs | None = None
) -> None:
    """Gives a module its parameters, in `weight_dtype` or float32, as attributes of their names.

    Args:
      module: a part of the decoder.
      names: of parameters, or of the module; those that the model does not have are left out.
      rngs: the stream `params` seeds the values of matrices; `Later` leaves their draws in place of
        them.
    """
    for row in parameters(config):
        if row.name in names or row.module in names:
            value = _first_value(config, row, rngs)
            if isinstance(value, Draw) and not isinstance(rngs, Later):
                value = value.made(value.unit(value.key))
            setattr(module, row.path[-1], nnx.Param(value, logical_axes=row.axes))


def _first_value(config: ModelConfig, row: Parameter, rngs: nnx.Rngs | None) -> jax.Array | Draw:
    """Returns a parameter of one layer, made in float32 for every dtype, so that one seed gives one
    model.

    Biases are 0, and norms multiply by 1. Matrices are normal with a standard deviation of 1 /
    sqrt(inputs), truncated at two of them: the product keeps the variance of its input (LeCun et
    al. 1998, Efficient BackProp, section 4.6). A matrix that adds to the residual stream is also
    divided by the root of their number, two per layer, so that the variance of the stream does not
    grow with depth (Radford et al. 2019, GPT-2, section 2.3). Depthwise convolutions are uniform up
    to 1 / sqrt(width), and the logarithms of decays are those of uniform numbers (Yang et al.
    2024).
    """
    shape = shape_of(row, config)
    factor, dtype = (
        weight_factor(config, row.path),
        jnp.float32 if row.is_float32 else config.weight_dtype,
    )
    factors = () if factor == 1.0 else (factor,)
    if not (row.inputs or row.is_convolution or row.first == "decays"):
        is_scale = row.path[-1].endswith("scale") and not norms_add_one(config)
        return jnp.full(shape, float(is_scale or row.first == "ones"), dtype)
    assert rngs is not None, "matrices are random"
    if row.first == "decays":
        return Draw(rngs.params(), "decays", shape, row.axes, factors, dtype)
    if row.is_convolution:
        return Draw(rngs.params(), "uniform", shape, row.axes, factors, dtype)
    adds_to_stream = row.is_stacked and row.outputs == ("embed",)
    summed = shape[-1] if row.is_lookup else math.prod(shape[axis] for axis in row.groups[0])
    summed *= 2 * config.base_num_decoder_layers if adds_to_stream else 1
    deviation = 1 / math.sqrt(summed) / _TRUNCATED_STDDEV
    return Draw(rngs.params(), "normal", shape, row.axes, (deviation, *factors), dtype)
