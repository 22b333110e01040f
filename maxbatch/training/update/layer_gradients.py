"""Gradients of the layers, added to their sums where they are made: no micro-batch has gradients of its own.

Usually the backward pass of a loop over layers makes an array for all their gradients, which accumulation then adds to
the sums: two float32 arrays of the size of the parameters, and three passes over them. Here the backward pass carries
the sums from layer to layer and adds each layer's gradient in its place. The sums pass through the layers unchanged;
their "gradient" starts as the sums themselves, so `jax.grad` with respect to them returns them plus the gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.model.stacked import Stacked
from maxbatch.parallel.pipeline import Layers
from maxbatch.parallel.remat import Remat, checkpointed
from maxbatch.parallel.sharding import Constrain
from maxbatch.parallel.trees import State, Tree


@dataclasses.dataclass(eq=False)  # its arrays cannot be compared; flax compares its identity
class SummingLayers:
    """A layer runner (`maxbatch.model.decoder.LayerRunner`) that loops over the layers, once per gradient.

    The gradient with respect to `sums` is these sums plus the gradients with respect to the parameters, which
    themselves receive none. A second run within one gradient would count the sums twice, and is refused.
    """

    sums: Tree  # float32 arrays, like the stacked parameters of the layers
    remat: Remat  # values that the forward pass of a layer keeps for its backward pass
    constrain: Constrain  # places activations inside of a layer
    _has_run: bool = dataclasses.field(default=False, init=False)

    def order(self, num_layers: int) -> np.ndarray:
        """Returns the numbers of the layers in the order in which their parameters come stacked: their own."""
        return np.arange(num_layers)

    def __call__(self, layers: Layers, stacked: Stacked, x_MxLxD: jax.Array, slots: Tree, /) -> tuple[jax.Array, Any]:
        """Returns x after all layers and their sums, stacked alike; `layers(x, slots, stacked)` runs several.

        Raises:
          RuntimeError: they ran before.
        """
        if self._has_run:
            raise RuntimeError("layers whose gradients are summed in place must run once per gradient")
        self._has_run = True

        def layer(x_MxLxD: jax.Array, slots: Tree, one: Stacked) -> tuple[jax.Array, Any]:
            x_MxLxD, of_layer = layers(x_MxLxD, slots, jax.tree.map(lambda p: p[None], one))
            return x_MxLxD, jax.tree.map(lambda only: only[0], of_layer)

        # Its input must be the layer's slice itself: a copy would be kept of anything computed from it.
        numbers_N = jnp.arange(jax.tree.leaves(stacked.parameters)[0].shape[0])
        layer = checkpointed(layer, self.remat, in_loop=numbers_N.size > 1)

        def run_one(
            carried: tuple[jax.Array, Tree], numbered: tuple[jax.Array, Stacked]
        ) -> tuple[tuple[jax.Array, Tree], Any]:
            (x_MxLxD, sums), (index, one) = carried, numbered
            parameters, sums = _tie(one.parameters, sums, index)
            x_MxLxD, of_layer = layer(x_MxLxD, slots, one._replace(parameters=parameters))
            return (x_MxLxD, sums), of_layer

        frozen = stacked._replace(parameters=jax.lax.stop_gradient(stacked.parameters))
        (x_MxLxD, sums), of_layers = jax.lax.scan(run_one, (x_MxLxD, self.sums), (numbers_N, frozen))
        return _turn_round(x_MxLxD, sums), of_layers


@jax.custom_vjp
def _tie(parameters: State, sums: Tree, index: jax.Array) -> tuple[State, Tree]:
    """Returns one layer's parameters and the sums as they are; on the way back that layer's gradient joins the sums."""
    del index
    return parameters, sums


def _tie_forward(parameters: State, sums: Tree, index: jax.Array) -> tuple[tuple[State, Tree], jax.Array]:
    return (parameters, sums), index


def _tie_backward(index: jax.Array, gradients: tuple[Tree, Tree]) -> tuple[None, Tree, None]:
    def add(summed: jax.Array, gradient: jax.Array) -> jax.Array:
        before = jax.lax.dynamic_index_in_dim(summed, index, keepdims=False)
        array: jax.Array = jax.lax.dynamic_update_index_in_dim(
            summed, before + gradient.astype(summed.dtype), index, axis=0
        )
        return array

    of_layer, sums = gradients
    return None, jax.tree.map(add, sums, of_layer), None


_tie.defvjp(_tie_forward, _tie_backward)


@jax.custom_vjp
def _turn_round(x_MxLxD: jax.Array, sums: Tree) -> jax.Array:
    """Returns x; on the way back the gradient of the sums begins as the sums."""
    del sums
    return x_MxLxD


_turn_round.defvjp(lambda x_MxLxD, sums: (x_MxLxD, sums), lambda sums, x_MxLxD: (x_MxLxD, sums))
