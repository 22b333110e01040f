"""The update depends on which samples are in the global batch, and on nothing else."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxbatch.config.sections import REMAT_TENSORS
from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.system.hashing import limb_sums, row_hashes, to_hex
from maxbatch.update.state import abstract_model, abstract_state, init_opt_state, init_state
from maxbatch.update.step import StepMetrics, make_train_step
from tests.helpers.tiny import LENGTH, MEASURED, bytes_of, some_rows, tiny_config

ROWS = 16
COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)[\w-]*\("
)


@cache
def _program(num_devices: int, overrides: tuple[str, ...]) -> tuple[Any, Any, Any, Any]:
    config = tiny_config(*overrides)
    mesh = make_mesh(config, jax.devices()[:num_devices])
    abstract = abstract_state(config.update, mesh)
    return config, mesh, abstract, make_train_step(config.update, mesh, abstract)


OF_THE_PROGRAM = (
    "ici_",
    "gradient_noise_scale=",
    "num_pipeline_",
    "remat_policy=",
    "scan_layers=",
    *REMAT_TENSORS,
)
OF_THE_OPTIMIZER = (
    "opt_type=",
    "adam_",
    "gradient_clipping_threshold=",
    "parameter_average_half_life=",
)


def _without(overrides: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in overrides if not word.startswith(names))


@cache
def _parameters(overrides: tuple[str, ...]) -> Any:
    config, _, abstract, _ = _program(1, overrides)
    return init_state(config.update, abstract).params


@cache
def _initial(overrides: tuple[str, ...]) -> Any:
    config, _, abstract, _ = _program(1, overrides)
    params = _parameters(_without(overrides, OF_THE_OPTIMIZER))
    return jax.device_get(init_opt_state(config.update, abstract, params))


def initial_state(overrides: tuple[str, ...], abstract: Any) -> Any:
    """The initial values, made once on one device for all meshes (they do not depend on it: a test
    of its own).
    """
    state = _initial(_without(overrides, OF_THE_PROGRAM))
    placed = jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), state, abstract)
    return jax.block_until_ready(placed)


def run_steps(
    batches: list[dict[str, np.ndarray]],
    micro_batch: int,
    max_micro_batches: int,
    num_devices: int = 1,
    overrides: tuple[str, ...] = (),
    learning_rate: float = 1e-2,
) -> tuple[Any, list[StepMetrics]]:
    """Trains on `batches`, cut into micro-batches of `micro_batch` rows; returns the state and
    every step's metrics.
    """
    _, mesh, abstract, step = _program(num_devices, overrides)
    state, metrics = initial_state(overrides, abstract), []
    for rows in batches:
        batch = Placement(batch_sharding(mesh), LENGTH).stage(
            rows, len(rows["tokens"]), BatchShape(micro_batch, max_micro_batches)
        )
        num = -(-len(rows["tokens"]) // micro_batch)
        state, result = step(state, batch, np.int32(num), UpdateSettings(np.float32(learning_rate)))
        # Of two programs in flight on CPU devices, each can hold threads that the other's
        # collectives wait for.
        state, result = jax.block_until_ready((state, result))
        metrics.append(jax.device_get(result))
    return jax.device_get(state), metrics


def assert_same_steps(
    one: tuple[Any, list[StepMetrics]],
    other: tuple[Any, list[StepMetrics]],
    tolerance: float = 2e-4,
) -> None:
    for a, b in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=tolerance)
        np.testing.assert_allclose(a.grad_norm, b.grad_norm, rtol=tolerance)
        np.testing.assert_array_equal(a.fingerprint, b.fingerprint)
        assert a.weight == b.weight
    for a, b in zip(jax.tree.leaves(one[0]), jax.tree.leaves(other[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@cache
def one_device_one_pass() -> tuple[Any, list[StepMetrics]]:
    return run_steps([some_rows(ROWS, seed) for seed in range(3)], ROWS, 1)


@pytest.mark.parametrize(
    ("num_devices", "micro_batch", "max_micro_batches", "overrides"),
    [
        (1, 1, 16, ()),
        (1, 4, 7, ()),  # room for more micro-batches than there are
        (2, 2, 8, ("ici_data_parallelism=2", MEASURED)),
        (8, 4, 4, ("ici_data_parallelism=2", "ici_tensor_parallelism=2")),
        (4, 4, 4, ("ici_context_parallelism=2",)),
        # a last micro-batch that is partly padding; widths that 3 devices do not divide
        (3, 6, 3, ()),
        (1, 16, 1, ("scan_layers=true", "remat_policy=full", MEASURED)),
        (
            2,
            8,
            2,
            (
                "scan_layers=true",
                "remat_policy=custom",
                "decoder_layer_input=offload",
                "query_proj=offload",
            ),
        ),
    ],
)
def test_the_update_does_not_depend_on_devices_or_on_the_cut(
    num_devices: int, micro_batch: int, max_micro_batches: int, overrides: tuple[str, ...]
) -> None:
    batches = [some_rows(ROWS, seed) for seed in range(3)]
    assert_same_steps(
        run_steps(batches, micro_batch, max_micro_batches, num_devices, overrides),
        one_device_one_pass(),
    )


def test_loss_and_gradient_are_the_token_weighted_mean_over_the_global_batch() -> None:
    """Against plain JAX: one big batch, logits in full, the sum of losses over the sum of
    weights.
    """
    config, _, abstract, _ = _program(1, ())
    rows = some_rows(ROWS)
    graphdef, _ = abstract_model(config.decoder)

    def mean_loss(params: Any) -> jax.Array:
        decoder = nnx.merge(graphdef, params)
        logits = (
            decoder.hidden(rows["tokens"], rows["segments"]).x_MxLxD @ decoder.output_projection()
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], rows["tokens"][:, 1:]
        )
        weights = rows["weights"][:, 1:]
        return (losses * weights).sum() / weights.sum()

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(initial_state((), abstract).params)
    _, (metrics,) = run_steps([rows], 1, ROWS)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(gradient), rtol=1e-5)
    assert metrics.weight == rows["weights"].sum()


def test_the_fingerprint_is_of_the_rows_that_were_trained_on() -> None:
    rows = some_rows(ROWS)
    _, (metrics,) = run_steps([rows], 4, 7)
    hashes = row_hashes(np, rows["tokens"], rows["segments"], rows["weights"])
    assert to_hex(metrics.fingerprint) == to_hex(limb_sums(np, hashes))
    rows["tokens"][3, 0] += 1
    assert to_hex(metrics.fingerprint) != to_hex(
        limb_sums(np, row_hashes(np, rows["tokens"], rows["segments"], rows["weights"]))
    )


def test_state_knows_nothing_of_accumulation() -> None:
    """MultiSteps around the optimizer would keep 4 more bytes per parameter, in memory and in the
    checkpoint.
    """
    _, _, abstract, _ = _program(1, ())
    counters = bytes_of([x for x in jax.tree.leaves(abstract) if x.shape == ()])
    assert bytes_of(abstract) - counters == 3 * bytes_of(abstract.params)


def test_the_average_of_the_parameters_moves_by_the_tokens_of_each_update_that_applies() -> None:
    overrides = ("parameter_average_half_life=1Kt",)
    _, mesh, abstract, step = _program(1, overrides)
    state = initial_state(overrides, abstract)
    expected = [np.asarray(x, np.float64) for x in jax.tree.leaves(jax.device_get(state.params))]
    for seed, (halvings, rate) in enumerate(
        [(0.5, 0.01), (1e-4, 0.01), (0.7, np.inf), (3.0, 0.01)]
    ):
        batch = Placement(batch_sharding(mesh), LENGTH).stage(
            some_rows(ROWS, seed), ROWS, BatchShape(ROWS, 1)
        )
        settings = UpdateSettings(np.float32(rate), average_halvings=np.float32(halvings))
        state, metrics = step(state, batch, np.int32(1), settings)
        assert bool(metrics.skipped) == np.isinf(rate)
        if np.isfinite(rate):
            b, params = 0.5**halvings, jax.tree.leaves(jax.device_get(state.params))
            expected = [
                x * b + np.asarray(p, np.float64) * (1 - b)
                for x, p in zip(expected, params, strict=True)
            ]
        for found, wanted in zip(
            jax.tree.leaves(jax.device_get(state.average)), expected, strict=True
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


def test_a_non_finite_update_is_skipped_whole_and_does_not_outlive_its_step() -> None:
    """MultiSteps used the usual way keeps a NaN in its accumulator for good."""
    good, bad = some_rows(ROWS, 0), some_rows(ROWS, 1)
    bad["weights"][5, 1] = np.nan
    state, metrics = run_steps([bad, good], 2, 8)
    assert [bool(m.skipped) for m in metrics] == [True, False]
    expected, _ = run_steps([good], 2, 8)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("overrides", "learning_rate"),
    [
        ((), np.inf),
        (("opt_type=lion", "adam_weight_decay=2"), 3e38),
        (("adam_b1=0.9999999999",), 1e-2),  # 1 in float32: the moment is divided by 1 - 1
    ],
)
def test_an_update_whose_new_state_is_not_finite_is_skipped_whole(
    overrides: tuple[str, ...], learning_rate: float
) -> None:
    state, (metrics,) = run_steps([some_rows(ROWS)], ROWS, 1, 1, overrides, learning_rate)
    assert metrics.skipped and np.isfinite(metrics.grad_norm)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(_initial(overrides)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_optimizer_runs_once_per_update() -> None:
    """MultiSteps used the usual way runs its inner optimizer on every micro-batch."""
    state, _ = run_steps([some_rows(ROWS, seed) for seed in range(3)], 1, 16)
    counts = [int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == ()]
    assert counts == [3]


def test_bfloat16_gradients_are_accumulated_in_float32() -> None:
    """In bfloat16 a sum of equal terms stands still from the 256th on; the mean of 300 would lack a
    seventh.
    """
    row = some_rows(1)
    copies = {name: np.repeat(array, 300, axis=0) for name, array in row.items()}
    overrides = ("weight_dtype=bfloat16",)
    # a sum of one: the program has room for 300
    _, (one,) = run_steps([row], 1, 300, overrides=overrides)
    _, (many,) = run_steps([copies], 1, 300, overrides=overrides)
    np.testing.assert_allclose(many.grad_norm, one.grad_norm, rtol=1e-3)
    np.testing.assert_allclose(many.loss, one.loss, rtol=1e-5)


def test_the_gradient_is_clipped_once_by_its_global_norm() -> None:
    """The norm that is reported is the one before clipping; sgd shows the clipped length."""
    sgd = ("opt_type=sgd", "adam_b1=0", "adam_weight_decay=0", "gradient_clipping_threshold=0.01")
    state, (metrics,) = run_steps([some_rows(ROWS)], 4, 4, overrides=sgd, learning_rate=1.0)
    moved = optax.tree.norm(jax.tree.map(lambda a, b: a - b, state.params, _initial(sgd).params))
    assert metrics.grad_norm > 0.1
    np.testing.assert_allclose(moved, 0.01, rtol=1e-3)


def test_a_batch_without_weight_changes_nothing() -> None:
    good, empty = some_rows(ROWS, 0), some_rows(ROWS, 1)
    empty["weights"][:] = 0
    state, (metrics, _) = run_steps([empty, good], 4, 4)
    assert metrics.loss == 0 and metrics.grad_norm == 0 and not metrics.skipped
    expected, _ = run_steps([good], 4, 4)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_parameter_and_moment_is_sharded_from_birth() -> None:
    config, _, abstract, _ = _program(8, ("ici_data_parallelism=2", "ici_tensor_parallelism=2"))
    state = init_state(config.update, abstract)
    for leaf, planned in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)
        if leaf.ndim > 2 or leaf.shape[0:1] == (config.vocab_size,):  # matrices
            assert leaf.addressable_shards[0].data.size == leaf.size // 4, leaf.shape


def test_initial_values_do_not_depend_on_the_mesh() -> None:
    config, _, abstract, _ = _program(1, ())
    split_config, _, split_abstract, _ = _program(
        8, ("ici_data_parallelism=2", "ici_tensor_parallelism=2")
    )
    one, other = (
        init_state(config.update, abstract),
        init_state(split_config.update, split_abstract),
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_cross_the_data_axis_once_per_update() -> None:
    """No collective in the loop over micro-batches where parameters are replicated, and some after
    it.
    """
    _, mesh, abstract, step = _program(
        8, ("ici_data_parallelism=8", "ici_fsdp_parallelism=1", MEASURED)
    )
    batch = Placement(batch_sharding(mesh), LENGTH).stage(some_rows(ROWS), ROWS, BatchShape(8, 2))
    text = (
        step.lower(abstract, batch, np.int32(2), UpdateSettings(np.float32(0))).compile().as_text()
    )
    computations = dict(re.findall(r"^(?:ENTRY )?%([\w.-]+) .*?\{\n(.*?)^\}", text, re.M | re.S))
    called = re.findall(r" while\(.*body=%([\w.-]+)", text)
    for name in called:
        called += [
            n
            for n in re.findall(r"%([\w.-]+)", computations[name])
            if n in computations and n not in called
        ]
    assert sum("dot(" in computations[name] for name in called), "a loop computes the gradients"
    assert not [name for name in called if COLLECTIVE.search(computations[name])]
    assert COLLECTIVE.search(text)


def test_golden_numbers_of_the_first_updates() -> None:
    _, metrics = one_device_one_pass()
    golden = [(6.13774, 2.013963), (6.113558, 1.750208), (6.049537, 1.780766)]
    for m, (loss, norm) in zip(metrics, golden, strict=True):
        np.testing.assert_allclose([m.loss, m.grad_norm], [loss, norm], rtol=1e-4)


def test_strict_types() -> None:
    """The update mixes no dtypes by accident; only MultiSteps' own counters need the standard
    promotion.
    """
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        config, mesh, abstract, _ = _program(1, ())
        batch = Placement(batch_sharding(mesh), LENGTH).stage(
            some_rows(ROWS), ROWS, BatchShape(4, 4)
        )
        make_train_step(config.update, mesh, abstract).lower(
            abstract, batch, jnp.int32(4), UpdateSettings(np.float32(0))
        )


@pytest.mark.runs
@pytest.mark.slow
# adamw is that of the tests above
@pytest.mark.parametrize("opt_type", ["lion", "adafactor", "muon", "sgd"])
def test_every_optimizer_trains_sharded_and_cut(opt_type: str) -> None:
    batches, optimizer = [some_rows(ROWS)] * 4, (f"opt_type={opt_type}", "adam_weight_decay=0")
    _, one = run_steps(batches, ROWS, 1, overrides=optimizer)
    _, cut = run_steps(batches, 4, 4, 4, (*optimizer, "ici_data_parallelism=2"))
    assert one[-1].loss < one[0].loss
    np.testing.assert_allclose([m.loss for m in cut], [m.loss for m in one], rtol=2e-4)
