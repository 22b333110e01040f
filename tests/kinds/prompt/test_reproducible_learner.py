"""With `reproducible_sums`, an update of a policy is equal to the last bit on any number of devices
and for any chunks.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from maxbatch import load_config
from maxbatch.kinds.prompt.objective import pair_rows
from maxbatch.kinds.prompt.reproducible_learner import ReproducibleLearner
from maxbatch.parallel.mesh import make_mesh
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.reproducible.hashes import StateHasher
from maxbatch.update.state import init_opt_state
from tests.helpers.policies import KEYS, RL
from tests.helpers.tiny import LENGTH, some_rows

PAIRS = 6
REPRODUCIBLE = ("reproducible_sums=true", "grpo_beta=0.1", "opt_type=sgd", "vocab_size=272")


def update_on(devices: int, chunk: int, sampled_logprob: float) -> tuple[Any, Any, str]:
    """Returns the rows of the first chunk, the metrics and the hash of the state after an update on
    devices, from chunks of so many rows.
    """
    config = load_config(RL, [*KEYS, *REPRODUCIBLE, "micro_batch_size=-1"])
    mesh = make_mesh(config, jax.devices()[:devices])
    learner = ReproducibleLearner(config.learner, mesh, chunk, LENGTH)
    params = learner.first_parameters()
    state = init_opt_state(config.learner, learner.abstract, params)
    learner = learner.referring_to(jax.tree.map(lambda x: 2 * x, params))
    rows = some_rows(PAIRS)
    mask = rows["weights"] > 0
    pairs = pair_rows(
        rows["tokens"],
        mask,
        np.where(mask, np.float32(sampled_logprob), np.float32(0)),
        rows["segments"].sum(axis=1, dtype=np.int32),
        np.linspace(-1, 1, PAIRS, dtype=np.float32),
    )
    placed = []
    for first in range(0, PAIRS, chunk):
        part = {name: x[first : first + chunk] for name, x in pairs.items()}
        missing = chunk - len(part["tokens"])
        filled = {name: np.pad(x, ((0, missing), (0, 0))) for name, x in part.items()}
        placed.append(learner.place_rows(filled, params))
    for chunk_of_pairs in placed:
        jax.block_until_ready(learner.add(state, chunk_of_pairs))
    settings = UpdateSettings(learning_rate=1e-2)
    state, metrics = learner.step(state, settings)
    hashes = StateHasher(learner.abstract, mesh).read(np.asarray(metrics.hashes), 1)
    return placed[0], metrics, hashes.of_state


@pytest.mark.runs
def test_an_update_of_a_policy_is_the_same_to_the_bit_on_other_devices_and_chunks() -> None:
    _, expected, hash_of_one = update_on(1, PAIRS, -1.0)
    # the sampler's log-probabilities depend on its devices, and are computed anew
    pairs, metrics, hash_of_three = update_on(3, 3, -2.0)
    assert hash_of_three == hash_of_one
    assert (metrics.loss, metrics.grad_norm) == (expected.loss, expected.grad_norm)
    assert metrics.others == expected.others and float(metrics.others["kl"]) > 0
    assert float(metrics.others["old_policy_kl"]) == pytest.approx(0, abs=1e-5)
    assert np.asarray(pairs.old_logprobs_MxL).min() < -2
