"""A Flax NNX model with `nnx.Optimizer`, for `maxbatch audit examples/audit_nnx.py:make`.

python examples/audit_nnx.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import maxbatch

VOCABULARY, WIDTH = 8, 16


class Bigrams(nnx.Module):
    """Predicts a token from the one before it."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits [M, L, V]."""
        return self.out(nnx.gelu(self.table(tokens)))


@nnx.jit
def gradient_of(model: Bigrams, tokens: jax.Array, weights: jax.Array) -> tuple[Any, Any]:
    """Returns the sum of the losses of a micro-batch, the sum of its weights, and the gradient of
    the former.
    """

    def loss_sum(model: Bigrams) -> tuple[jax.Array, jax.Array]:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(tokens[:, :-1]), tokens[:, 1:]
        )
        return jnp.sum(losses * weights[:, 1:]), jnp.sum(weights[:, 1:])

    return nnx.value_and_grad(loss_sum, has_aux=True)(model)


@nnx.jit
def update(model: Bigrams, optimizer: nnx.Optimizer, gradient: Any, weight: jax.Array) -> None:
    """Takes one update by the mean over the whole batch."""
    optimizer.update(model, jax.tree.map(lambda g: g / weight, gradient))


class Loop:
    """The loop on one device; the state is the model and its optimizer."""

    def __init__(self, layout: maxbatch.Layout) -> None:
        if layout.num_devices > 1:
            raise ValueError("this loop trains on one device")
        self.rows_per_pass = layout.rows_per_pass

    def init(self) -> Any:
        """Returns a new model and its optimizer."""
        model = Bigrams(rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
        """Accumulates over the micro-batches, and takes one update."""
        model, optimizer = state
        parts = []
        for start in range(0, len(batch["tokens"]), self.rows_per_pass):
            rows = slice(start, start + self.rows_per_pass)
            parts.append(
                gradient_of(
                    model, jnp.asarray(batch["tokens"][rows]), jnp.asarray(batch["weights"][rows])
                )
            )
        (loss, weight), gradient = jax.tree.map(lambda *of_parts: sum(of_parts), *parts)
        update(model, optimizer, gradient, weight)
        return (model, optimizer), {"loss": loss / weight}

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        leaves = jax.tree_util.tree_leaves_with_path(nnx.state(state[0], nnx.Param))
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout)


if __name__ == "__main__":
    print(maxbatch.audit(make))
