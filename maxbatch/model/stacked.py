"""The layers of a model, stacked, and what distinguishes them besides their parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from maxbatch.parallel.trees import State


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A flag that a rematerialised function takes as a fact of its program, not as an array."""

    value: bool


class Stacked(NamedTuple):
    """Layers on a leading axis, or one of them: an argument of loops and of rematerialised
    functions.
    """

    parameters: State
    # Whether a layer is local: bool[N], of a single layer a `Static` or a traced bool; None if all
    # layers are alike.
    is_local: Any = None
    # The number of each layer: int32[N], of a single layer a scalar; None in a model without
    # experts.
    number: Any = None
    # What layers take besides the stream: [N, places of a cycle, M, L, P]; None in
    # most families.
    inputs: Any = None
    # The number of each in the caches, or of those that it reads: int[N]; None for whole rows.
    in_cache: Any = None

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        number: int = jax.tree.leaves(self.parameters)[0].shape[0]
        return number

    def one_by_one(self) -> list[Stacked]:
        """Returns each layer, its parameters by one split per array, whose gradient is one
        concatenation.
        """
        arrays, treedef = jax.tree.flatten(self.parameters)
        num_layers = arrays[0].shape[0]
        split = [
            [part[0] for part in jax.lax.split(array, (1,) * num_layers, axis=0)]
            for array in arrays
        ]
        parameters = [jax.tree.unflatten(treedef, leaves) for leaves in zip(*split, strict=True)]
        numbers = [None] * num_layers if self.number is None else self.number
        inputs = [None] * num_layers if self.inputs is None else self.inputs
        in_cache = [None] * num_layers if self.in_cache is None else self.in_cache
        return [
            Stacked(
                parameters_of_layer,
                self._is_local(layer),
                numbers[layer],
                inputs[layer],
                in_cache[layer],
            )
            for layer, parameters_of_layer in enumerate(parameters)
        ]

    def _is_local(self, layer: int) -> Static | jax.Array | None:
        known = isinstance(self.is_local, np.ndarray)
        if self.is_local is None:
            return None
        return Static(bool(self.is_local[layer])) if known else self.is_local[layer]
