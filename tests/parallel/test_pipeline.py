"""A pipeline computes the same as its layers in sequence, in the planned ticks."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from maxbatch import BatchPlan
from maxbatch.data.feed.placement import Placement
from maxbatch.data.stream.stream import open_stream
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.pipeline import make_pipeline
from maxbatch.parallel.sharding import activation_constraint, batch_sharding
from maxbatch.run.evaluation import EvalResult, Evaluator
from maxbatch.run.pretraining import train
from maxbatch.update.state import TrainState, abstract_model, abstract_state, init_state
from tests.helpers.collectives import computations, loops
from tests.helpers.tiny import (
    LENGTH,
    MEASURED,
    UNSAVED,
    bytes_of,
    read_metrics,
    some_rows,
    tiny_config,
)
from tests.update.test_step import assert_same_steps, run_steps

MICRO_BATCH = 32
SHORT = 16  # a length that no dimension of a weight has
LAYERS = ("base_num_decoder_layers=8", "scan_layers=true")
BIASES = "attention_bias=true"  # stacked vectors beside the matrices


def packed_rows(num_rows: int, seed: int) -> dict[str, np.ndarray]:
    """Rows of several documents each."""
    rows = some_rows(num_rows, seed)
    cuts = np.random.default_rng(seed).integers(1, LENGTH, (num_rows, 1))
    rows["segments"] *= 1 + (np.arange(LENGTH)[None, :] >= cuts)
    return rows


# Accumulation of 1, 3 and 2 micro-batches, as in a ramp: one executable for all of them.
BATCHES = [packed_rows(MICRO_BATCH * steps, seed) for seed, steps in enumerate((1, 3, 2))]


def pipelined(stages: int, microbatches: int, repeats: int, *others: str) -> tuple[str, ...]:
    return (
        *LAYERS,
        f"ici_pipeline_parallelism={stages}",
        f"num_pipeline_microbatches={microbatches}",
        f"num_pipeline_repeats={repeats}",
        *others,
    )


@cache
def without_a_pipeline() -> Any:
    return run_steps(BATCHES, MICRO_BATCH, 3, 1, (*LAYERS, BIASES))


@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pipelined(2, 2, 1, "ici_data_parallelism=2", MEASURED),
        pipelined(4, 4, 1, "ici_tensor_parallelism=2", "remat_policy=full", "scan_layers=false"),
        pipelined(4, 4, 2, "remat_policy=minimal"),
        pipelined(2, 8, 1, "remat_policy=custom", "decoder_layer_input=offload", "mlpwi_0=device"),
        pipelined(
            2,
            4,
            2,
            "ici_tensor_parallelism=2",
            "ici_context_parallelism=2",
            "context_parallel_strategy=ulysses",
        ),
        pipelined(4, 16, 2, "ici_data_parallelism=2"),
    ],
    ids=" ".join,
)
def test_losses_and_gradient_norms_equal_those_without_a_pipeline(
    overrides: tuple[str, ...],
) -> None:
    """Every two of stages, parts for each, repeats and axes beside the pipeline meet, in a model
    with biases.
    """
    piped = run_steps(BATCHES, MICRO_BATCH, 3, 8, (*overrides, BIASES))
    assert_same_steps(piped, without_a_pipeline(), tolerance=2e-4)


def evaluator_of(config: Any, num_devices: int, batch_size: int) -> tuple[Evaluator, TrainState]:
    """An evaluator and the abstract state of its run."""
    mesh = make_mesh(config, jax.devices()[:num_devices])
    placement = Placement(batch_sharding(mesh), config.max_target_length)
    abstract = abstract_state(config.update, mesh)
    return Evaluator(
        config.update,
        config.evaluation,
        placement,
        open_stream(config, split="eval"),
        25,
        batch_size,
    ), abstract


def evaluate(overrides: tuple[str, ...], num_devices: int, batch_size: int) -> EvalResult:
    config = tiny_config(*overrides, "eval_fraction=0.05")
    evaluator, abstract = evaluator_of(config, num_devices, batch_size)
    return evaluator(init_state(config.update, abstract).params)


@pytest.mark.runs
def test_the_held_out_loss_has_its_own_batch_in_the_pipeline() -> None:
    """25 rows in batches of 16: the last one is padded."""
    got = evaluate(pipelined(2, 4, 2, "ici_data_parallelism=2", "ici_fsdp_parallelism=2"), 8, 16)
    expected = evaluate(LAYERS, 1, 25)
    assert (got.num_rows, got.weight) == (25, expected.weight)
    np.testing.assert_allclose(got.loss, expected.loss, rtol=1e-5)


@pytest.mark.parametrize(("stages", "microbatches", "repeats"), [(2, 2, 1), (4, 8, 1), (2, 4, 2)])
def test_the_bubble_of_the_plan_is_that_of_the_program(
    stages: int, microbatches: int, repeats: int
) -> None:
    """The compiled loop turns as often as the plan counts: of its ticks, microbatches x repeats are
    work.
    """
    # fewer than ticks
    overrides = pipelined(stages, microbatches, repeats, "base_num_decoder_layers=4")
    config = tiny_config(*overrides, "eval_fraction=0.05")
    evaluator, abstract = evaluator_of(config, stages, microbatches)
    _, bodies = computations(evaluator.lower(abstract.params).compile().as_text())
    turns = {loop.trip_count for body in bodies.values() for loop in loops(body)}
    ticks = microbatches * repeats + stages - 1
    assert ticks in turns and max(turns) == ticks
    plan = BatchPlan.from_config(config, num_devices=stages)
    assert plan.pipeline_bubble == pytest.approx(1 - microbatches * repeats / ticks)
    assert plan.to_dict()["pipeline_bubble"] == plan.pipeline_bubble


def test_each_stage_holds_its_layers_and_their_moments_and_no_others() -> None:
    config = tiny_config(*pipelined(4, 4, 2))
    state = init_state(config.update, abstract_state(config.update, make_mesh(config)))
    stacked = [leaf for leaf in jax.tree.leaves(state) if leaf.shape[:1] == (8,)]
    assert len(stacked) == 3 * 9  # parameters and both moments of adamw
    for leaf in stacked:
        shards = {(s.index[0].start, s.index[0].stop) for s in leaf.addressable_shards}
        assert shards == {(0, 2), (2, 4), (4, 6), (6, 8)}
        # fsdp splits matrices
        assert leaf.ndim == 2 or leaf.addressable_shards[0].data.size == leaf.size // 8
    embedding = state.params["embedding"][...]
    assert embedding.addressable_shards[0].data.size == embedding.size // 8


def kept_by_tick(overrides: tuple[str, ...], rows: int) -> list[Any]:
    """What every tick of the forward pass leaves for the backward pass, without the axis of the
    ticks.
    """
    config = tiny_config(*overrides, f"max_target_length={SHORT}")
    mesh = make_mesh(config, jax.devices()[:4])
    pipeline = make_pipeline(config.mesh, config.remat, mesh, ("fsdp",))
    assert pipeline is not None
    graphdef, params = abstract_model(
        config.decoder, activation_constraint(mesh, ("fsdp", "pipeline")), pipeline
    )
    tokens = jax.ShapeDtypeStruct((rows, SHORT), np.int32)

    def loss(params: Any, tokens: Any) -> Any:
        return nnx.merge(graphdef, params).hidden(tokens, tokens).x_MxLxD.sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, tokens)
    forward = next(
        e
        for e in jaxpr.eqns
        if e.primitive.name == "scan" and e.params["length"] == pipeline.num_ticks
    )
    # What is carried has the stages in front, of which there are fewer than ticks.
    kept = [v.aval for v in forward.outvars if v.aval.shape[:1] == (pipeline.num_ticks,)]
    return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in kept]


@pytest.mark.parametrize("repeats", [1, 2])
def test_rematerialisation_keeps_what_enters_a_stage_or_its_products(repeats: int) -> None:
    """With full, as in GPipe: per tick one part for every stage, its documents, and flags; never
    weights.
    """
    kept = {
        policy: kept_by_tick(pipelined(4, 8, repeats, f"remat_policy={policy}"), 16)
        for policy in ("none", "minimal", "full")
    }
    large = [(x.shape, x.dtype) for x in kept["full"] if x.size > 4]
    assert sorted(large) == [((4, 2, SHORT), np.int32), ((4, 2, SHORT, 32), np.float32)]
    sizes = {policy: bytes_of(arrays) for policy, arrays in kept.items()}
    assert sizes["full"] < sizes["minimal"] < sizes["none"]
    for array in kept["minimal"] + kept["none"]:
        assert array.size <= 4 or SHORT in array.shape, (
            "activations have a length, weights have not"
        )


@pytest.mark.parametrize(("stages", "repeats"), [(2, 2), (2, 4), (4, 2), (4, 3), (8, 2)])
def test_with_repeats_a_stage_holds_every_sth_group_and_gives_it_back(
    stages: int, repeats: int
) -> None:
    config = tiny_config(
        f"base_num_decoder_layers={stages * repeats * 2}",
        f"ici_pipeline_parallelism={stages}",
        f"num_pipeline_repeats={repeats}",
    )
    mesh = make_mesh(config, jax.devices()[:stages])
    pipeline = make_pipeline(config.mesh, config.remat, mesh, ("fsdp",))
    assert pipeline is not None
    layers = np.arange(stages * repeats * 2)[:, None] * np.ones((1, 3), np.int32)
    by_stage = layers.reshape(repeats, stages, 2, 3).swapaxes(0, 1).reshape(-1, 3)
    np.testing.assert_array_equal(jax.jit(pipeline.stage_order)(layers), by_stage)
    np.testing.assert_array_equal(jax.jit(pipeline.layer_order)(by_stage), layers)


@pytest.mark.runs
@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_stages(tmp_path: Any) -> None:
    """Checkpoints know layers, not stages: 2 stages with 2 repeats, then 4 stages, then none."""
    run = ("global_batch_size=16", "per_device_batch_size=16", "packing=true", *LAYERS)

    def go_on(folder: str, steps: int, num_devices: int, *others: str) -> list[dict[str, Any]]:
        config = tiny_config(
            *run,
            f"run_dir={tmp_path / folder}",
            f"steps={steps}",
            *others,
            "learning_rate_schedule=constant",
        )
        train(config, jax.devices()[:num_devices])
        return read_metrics(tmp_path / folder)

    expected = go_on("one", 6, 1, UNSAVED)
    go_on("moved", 2, 4, "ici_pipeline_parallelism=2", "num_pipeline_repeats=2")
    go_on("moved", 4, 8, "ici_pipeline_parallelism=4", "num_pipeline_microbatches=8")
    got = go_on("moved", 6, 1)
    for key in ("data_fingerprint", "samples_seen"):
        assert [m[key] for m in got] == [m[key] for m in expected]
    for key in ("loss", "grad_norm"):
        assert [m[key] for m in got] == pytest.approx([m[key] for m in expected], rel=2e-4)
