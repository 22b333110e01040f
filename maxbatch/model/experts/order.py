"""The choices of tokens in the order of their experts, and back.

Shapes: T tokens, k experts of a token, n = T x k choices, token by token; D width, E experts.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Order(NamedTuple):
    """Choices in the order of their experts; those of one expert stay in the order of their
    tokens.
    """

    choice_n: jax.Array  # int32: the choice at each place
    place_n: jax.Array  # int32: the place of each choice
    sizes_E: jax.Array  # int32: choices of each expert


def sorted_by(experts_n: jax.Array, num_experts: int) -> Order:
    """Returns the order by expert, 0 to `num_experts`; choices of expert `num_experts`, which is
    none, come last.
    """
    choice_n = jnp.argsort(experts_n, stable=True)
    places_n = jnp.arange(choice_n.size, dtype=choice_n.dtype)
    place_n = jnp.zeros_like(choice_n).at[choice_n].set(places_n, unique_indices=True)
    sizes_E = jnp.sum(experts_n[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
    return Order(choice_n, place_n, sizes_E)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def in_order(x_TxD: jax.Array, order: Order, k: int) -> jax.Array:
    """Returns the token of each choice, in order: [n, D]. Its gradient is a gather too, and no
    scatter.
    """
    return x_TxD[order.choice_n // k]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def summed(y_nxD: jax.Array, order: Order, k: int) -> jax.Array:
    """Returns the sum of each token's choices: [T, D]."""
    return y_nxD[order.place_n].reshape(-1, k, y_nxD.shape[-1]).sum(axis=1)


# Each is the transpose of the other.
in_order.defvjp(
    lambda x_TxD, order, k: (in_order(x_TxD, order, k), order),
    lambda k, order, grad_nxD: (summed(grad_nxD, order, k), None),
)
summed.defvjp(
    lambda y_nxD, order, k: (summed(y_nxD, order, k), order),
    lambda k, order, grad_TxD: (in_order(grad_TxD, order, k), None),
)
