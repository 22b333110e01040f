"""The balance of experts: exact sums over the batch, the step of the bias, what a skipped update
changes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.data.feed.placement import Batch
from maxbatch.parallel.mesh import make_mesh
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.balance import Balance
from maxbatch.update.state import abstract_state, init_state
from maxbatch.update.step import make_train_step
from tests.helpers.tiny import ONE_LAYER, some_rows, tiny_config

ROWS = 16
KEYS = (
    "decoder_block=qwen3_moe",
    "num_experts=4",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    "use_qk_norm=true",
    "base_moe_mlp_dim=16",
    ONE_LAYER,
    "opt_type=sgd",
    "adam_b1=0",
    "adam_weight_decay=0",
    "gradient_clipping_threshold=0",
    "routed_bias=true",
    "routed_bias_update_rate=0.25",
)


class Stepper:
    """The update of a config, its batch cut into so many micro-batches."""

    def __init__(self, micro_batches: int, *overrides: str) -> None:
        config = tiny_config(*KEYS, *overrides)
        mesh = make_mesh(config, jax.devices()[:1])
        keys = config.update
        abstract = abstract_state(keys, mesh)
        self.state = init_state(keys, abstract)
        self._step = make_train_step(keys, mesh, abstract)
        self._micro_batches = micro_batches

    def __call__(self, rows: dict[str, np.ndarray], rate: float = 1.0) -> Any:
        """Takes one update; returns its metrics."""
        cut = (
            rows[name].reshape(self._micro_batches, -1, rows[name].shape[1])
            for name in ("tokens", "segments", "weights")
        )
        settings = jax.tree.map(jnp.float32, UpdateSettings(rate))
        batch = Batch(*map(jnp.asarray, cut))
        self.state, metrics = self._step(
            self.state, batch, jnp.int32(self._micro_batches), settings
        )
        return jax.device_get(metrics)

    def parameters(self) -> dict[str, np.ndarray]:
        """Returns copies of all parameters."""
        leaves = jax.tree.leaves_with_path(self.state.params)
        return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


@cache
def router_step(cut: int, *overrides: str) -> np.ndarray:
    """The change of the router by an update of so many micro-batches."""
    stepper = Stepper(cut, *overrides)
    stepper.state = stepper.state._replace(
        opt_state=stepper.state.opt_state._replace(last_counts_NxE=jnp.asarray([[9, 3, 2, 2]]))
    )
    before = stepper.parameters()
    stepper(some_rows(ROWS))
    router = next(name for name in before if "router" in name)
    return stepper.parameters()[router] - before[router]


@pytest.mark.runs
@pytest.mark.parametrize("scope", ["sequence", "global"])
def test_the_balance_gradient_does_not_depend_on_the_cut(scope):
    """The change of the router by the two terms alone is the same of 16 micro-batches as of one."""
    terms = (
        "load_balance_loss_weight=50",
        "router_z_loss_weight=50",
        f"load_balance_scope={scope}",
    )
    alone = {cut: router_step(cut, *terms) - router_step(cut) for cut in (1, ROWS)}
    assert np.abs(alone[1]).max() > 1e-2
    assert np.abs(alone[ROWS] - alone[1]).max() <= 1e-5 * np.abs(alone[1]).max()


@pytest.mark.runs
def test_the_loss_is_that_of_the_tokens_and_the_terms_stand_beside_it():
    rows, found = some_rows(ROWS), {}
    for weight in ("0", "0.5"):
        found[weight] = Stepper(
            2, f"load_balance_loss_weight={weight}", f"router_z_loss_weight={weight}"
        )(rows)
    np.testing.assert_allclose(found["0"].loss, found["0.5"].loss, rtol=1e-6)
    np.testing.assert_allclose(
        found["0"].routing.load_balance_loss, found["0.5"].routing.load_balance_loss, rtol=1e-6
    )
    assert 0.9 < found["0"].routing.load_balance_loss < 2 and found["0"].routing.router_z_loss > 0
    assert found["0"].grad_norm != found["0.5"].grad_norm


@pytest.mark.runs
def test_one_step_of_the_bias_follows_the_counts_of_the_whole_batch_and_a_skipped_update_changes_nothing():
    rows, stepper = some_rows(ROWS), Stepper(4)
    before = stepper.parameters()
    skipped = stepper(rows, rate=float("inf"))
    assert skipped.skipped
    unchanged = stepper.parameters()
    assert all((unchanged[name] == value).all() for name, value in before.items())
    assert not np.asarray(stepper.state.opt_state.last_counts_NxE).any()
    stepper(rows, rate=1e-3)
    counts = np.asarray(stepper.state.opt_state.last_counts_NxE)
    assert (counts.sum(axis=1) == 2 * np.count_nonzero(rows["segments"])).all()
    bias = next(value for name, value in stepper.parameters().items() if "routed_bias" in name)
    np.testing.assert_array_equal(bias, 0.25 * np.sign(counts.mean(axis=1, keepdims=True) - counts))

    def without(places: slice) -> dict[str, np.ndarray]:
        weights = rows["weights"].copy()
        weights[:, places] = 0
        return rows | {"weights": weights}

    before = stepper.parameters()
    assert stepper(without(slice(None)), rate=1e-3).weight == 0, "there is nothing to learn"
    unchanged = stepper.parameters()
    assert all((unchanged[name] == value).all() for name, value in before.items())
    np.testing.assert_array_equal(stepper.state.opt_state.last_counts_NxE, counts)
    # tokens are counted whatever their weight in the loss
    stepper(without(slice(4, None)), rate=0.0)
    counts = np.asarray(stepper.state.opt_state.last_counts_NxE)
    assert (counts.sum(axis=1) == 2 * np.count_nonzero(rows["segments"])).all()


def test_the_sign_of_a_step_is_exact_where_the_mean_is_no_whole_number():
    config = tiny_config(*KEYS).update
    balance = Balance.from_config(config)
    assert balance is not None
    params = nnx.State({"layers": {"experts": {"routed_bias": nnx.Param(jnp.zeros((2, 4)))}}})
    counts = jnp.asarray([[2, 2, 2, 3], [4, 4, 4, 4]], jnp.int32)  # means of 2.25 and 4
    stepped = balance.with_bias_stepped(params, counts)
    np.testing.assert_array_equal(
        jax.tree.leaves(stepped)[0], [[0.25, 0.25, 0.25, -0.25], [0, 0, 0, 0]]
    )


def test_the_bias_has_no_place_in_the_optimizer():
    state = Stepper(1, "opt_type=adamw", "adam_b1=0.9", "adam_weight_decay=0.1").state
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.opt_state)]
    assert not any("routed_bias" in name for name in names) and any(
        "router" in name for name in names
    )
