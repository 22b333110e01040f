"""(v) Passes by tokens: an update whose samples share rows, against the same update of a row a
sample.

Lengths are drawn as in real data: log-normal, a tenth at the limit. Both sides take the same
samples in passes of equally many rows, and their losses must agree. One side packs in the measured
time, as the feed does. The FLOPs of an update are those of the products of its traced program,
forward and backward, without those of attention, which grow with the length of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.measurement import BenchmarkError, Measurement, ratio, seconds_in_turns
from benchmarks.trainer import LEARNING_RATE, QUICK_MODEL, RUN
from maxbatch.config.config import Config
from maxbatch.config.loading import load_config
from maxbatch.data.feed.passes import Passes, packed, token_counts
from maxbatch.data.feed.placement import BATCH_DTYPES, PACKED_DTYPES, BatchShape, Placement
from maxbatch.data.stream.rows import RowArrays
from maxbatch.kinds.prompt.learner import Learner
from maxbatch.kinds.prompt.objective import pair_rows
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.state import abstract_state, init_state
from maxbatch.update.step import abstract_settings, make_train_step

BAR, ROW_BAR, FLOPS_BAR = 0.6, 0.97, 1.1
ROWS_PER_PASS = 2
Side = Callable[[], tuple[float, float]]  # an update; returns its loss and gradient norm


def measure(quick: bool) -> list[Measurement]:
    """Ratios of seconds, of an update of conversations and of the learner's part of one of `rl`."""
    model = QUICK_MODEL if quick else ("base_num_decoder_layers=2",)
    config = load_config(overrides=[*model, *RUN, "gradient_noise_scale=false"])
    length, rng = config.max_target_length, np.random.default_rng(0)
    lengths = _lengths(rng, 16 if quick else 32, length)
    rows = _rows(rng, lengths, config)
    sides = {
        "update": (_update(config, rows, False), _update(config, rows, True)),
        "learner": (_learner(config, rows, False), _learner(config, rows, True)),
    }
    measurements = []
    for name, (apart, together) in sides.items():
        if not np.allclose(apart(), together(), rtol=3e-4):
            raise BenchmarkError(f"{name}: samples that share rows have another loss")
        seconds = seconds_in_turns({"rows": apart, "passes": together}, 2 if quick else 4)
        title = f"{name}, samples that share rows / a row a sample"
        measurements.append(ratio(title, seconds["passes"], seconds["rows"], bar=BAR))
    measurements.append(_flops(config, rng))
    many = Passes.of(_lengths(rng, 256, 4096), 4096, ROWS_PER_PASS)
    for title, share, bar in (
        ("row_share of 256 samples", many.row_share, ROW_BAR),
        ("slot_share of 256 samples", many.slot_share, None),
    ):
        assert share is not None, "samples have tokens"
        detail = {"num_passes": many.num_passes, "rows_per_pass": ROWS_PER_PASS}
        measurements.append(Measurement(title, share, bar=bar, sense="at least", detail=detail))
    return measurements


def _lengths(rng: np.random.Generator, samples: int, most: int) -> np.ndarray:
    lengths = np.clip(rng.lognormal(np.log(most / 8), 0.9, samples).astype(np.int64), 2, most)
    return np.where(rng.random(samples) < 0.1, most, lengths)


def _rows(rng: np.random.Generator, lengths: np.ndarray, config: Config) -> RowArrays:
    is_token = np.arange(config.max_target_length) < lengths[:, None]
    tokens = rng.integers(0, config.vocab_size, is_token.shape)
    return {
        "tokens": np.where(is_token, tokens, 0).astype(np.int32),
        "segments": is_token.astype(np.int32),
        "weights": (is_token & (np.arange(config.max_target_length) > 0)).astype(np.float32),
    }


def _flops(config: Config, rng: np.random.Generator) -> Measurement:
    """Returns the FLOPs of an update of 256 samples outside of attention, over those that a row a
    sample spends on as many slots as there are tokens.
    """
    length = 3 * config.base_emb_dim // 2  # unlike all widths, so that products of attention show
    config = config.replaced({"max_target_length": length})
    passes = Passes.of(_lengths(rng, 256, length), length, ROWS_PER_PASS)
    shape = BatchShape(ROWS_PER_PASS, passes.num_passes)
    together, apart = (
        _products(_traced(config, packs, shape).jaxpr.jaxpr, length) for packs in (True, False)
    )
    spent = together * passes.num_passes
    needed = apart / (ROWS_PER_PASS * length) * passes.num_tokens
    title = "FLOPs outside of attention, 256 samples that share rows / of their tokens"
    detail = {"num_passes": passes.num_passes, "slot_share": passes.slot_share}
    return Measurement(title, spent / needed, bar=FLOPS_BAR, detail=detail)


