"""A Flax NNX model with `nnx.Optimizer` around `optax.MultiSteps`, the way that Optax and Flax
document.
"""

from __future__ import annotations

from functools import cache
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
def micro_step(
    model: Bigrams, optimizer: nnx.Optimizer, tokens: jax.Array, weights: jax.Array
) -> jax.Array:
    """Returns the mean loss of the trained tokens of a micro-batch, and gives its gradient to
    MultiSteps.
    """

    def mean_loss(model: Bigrams) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(tokens[:, :-1]), tokens[:, 1:]
        )
        return jnp.sum(losses * weights[:, 1:]) / jnp.maximum(jnp.sum(weights[:, 1:]), 1)

    loss, gradient = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradient)
    return loss


@cache
def multi_steps(passes: int) -> optax.GradientTransformation:
    """Returns AdamW that takes one update for so many micro-batches."""
    return optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=passes).gradient_transformation()


class Loop:
    """The loop of one layout, on one device."""

    def __init__(self, layout: maxbatch.Layout) -> None:
        if layout.num_devices > 1:
            raise ValueError("this adapter has one device")
        self.layout = layout

    def init(self) -> Any:
        """Returns a new model and its optimizer."""
        model = Bigrams(rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(
            model, multi_steps(self.layout.gradient_accumulation_steps), wrt=nnx.Param
        )

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
        """Takes the micro-steps of one update; the loss is the mean of theirs."""
        model, optimizer = state
        # a resume may have another layout
        optimizer.tx = multi_steps(self.layout.gradient_accumulation_steps)
        losses = []
        for start in range(0, len(batch["tokens"]), self.layout.rows_per_pass):
            rows = slice(start, start + self.layout.rows_per_pass)
            losses.append(
                micro_step(
                    model,
                    optimizer,
                    jnp.asarray(batch["tokens"][rows]),
                    jnp.asarray(batch["weights"][rows]),
                )
            )
        return state, {"loss": np.mean(losses)}

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        leaves = jax.tree_util.tree_leaves_with_path(nnx.state(state[0], nnx.Param))
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout)
