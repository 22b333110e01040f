"""Your own loss and your own model in maxbatch's loop, which keeps batch, accumulation, checkpoints
and resume.

python examples/own_loss.py
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import maxbatch
from maxbatch import Config

CONFIG = [
    "dataset_type=synthetic",
    "max_target_length=32",
    "steps=20",
    "gradient_accumulation_steps=2",
    "eval_interval=-1",
]
Z_LOSS = 1e-4


class GatedRecurrence(nnx.Module):
    """A recurrent language model: each state is a gated mean of the tokens so far."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(config.vocab_size, 32, rngs=rngs)
        self.gate = nnx.Linear(32, 32, rngs=rngs)
        self.out = nnx.Linear(32, config.vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        """Returns logits [M, L, V]; the state is reset at the start of a document."""
        x = self.table(tokens)
        begins = segments != jnp.roll(segments, 1, axis=1)
        keep = jax.nn.sigmoid(self.gate(x)) * ~begins[..., None]

        def joined(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, states = jax.lax.associative_scan(joined, (keep, (1 - keep) * x), axis=1)
        return self.out(states)


def loss_with_z(model: GatedRecurrence, rows: maxbatch.Rows) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of cross-entropy and z-loss (PaLM, https://arxiv.org/abs/2204.02311), and of
    the weights.
    """
    logits = model(rows.tokens, rows.segments)[:, :-1].astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    of_target = jnp.take_along_axis(logits, rows.tokens[:, 1:, None], axis=-1)[..., 0]
    weights = rows.weights[:, 1:]
    return jnp.sum((log_z - of_target + Z_LOSS * log_z**2) * weights), jnp.sum(weights)


def main(run_dir: str = "runs/own-loss") -> maxbatch.Outcome:
    """Trains; the run folder is an ordinary one, and the same call resumes it."""
    config = maxbatch.load_config(overrides=[*CONFIG, f"run_dir={run_dir}"])
    return maxbatch.train(config, model=GatedRecurrence, objective=loss_with_z)


if __name__ == "__main__":
    main(*sys.argv[1:2])
