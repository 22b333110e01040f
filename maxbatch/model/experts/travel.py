"""How tokens travel to experts that other devices of an axis hold, and the experts' outputs back.

Each device sends every other one the choices of the experts there, by all-to-alls. A buffer has
room for a quarter more than the choices that a device sends another if all experts get as many.
What is beyond goes in further rounds, as many as the fullest pair of devices needs, so nothing is
dropped and a usual update takes one round. The backward pass takes the same rounds and computes the
experts' products again, so no outputs of a round are kept.

Shapes: T tokens of a device, k experts of a token, n = T x k choices, token by token; A devices on
the axis, each with C places for choices of each other; E experts, e of them on a device; D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.sharding import Mesh

from maxbatch.model.experts.order import Order, sorted_by
from maxbatch.parallel.trees import Tree

# Rows [n, D], their shares [n, 1], the rows of each expert [E], and the experts' weights, to
# outputs [n, D].
Compute = Callable[..., jax.Array]
_ROOM = 1.25  # places, as a share of those that are needed if all experts get as many
_MULTIPLE = 8  # of places


def sum_over_axis(
    x_TxD: jax.Array,
    experts_n: jax.Array,
    shares_n: jax.Array,
    *weights: jax.Array,
    num_experts: int,
    axis: str,
    mesh: Mesh,
    compute: Compute,
    codes: Tree = None,
) -> jax.Array:
    """Returns of each token the sum of its experts' outputs, [T, D], within `shard_map` over all
    axes of the mesh.

    Args:
      x_TxD: the tokens of this device.
      experts_n: int32: the expert of each choice; `num_experts`: none, which adds nothing.
      shares_n: float32: the share of each choice in its token's sum.
      weights: those of the experts that this device holds, [e, ...].
      num_experts: E, which the axis divides.
      axis: the axis that splits the experts and the tokens.
      mesh: the whole mesh. All its devices take as many rounds.
      compute: the function of an expert, of its rows.
      codes: a further argument of `compute`, without a gradient.
    """

    way = _Way(num_experts, axis, mesh, compute)
    y_TxD: jax.Array = _travelled(
        way, _Arguments(x_TxD, shares_n, weights), _Fixed(experts_n, codes)
    )
    return y_TxD


class _Way(NamedTuple):
    """The static arguments of `sum_over_axis`."""

    num_experts: int
    axis: str
    mesh: Mesh
    compute: Compute


class _Arguments(NamedTuple):
    """Those that have gradients; or their gradients."""

    x_TxD: jax.Array
    shares_n: jax.Array
    weights: tuple[jax.Array, ...]


class _Fixed(NamedTuple):
    """Those without gradients."""

    experts_n: jax.Array
    codes: Tree


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _travelled(way: _Way, arguments: _Arguments, fixed: _Fixed) -> jax.Array:
    # Under jax.vmap over stages a device has one of them.
    y_TxD: jax.Array = sequential_vmap(partial(_sum_over_rounds, way))(arguments, fixed)
    return y_TxD


def _pulled_back(
    way: _Way, kept: tuple[_Arguments, _Fixed], grad_TxD: jax.Array
) -> tuple[_Arguments, None]:
    grads: _Arguments = sequential_vmap(partial(_gradients_over_rounds, way))(*kept, grad_TxD)
    return grads, None


_travelled.defvjp(
    lambda way, arguments, fixed: (_travelled(way, arguments, fixed), (arguments, fixed)),
    _pulled_back,
)


def _sum_over_rounds(way: _Way, arguments: _Arguments, fixed: _Fixed) -> jax.Array:
    journey = _Journey.of(way, fixed.experts_n, arguments.x_TxD.shape[0])

    def add_round(number: jax.Array, y_TxD: jax.Array) -> jax.Array:
        trip = journey.round(number)
        x_sxD, shares_sx1 = trip.sent(arguments.x_TxD), trip.sent_choices(arguments.shares_n)
        y_sxD = way.compute(
            x_sxD, shares_sx1, trip.order.sizes_E, *arguments.weights, codes=fixed.codes
        )
        return y_TxD + trip.returned(y_sxD)

    y_TxD = jnp.zeros(arguments.x_TxD.shape, jnp.float32)
    summed: jax.Array = jax.lax.fori_loop(0, journey.num_rounds, add_round, y_TxD)
    return summed.astype(arguments.x_TxD.dtype)


def _gradients_over_rounds(
    way: _Way, arguments: _Arguments, fixed: _Fixed, grad_TxD: jax.Array
) -> _Arguments:
    journey = _Journey.of(way, fixed.experts_n, arguments.x_TxD.shape[0])

    def add_round(number: jax.Array, grads: _Arguments) -> _Arguments:
        trip = journey.round(number)

        def compute(
            x_sxD: jax.Array, shares_sx1: jax.Array, weights: tuple[jax.Array, ...]
        ) -> jax.Array:
            return way.compute(x_sxD, shares_sx1, trip.order.sizes_E, *weights, codes=fixed.codes)

        arrived = (
            trip.sent(arguments.x_TxD),
            trip.sent_choices(arguments.shares_n),
            arguments.weights,
        )
        x_sxD, shares_sx1, weights = jax.vjp(compute, *arrived)[1](trip.sent(grad_TxD))
        more = _Arguments(trip.returned(x_sxD), trip.returned_choices(shares_sx1), weights)
        added: _Arguments = jax.tree.map(
            lambda total, grad: total + grad.astype(total.dtype), grads, more
        )
        return added

    # In float32 while rounds are added.
    zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), arguments)
    grads = jax.lax.fori_loop(0, journey.num_rounds, add_round, zeros)
    rounded: _Arguments = jax.tree.map(
        lambda grad, array: grad.astype(array.dtype), grads, arguments
    )
    return rounded


class _Journey(NamedTuple):
    """Where the choices of this device go, and what comes to it."""

    order: Order  # of this device's choices, by expert
    first_A: jax.Array  # the place, in that order, of the first choice for each device
    device_n: jax.Array  # the device of each choice; A: none
    sizes_Axe: jax.Array  # choices that come from each device, for each expert here
    num_rounds: jax.Array
    axis: str
    room: int  # C
    k: int

    @classmethod
    def of(cls, way: _Way, experts_n: jax.Array, num_tokens: int) -> _Journey:
        axis, num_devices = way.axis, way.mesh.shape[way.axis]
        num_local = way.num_experts // num_devices
        order = sorted_by(experts_n, way.num_experts)
        sizes_A = order.sizes_E.reshape(num_devices, num_local).sum(axis=1)
        room = min(
            math.ceil(_ROOM * experts_n.size / num_devices / _MULTIPLE) * _MULTIPLE, experts_n.size
        )
        num_rounds = jax.lax.pmax(-(-jnp.max(sizes_A) // room), way.mesh.axis_names)
        sizes_Axe = jax.lax.all_to_all(order.sizes_E.reshape(num_devices, num_local), axis, 0, 0)
        first_A = jnp.cumsum(sizes_A) - sizes_A
        k = experts_n.size // num_tokens
        return cls(order, first_A, experts_n // num_local, sizes_Axe, num_rounds, axis, room, k)

    def round(self, number: jax.Array) -> _Round:
        """Returns the choices of a round: for each pair of devices the next C."""
        num_devices, num_local = self.sizes_Axe.shape
        # What this device sends: C places for each device, the last choice where there are fewer.
        first = number * self.room
        places_AxC = self.first_A[:, None] + first + jnp.arange(self.room)[None]
        choice_s = self.order.choice_n[
            jnp.minimum(places_AxC, self.order.choice_n.size - 1).reshape(-1)
        ]

        # What comes: each device sends its choices by expert, so their numbers tell the experts.
        ends_Axe = jnp.cumsum(self.sizes_Axe, axis=1)
        expert_AxC = jnp.sum(
            (first + jnp.arange(self.room))[None, :, None] >= ends_Axe[:, None], axis=-1
        )

        # Where each choice of this device is in the buffers of this round, if it goes.
        within_n = self.order.place_n - jnp.append(self.first_A, 0)[self.device_n] - first
        goes_n = (self.device_n < num_devices) & (within_n >= 0) & (within_n < self.room)
        place_n = jnp.where(goes_n, self.device_n * self.room + within_n, 0)
        return _Round(
            self.axis,
            self.k,
            choice_s,
            sorted_by(expert_AxC.reshape(-1), num_local),
            goes_n,
            place_n,
        )


class _Round(NamedTuple):
    """One exchange of s = A x C choices. Places that are not needed hold some other choice, and go
    to no expert.
    """

    axis: str
    k: int
    choice_s: jax.Array  # the choice of this device that each place takes there
    order: Order  # by expert, of what comes here
    goes_n: jax.Array  # whether a choice of this device goes in this round
    place_n: jax.Array  # the place that it takes

    def _exchanged(self, x_sxD: jax.Array) -> jax.Array:
        num_devices = jax.lax.axis_size(self.axis)
        x_AxCxD = x_sxD.reshape(num_devices, -1, x_sxD.shape[-1])
        exchanged: jax.Array = jax.lax.all_to_all(x_AxCxD, self.axis, 0, 0)
        return exchanged.reshape(x_sxD.shape)

    def sent_choices(self, values_n: jax.Array) -> jax.Array:
        """Returns a number of each choice that comes here, in the order of the experts: [s, 1]."""
        return self._exchanged(values_n[self.choice_s][:, None])[self.order.choice_n]

    def sent(self, x_TxD: jax.Array) -> jax.Array:
        """Returns the token of each choice that comes here, in the order of the experts: [s, D]."""
        return self._exchanged(x_TxD[self.choice_s // self.k])[self.order.choice_n]

    def returned_choices(self, values_sx1: jax.Array) -> jax.Array:
        """Returns value[n] of each of this device's n choices; 0 for choices of another round."""
        return jnp.where(
            self.goes_n, self._exchanged(values_sx1[self.order.place_n])[self.place_n, 0], 0
        )

    def returned(self, y_sxD: jax.Array) -> jax.Array:
        """Returns of each token of this device the sum over its choices that went in this round:
        float32[T, D].
        """
        y_nxD = jnp.where(
            self.goes_n[:, None], self._exchanged(y_sxD[self.order.place_n])[self.place_n], 0
        )
        return y_nxD.reshape(-1, self.k, y_nxD.shape[-1]).astype(jnp.float32).sum(axis=1)
