"""The smallest model and batches that still exercise every part; shared by the tests of
training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxbatch import load_config
from maxbatch.config.config import Config
from maxbatch.model.decoder import Decoder
from maxbatch.model.loss import loss_sums_of

LENGTH = 32
TINY_MODEL = (
    "base_emb_dim=32",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=8",
    "base_mlp_dim=64",
    "base_num_decoder_layers=2",
    f"max_target_length={LENGTH}",
)
# Measuring the noise, as a user's run does, takes a third of the time to compile a step.
UNMEASURED, MEASURED = "gradient_noise_scale=false", "gradient_noise_scale=true"
TINY_RUN = (
    *TINY_MODEL,
    "dataset_type=synthetic",
    "synthetic_samples=500",
    "learning_rate=1e-2",
    "generate_prompt=",
    "eval_interval=-1",
    UNMEASURED,
)

# Of a run that is compared with another and that none goes on from: no program of checksums,
# nothing written.
UNSAVED = "enable_checkpointing=false"

# Of a test for which the number of layers does not matter: half as much to compile.
ONE_LAYER = "base_num_decoder_layers=1"


def tiny_config(*overrides: str) -> Config:
    return load_config(overrides=[*TINY_RUN, *overrides])


def one_layer_config(*overrides: str) -> Config:
    return tiny_config(ONE_LAYER, *overrides)


def some_rows(num_rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of very unequal weight: from a few tokens that count to all of them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, LENGTH + 1, num_rows)
    real = np.arange(LENGTH)[None, :] < lengths[:, None]
    return {
        "tokens": np.where(real, rng.integers(0, 256, (num_rows, LENGTH)), 258).astype(np.int32),
        "segments": real.astype(np.int32),
        "weights": (real & (np.arange(LENGTH) > 0)[None, :]).astype(np.float32),
    }


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


SAME = ("step", "samples_seen", "global_batch_size", "stage", "data_fingerprint")
CLOSE = ("loss", "grad_norm", "eval_loss")


def assert_same_run(
    found: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]],
    same: Sequence[str] = SAME,
    close: Sequence[str] = CLOSE,
    tolerance: float = 2e-4,
) -> None:
    """Compares the lines of two runs: the same data bit for bit, the same losses to float
    tolerance.
    """
    for line, other in zip(found, expected, strict=True):
        found_same, same_of_other = ({key: one[key] for key in same} for one in (line, other))
        assert found_same == same_of_other, f"{found_same}, not {same_of_other}"
        for key in other.keys() & set(close):
            assert line[key] == pytest.approx(other[key], rel=tolerance, abs=tolerance / 10), (
                other["step"],
                key,
            )


def loss_sums(
    decoder: Decoder, tokens: jax.Array, segments: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sum of the next-token losses of rows, and of their weights."""
    return loss_sums_of(decoder, decoder.hidden(tokens, segments).x_MxLxD, tokens, weights)


def bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
