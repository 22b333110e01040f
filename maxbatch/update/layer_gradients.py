"""Gradients of layers, added to their sums in the backward pass, without gradients per micro-batch.

Usually the backward pass of a loop over layers makes an array of all their gradients, which
accumulation then adds to the sums: two float32 arrays of the parameters' size, and three passes
over them. Here the backward pass carries the sums from layer to layer and adds each layer's
gradient in place. The forward pass leaves the sums unchanged; their "gradient" starts as the sums
themselves, so `jax.grad` with respect to them returns sums plus gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.model.stacked import Stacked
from maxbatch.parallel.pipeline import Layers, Sums
from maxbatch.parallel.remat import Remat, checkpointed
from maxbatch.parallel.sharding import Constrain
from maxbatch.parallel.trees import State, Tree

AddLayer = Callable[[Any, jax.Array, jax.Array], Any]


def add_rounded(summed: jax.Array, gradient: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the plain sums of a parameter with a layer's gradient."""
    before = jax.lax.dynamic_index_in_dim(summed, index, keepdims=False)
    array: jax.Array = jax.lax.dynamic_update_index_in_dim(
        summed, before + gradient.astype(summed.dtype), index, axis=0
    )
    return array


@dataclasses.dataclass(eq=False)  # arrays cannot be compared; flax compares identity
class SummingLayers:
    """A layer runner (`maxbatch.model.walk.LayerRunner`) that loops over the layers, once per
    gradient.

    The gradient with respect to `sums` is the sums plus the gradients of the parameters, which
    themselves get none. A second run within one gradient would count the sums twice, so it raises.
    """

    sums: Tree  # float32, like the stacked parameters of the layers, or several arrays for each
    remat: Remat  # values kept by a layer's forward pass for its backward pass
    constrain: Constrain  # places activations inside of a layer
    # (sums of a parameter, a layer's gradient, its number) -> the sums with this gradient
    add: AddLayer = add_rounded
    _has_run: bool = dataclasses.field(default=False, init=False)

    def order(self, num_layers: int) -> np.ndarray:
        """Returns the layer numbers in the stacked order of parameters: unchanged."""
        return np.arange(num_layers)

    def __call__(
        self, layers: Layers[Sums], stacked: Stacked, x_MxLxD: jax.Array, slots: Tree, /
    ) -> tuple[jax.Array, Sums]:
        """Runs all layers; returns x and the layers' outputs, stacked. `layers(x, slots, stacked)`
        runs several.

        Raises:
          RuntimeError: the layers ran before.
        """
        if self._has_run:
            raise RuntimeError(
                "layers whose gradients are summed in place must run once per gradient"
            )
        self._has_run = True

        def layer(x_MxLxD: jax.Array, slots: Tree, element: Stacked) -> tuple[jax.Array, Sums]:
            x_MxLxD, of_layer = layers(x_MxLxD, slots, jax.tree.map(lambda p: p[None], element))
            return x_MxLxD, jax.tree.map(lambda only: only[0], of_layer)

        # Its input must be the layer's slice itself; of anything computed from it a copy would be
        # kept.
        numbers_N = jnp.arange(jax.tree.leaves(stacked.parameters)[0].shape[0])
        layer = checkpointed(layer, self.remat, in_loop=numbers_N.size > 1)

        def run_one(
            carried: tuple[jax.Array, Tree], numbered: tuple[jax.Array, Stacked]
        ) -> tuple[tuple[jax.Array, Tree], Sums]:
            (x_MxLxD, sums), (index, element) = carried, numbered
            parameters, sums = _tie(self.add, element.parameters, sums, index)
            x_MxLxD, of_layer = layer(x_MxLxD, slots, element._replace(parameters=parameters))
            return (x_MxLxD, sums), of_layer

        frozen = stacked._replace(parameters=jax.lax.stop_gradient(stacked.parameters))
        (x_MxLxD, sums), of_layers = jax.lax.scan(
            run_one, (x_MxLxD, self.sums), (numbers_N, frozen)
        )
        return _turn_round(x_MxLxD, sums), of_layers


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tie(add: AddLayer, parameters: State, sums: Tree, index: jax.Array) -> tuple[State, Tree]:
    """Returns a layer's parameters and the sums unchanged; the backward pass adds the layer's
    gradient to the sums.
    """
    del add, index
    return parameters, sums


def _tie_forward(
    add: AddLayer, parameters: State, sums: Tree, index: jax.Array
) -> tuple[tuple[State, Tree], jax.Array]:
    del add
    return (parameters, sums), index


def _tie_backward(
    add: AddLayer, index: jax.Array, gradients: tuple[Tree, Tree]
) -> tuple[None, Tree, None]:
    of_layer, sums = gradients
    return None, jax.tree.map(lambda g, summed: add(summed, g, index), of_layer, sums), None


_tie.defvjp(_tie_forward, _tie_backward)


@jax.custom_vjp
def _turn_round(x_MxLxD: jax.Array, sums: Tree) -> jax.Array:
    """Returns x; in the backward pass the gradient of the sums starts as the sums."""
    del sums
    return x_MxLxD


_turn_round.defvjp(lambda x_MxLxD, sums: (x_MxLxD, sums), lambda sums, x_MxLxD: (x_MxLxD, sums))
