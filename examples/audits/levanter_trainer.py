"""Levanter's `Trainer`: `train_step` on a tiny LLaMA, with `per_device_parallelism` as the rows of
a pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

import maxbatch

LENGTH, VOCABULARY = 8, 8
MODEL = LlamaConfig(
    max_seq_len=LENGTH,
    hidden_dim=16,
    intermediate_dim=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    attn_backend=AttentionBackend.VANILLA,
)
OPTIMIZER = optax.adamw(1e-2)


def loss_of(model: Any, example: LmExample, key: Any = None) -> Any:
    """Returns Levanter's own loss of next tokens: their mean over the trained ones."""
    return model.compute_next_token_loss(example, key=key)


@cache
def trainer_of(num_rows: int, rows_per_pass: int) -> Trainer:
    """Returns a trainer of batches of B rows, which keeps its compiled step."""
    config = TrainerConfig(
        id="audit",
        tracker=NoopConfig(),
        mp=jmp.get_policy("f32"),
        train_batch_size=num_rows,
        per_device_parallelism=rows_per_pass,
        num_train_steps=10,
        log_jaxprs=False,
        log_xla_hlo=False,
        crash_on_nan=False,
        require_accelerator=False,
        load_checkpoint=False,
    )
    return Trainer(config, OPTIMIZER, loss_of, add_default_hooks=False)


class Loop:
    """The trainer of one layout, on one device."""

    def __init__(self, layout: maxbatch.Layout) -> None:
        if layout.num_devices > 1:
            raise ValueError("this adapter has one device")
        self.rows_per_pass = layout.rows_per_pass

    def init(self) -> Any:
        """Returns the arrays of a new state."""
        with trainer_of(8, 8) as trainer:
            vocabulary = hax.Axis("vocab", VOCABULARY)
            state = trainer.initial_state(
                jax.random.key(0), model_init=lambda: MODEL.build(vocabulary, key=jax.random.key(1))
            )
        return state

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, float]]:
        """Takes one update."""
        rows, position = hax.Axis("batch", len(batch["tokens"])), hax.Axis("position", LENGTH)
        # Levanter's weight of a token is that of the prediction made there, one place before its
        # target.
        weights = np.pad(batch["weights"][:, 1:], ((0, 0), (0, 1)))
        with trainer_of(rows.size, self.rows_per_pass) as trainer:
            example = LmExample(
                tokens=hax.named(jnp.asarray(batch["tokens"]), (rows, position)),
                loss_weight=hax.named(jnp.asarray(weights), (rows, position)),
                attn_mask=AttentionMask.causal(),
            )
            # the step donates its state
            info = trainer.train_step(jax.tree.map(jnp.copy, state), example)
        return info.state, {"loss": float(info.loss)}

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        leaves = jax.tree_util.tree_leaves_with_path(state.trainable_model)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout)
