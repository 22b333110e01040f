"""The trainer's side of a comparison: its model, its rows, its compiled update."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.config.config import Config
from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.data.stream.rows import RowArrays
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.state import TrainState, init_state

LEARNING_RATE = np.float32(1e-3)

# 20M parameters; all but the embedding take part in products.
MODEL = (
    "base_emb_dim=256",
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
    "head_dim=64",
    "base_mlp_dim=768",
    "base_num_decoder_layers=4",
    "logits_via_embedding=false",
    "vocab_size=32000",
    "max_target_length=256",
)
QUICK_MODEL = (
    "base_emb_dim=32",
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
    "head_dim=8",
    "base_mlp_dim=64",
    "base_num_decoder_layers=2",
    "logits_via_embedding=false",
    "max_target_length=32",
)
RUN = (
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "eval_interval=-1",
    "generate_prompt=",
)


def rows_of_documents(num_rows: int, config: Config) -> RowArrays:
    """Rows of random tokens, each of three documents, in memory: arrays [n, L]."""
    rng = np.random.default_rng(0)
    shape = (num_rows, config.max_target_length)
    segments = np.sort(rng.integers(1, 4, shape), axis=1).astype(np.int32)
    weights = np.zeros(shape, np.float32)
    weights[:, 1:] = segments[:, 1:] == segments[:, :-1]
    return {
        "tokens": rng.integers(0, config.vocab_size, shape, dtype=np.int32),
        "segments": segments,
        "weights": weights,
    }


class TrainerStep:
    """The trainer's compiled update on a state of its own, fed from rows in memory.

    Args:
      executable: a compiled train step for batches of `shape`.
      abstract: the train state's shapes and shardings.
    """

    def __init__(
        self, config: Config, mesh: Mesh, abstract: TrainState, executable: Any, shape: BatchShape
    ) -> None:
        self._executable, self._shape = executable, shape
        self._placement = Placement(batch_sharding(mesh), config.max_target_length)
        self.state = init_state(config.update, abstract)

    def __call__(self, rows: RowArrays, num_micro_batches: int) -> tuple[float, float]:
        """Takes one update; returns its loss and gradient norm once it is done."""
        batch = self._placement.stage(rows, len(rows["tokens"]), self._shape)
        self.state, metrics = self._executable(
            self.state, batch, np.int32(num_micro_batches), UpdateSettings(LEARNING_RATE)
        )
        loss, norm = jax.device_get((metrics.loss, metrics.grad_norm))
        return float(loss), float(norm)
