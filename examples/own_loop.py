"""Your own training loop, with a Flax model and an Optax optimizer, on the batches that maxbatch
would train on.

python examples/own_loop.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import maxbatch

CONFIG = ["dataset_type=synthetic", "max_target_length=32", "steps=20", "per_device_batch_size=8"]


class Bigrams(nnx.Module):
    """Predicts a token from the one before it."""

    def __init__(self, vocab_size: int, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(vocab_size, 32, rngs=rngs)
        self.out = nnx.Linear(32, vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits [B, L, V]."""
        return self.out(self.table(tokens))


@nnx.jit
def update(
    model: Bigrams, optimizer: nnx.Optimizer, batch: maxbatch.Rows, rate: jax.Array
) -> jax.Array:
    """Takes one update at a learning rate; returns the loss, the mean over the weights of the
    global batch.
    """

    def loss_of(model: Bigrams) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(batch.tokens)[:, :-1], batch.tokens[:, 1:]
        )
        weights = batch.weights[:, 1:]
        return jnp.sum(losses * weights) / jnp.sum(weights)

    loss, gradient = nnx.value_and_grad(loss_of)(model)
    optimizer.opt_state.hyperparams["learning_rate"][...] = rate
    optimizer.update(model, gradient)
    return loss


def main() -> list[float]:
    """Trains; returns the loss of every update."""
    config = maxbatch.load_config(overrides=CONFIG)
    mesh = maxbatch.make_mesh(config)
    rate_at = maxbatch.LearningRate.from_config(config, num_devices=mesh.size)
    model = Bigrams(config.vocab_size, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, optax.inject_hyperparams(optax.adamw)(learning_rate=0.0), wrt=nnx.Param
    )
    losses = []
    with maxbatch.open_feed(config, mesh, start=0) as feed:
        for batch in feed:
            rows = maxbatch.Rows(batch.tokens, batch.segments, batch.weights)
            loss = update(model, optimizer, rows, jnp.float32(rate_at(batch.samples_seen)))
            losses.append(float(loss))
            print(
                f"step {batch.step}: samples {batch.samples_seen} to {batch.end}, loss "
                f"{losses[-1]:.4f}"
            )
    return losses


if __name__ == "__main__":
    main()
