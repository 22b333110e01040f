"""`optax.MultiSteps` around an optimizer: it averages the means of micro-batches, which an audit
finds.

python examples/audit_multisteps.py
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import maxbatch

VOCABULARY, WIDTH = 8, 16


def mean_loss(params: Any, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the mean loss of the trained tokens of a micro-batch."""
    logits = jnp.tanh(params["table"][tokens[:, :-1]]) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * weights[:, 1:]) / jnp.maximum(jnp.sum(weights[:, 1:]), 1)


@cache
def program(passes: int) -> tuple[Any, Any]:
    """Returns the optimizer of so many micro-batches an update, and its compiled micro-step."""
    optimizer = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=passes)

    @jax.jit
    def micro_step(params: Any, opt_state: Any, tokens: jax.Array, weights: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(mean_loss)(params, tokens, weights)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return optimizer, micro_step


class Loop:
    """The loop of one layout, on one device."""

    def __init__(self, layout: maxbatch.Layout) -> None:
        if layout.num_devices > 1:
            raise ValueError("this loop trains on one device")
        self.rows_per_pass = layout.rows_per_pass
        self.optimizer, self.micro_step = program(layout.gradient_accumulation_steps)

    def init(self) -> Any:
        """Returns the parameters and the state of the optimizer."""
        keys = jax.random.split(jax.random.key(0))
        shapes = {"table": (VOCABULARY, WIDTH), "out": (WIDTH, VOCABULARY)}
        params = {
            name: jax.random.normal(key, shapes[name])
            for name, key in zip(shapes, keys, strict=True)
        }
        return params, self.optimizer.init(params)

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
        """Takes the micro-steps of one update; the loss is the mean of their means, as loops report
        it.
        """
        losses = []
        for start in range(0, len(batch["tokens"]), self.rows_per_pass):
            rows = slice(start, start + self.rows_per_pass)
            state, loss = self.micro_step(
                *state, jnp.asarray(batch["tokens"][rows]), jnp.asarray(batch["weights"][rows])
            )
            losses.append(loss)
        return state, {"loss": sum(losses) / len(losses)}

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        return {name: np.asarray(array) for name, array in state[0].items()}


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout)


if __name__ == "__main__":
    print(maxbatch.audit(make))