def _products(jaxpr: Any, length: int) -> int:
    """Returns the FLOPs of the products of a traced program, each loop over passes taken once;
    without products of an array that has the length twice, which are those of attention.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            inputs, output = [v.aval.shape for v in equation.invars], equation.outvars[0].aval.shape
            if all(shape.count(length) < 2 for shape in (*inputs, output)):
                (contracted, _), _ = equation.params["dimension_numbers"]
                total += 2 * math.prod(output) * math.prod(inputs[0][axis] for axis in contracted)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(_products(inner, length) for inner in _inside(equation.params))
    return total


def _inside(parameters: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the programs inside of an equation."""
    for value in parameters.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            program = getattr(item, "jaxpr", item)  # closed or open
            if hasattr(program, "eqns"):
                yield program


def _passes(rows: RowArrays) -> Passes:
    lengths = token_counts(rows["segments"])
    return Passes.of(lengths, rows["tokens"].shape[1], ROWS_PER_PASS)


def _placement(config: Config, packs: bool) -> Placement:
    dtypes = PACKED_DTYPES if packs else BATCH_DTYPES
    return Placement(batch_sharding(make_mesh(config)), config.max_target_length, dtypes=dtypes)


def _traced(config: Config, packs: bool, shape: BatchShape) -> jax.stages.Traced:
    mesh = make_mesh(config)
    abstract = abstract_state(config.update, mesh)
    batch = _placement(config, packs).abstract_batch(shape)
    count, settings = jax.ShapeDtypeStruct((), "int32"), abstract_settings()
    return make_train_step(config.update, mesh, abstract).trace(abstract, batch, count, settings)


def _update(config: Config, rows: RowArrays, packs: bool) -> Side:
    placement, num_samples = _placement(config, packs), len(rows["tokens"])
    shape = BatchShape(ROWS_PER_PASS, -(-num_samples // ROWS_PER_PASS))
    executable: Any = _traced(config, packs, shape).lower().compile()
    state = init_state(config.update, abstract_state(config.update, make_mesh(config)))

    def side() -> tuple[float, float]:
        nonlocal state
        staged, count = rows, num_samples
        if packs:
            passes = _passes(rows)
            staged, count = packed(rows, passes), passes.num_rows
        batch = placement.stage(staged, count, shape)
        taken = np.int32(shape.max_micro_batches)
        state, metrics = executable(state, batch, taken, UpdateSettings(LEARNING_RATE))
        loss, norm = jax.device_get((metrics.loss, metrics.grad_norm))
        return float(loss), float(norm)

    return side


def _learner(config: Config, rows: RowArrays, packs: bool) -> Side:
    learner = Learner(config.learner, make_mesh(config))
    state = init_state(config.update, learner.abstract)
    lengths = token_counts(rows["segments"])[:, 0]
    rng = np.random.default_rng(1)
    pairs = pair_rows(
        rows["tokens"],
        rows["weights"] > 0,
        np.where(rows["weights"] > 0, np.float32(-5.6), np.float32(0)),
        lengths,
        rng.normal(size=len(lengths)).astype(np.float32),
    )

    def side() -> tuple[float, float]:
        nonlocal state
        shared = packed(pairs, _passes(pairs)) if packs else pairs
        count = len(shared["tokens"])
        for first in range(0, count, ROWS_PER_PASS):
            chunk = {name: array[first : first + ROWS_PER_PASS] for name, array in shared.items()}
            missing = ((0, ROWS_PER_PASS - len(chunk["tokens"])), (0, 0))
            chunk = {name: np.pad(array, missing) for name, array in chunk.items()}
            learner.add(state, learner.place_rows(chunk))
        state, metrics = learner.step(state, UpdateSettings(float(LEARNING_RATE)))
        loss, norm = jax.device_get((metrics.loss, metrics.grad_norm))
        return float(loss), float(norm)

    return side
