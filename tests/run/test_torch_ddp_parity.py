"""The rows on DDP of docs/batch-size.md, asked of PyTorch itself: two processes over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytestmark = [pytest.mark.parity, pytest.mark.slow]

W, G, B, L, V = 2, 2, 8, 12, 16  # ranks, passes, rows, slots, words
ROOT = Path(__file__).parents[2]


def rows_of(equal: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = np.full(B, L) if equal else rng.integers(3, L + 1, B)
    tokens = rng.integers(0, V, (B, L))
    tokens[0, 0] = V - 1
    return {"tokens": tokens, "weights": (np.arange(L) < lengths[:, None]).astype(np.float32)}


def asked_of_torch(rows: dict[str, np.ndarray]) -> dict[str, Any]:
    np.savez("rows.npz", **rows)
    command = [sys.executable, "-m", "tests.helpers.torch_ddp"]
    ranks = [
        subprocess.Popen(
            [
                *command,
                str(rank),
                str(W),
                str(Path("rendezvous").resolve()),
                str(Path("rows.npz").resolve()),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(W)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * W
    Path("rendezvous").unlink(missing_ok=True)
    found: dict[str, Any] = json.loads(outputs[0])
    return found


def token_weighted(rows: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the gradient here: of the sum of token losses over the sum of weights, of the whole
    batch.
    """

    def loss(table: jax.Array) -> jax.Array:
        tokens, weights = jnp.asarray(rows["tokens"]), jnp.asarray(rows["weights"][:, 1:])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            table[tokens[:, :-1]], tokens[:, 1:]
        )
        return jnp.sum(losses * weights) / jnp.sum(weights)

    return np.asarray(jax.grad(loss)(jnp.zeros((V, V))))


def test_ddp_itself_averages_over_its_ranks_as_the_page_says() -> None:
    rows = rows_of(equal=True)
    found, expected, tokens = (
        asked_of_torch(rows),
        token_weighted(rows),
        float(rows["weights"][:, 1:].sum()),
    )
    gradients = {name: np.asarray(value) for name, value in found["gradients"].items()}
    np.testing.assert_allclose(gradients["mean"], expected, atol=1e-6)  # ddp-mean
    # ddp-sum
    np.testing.assert_allclose(gradients["sum"], expected * tokens / W, rtol=1e-4, atol=1e-5)
    # accumulate-mean
    np.testing.assert_allclose(gradients["accumulated mean"], expected, atol=1e-6)
    # accumulate-sum
    np.testing.assert_allclose(gradients["accumulated sum of means"], expected * G, atol=1e-6)
    # last-batch: rows from the front even out the ranks, and are trained on twice
    assert sorted(row for rank in found["dealt"] for row in rank) == [0, 0, 1, 2, 3, 4]


def test_ddp_itself_takes_a_mean_of_means_of_rows_of_unequal_length() -> None:
    rows = rows_of(equal=False)
    expected = token_weighted(rows)
    mean = np.asarray(asked_of_torch(rows)["gradients"]["accumulated mean"])
    best_rate = np.sum(mean * expected) / np.sum(expected * expected)
    assert np.linalg.norm(mean - best_rate * expected) > 0.02 * np.linalg.norm(mean)
