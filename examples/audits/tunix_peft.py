"""Tunix's `PeftTrainer` with its default loss: `train()` for each update, a micro-batch an example
of its dataset.

It logs a loss one update late; the audit judges its parameters alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

import maxbatch

VOCABULARY, WIDTH = 8, 16


class Bigrams(nnx.Module):
    """Predicts a token from the one before it; called as Tunix calls its models."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: Any, cache: Any, attention_mask: Any
    ) -> tuple[jax.Array, None]:
        """Returns logits [M, L, V], and no cache."""
        return self.out(nnx.gelu(self.table(tokens))), None


def inputs_of(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the arguments of the default loss."""
    tokens = batch["tokens"]
    return {
        "input_tokens": jnp.asarray(tokens),
        "input_mask": jnp.asarray(batch["weights"]),
        "positions": jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        "attention_mask": None,
    }


@cache
def trainer_of(passes: int) -> PeftTrainer:
    """Returns a trainer of so many micro-batches an update, which keeps its compiled step."""
    config = TrainingConfig(eval_every_n_steps=10**6, gradient_accumulation_steps=passes)
    trainer = PeftTrainer(
        Bigrams(rngs=nnx.Rngs(0)), optax.adamw(1e-2), config, metrics_logger=Silent()
    )
    trainer.is_managed_externally = True  # so that a further call of train() goes on
    return trainer.with_gen_model_input_fn(inputs_of)


class Silent(MetricsLogger):
    """A logger without files."""

    def __init__(self) -> None:
        pass

    def log(self, *_: Any) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Loop:
    """The trainer of one layout, on one device; the state is that of its model and its
    optimizer.
    """

    def __init__(self, layout: maxbatch.Layout) -> None:
        if layout.num_devices > 1:
            raise ValueError("this adapter has one device")
        self.rows_per_pass = layout.rows_per_pass
        self.trainer = trainer_of(layout.gradient_accumulation_steps)

    def init(self) -> Any:
        """Returns a new state."""
        model = Bigrams(rngs=nnx.Rngs(0))
        steps = optax.MultiSteps(optax.adamw(1e-2), self.trainer.config.gradient_accumulation_steps)
        return self._copied((model, nnx.Optimizer(model, steps, wrt=nnx.Param)))

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, None]:
        """Takes one update."""
        for of_trainer, value in zip(
            (self.trainer.model, self.trainer.optimizer), state, strict=True
        ):
            nnx.update(of_trainer, jax.tree.map(jnp.asarray, value))
        starts = range(0, len(batch["tokens"]), self.rows_per_pass)
        self.trainer.train(
            [
                {name: x[start : start + self.rows_per_pass] for name, x in batch.items()}
                for start in starts
            ],
            cache_nnx_graph=False,
        )
        return self._copied((self.trainer.model, self.trainer.optimizer)), None

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        leaves = jax.tree_util.tree_leaves_with_path(state[0])
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    def _copied(self, modules: tuple[Any, Any]) -> Any:
        return tuple(jax.tree.map(np.array, nnx.state(module)) for module in modules)


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout)
