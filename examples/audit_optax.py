"""A plain loop with optax, for `maxbatch audit examples/audit_optax.py:make`: sums of losses,
divided once.

python examples/audit_optax.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import maxbatch

VOCABULARY, WIDTH = 8, 16
OPTIMIZER = optax.adam(1e-2)


def loss_sum(params: Any, tokens: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the losses of the tokens, and the sum of their weights."""
    logits = jnp.tanh(params["table"][tokens[:, :-1]]) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * weights[:, 1:]), jnp.sum(weights[:, 1:])


@jax.jit
def add(params: Any, sums: Any, tokens: jax.Array, weights: jax.Array) -> Any:
    """Adds the gradient, the loss and the weight of a micro-batch."""
    (loss, weight), gradient = jax.value_and_grad(loss_sum, has_aux=True)(params, tokens, weights)
    return jax.tree.map(jnp.add, sums, (gradient, loss, weight))


@jax.jit
def update(state: Any, sums: Any) -> Any:
    """Takes one update by the mean over the whole batch."""
    params, opt_state = state
    gradient, loss, weight = sums
    updates, opt_state = OPTIMIZER.update(
        jax.tree.map(lambda g: g / weight, gradient), opt_state, params
    )
    return (optax.apply_updates(params, updates), opt_state), loss / weight


class Loop:
    """The loop of one layout."""

    def __init__(self, layout: maxbatch.Layout) -> None:
        if layout.num_devices > len(jax.devices()):
            raise ValueError(
                f"there are {len(jax.devices())} devices; --simulate-devices makes more"
            )
        self.rows_per_pass = layout.rows_per_pass
        mesh = Mesh(jax.devices()[: layout.num_devices], ("data",))
        self.rows, self.whole = (
            NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], [])
        )

    def init(self) -> Any:
        """Returns the parameters and the state of the optimizer."""
        keys = jax.random.split(jax.random.key(0))
        shapes = {"table": (VOCABULARY, WIDTH), "out": (WIDTH, VOCABULARY)}
        params = {
            name: jax.random.normal(key, shapes[name])
            for name, key in zip(shapes, keys, strict=True)
        }
        return jax.device_put((params, OPTIMIZER.init(params)), self.whole)

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
        """Accumulates over the micro-batches, and takes one update."""
        sums = (jax.tree.map(jnp.zeros_like, state[0]), jnp.float32(0), jnp.float32(0))
        for start in range(0, len(batch["tokens"]), self.rows_per_pass):
            rows = slice(start, start + self.rows_per_pass)
            sums = add(
                state[0],
                sums,
                *jax.device_put((batch["tokens"][rows], batch["weights"][rows]), self.rows),
            )
        state, loss = update(state, sums)
        return state, {"loss": loss}

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        return {name: np.asarray(array) for name, array in state[0].items()}


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout)


if __name__ == "__main__":
    print(maxbatch.audit(make))
