"""Splash kernels in a ring: what one device attends to, with the work divided evenly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxbatch.model import balanced_rows
from maxbatch.model.attention import attend
from maxbatch.model.ring_attention import _Operands, _Ring, _Visitor
from maxbatch.model.ring_splash import SplashVisits
from maxbatch.model.ring_visits import Place, Queries
from maxbatch.model.scores import PLAIN, ScoreRules
from maxbatch.model.splash import block_size
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import Constrain, activation_constraint
from tests.helpers.tiny import tiny_config

HEADS, WIDTH = 4, 16


def constrained(length: int, **axes: int) -> Constrain:
    stated = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1} | axes
    config = tiny_config(
        f"max_target_length={length}",
        *(f"ici_{axis}_parallelism={size}" for axis, size in stated.items()),
    )
    return activation_constraint(make_mesh(config), ("fsdp",))


def segments_of(length: int) -> np.ndarray:
    """Two rows: documents that end on the edges of parts and inside of them, and one document."""
    ends = np.zeros((2, length), np.int32)
    ends[0, [128, 200, length - 128, length - 3]] = 1
    return np.cumsum(ends, axis=1)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("axes", "rules", "has_sinks", "is_traced"),
    [
        (
            {"fsdp": 2, "context": 2, "tensor": 2},
            ScoreRules(0.3, 2.0, strategy="ring", is_balanced=True),
            True,
            False,
        ),
        # a loop that runs layers of both kinds
        (
            {"fsdp": 2, "context": 2, "tensor": 2},
            ScoreRules(window=100, is_local=True, strategy="ring"),
            False,
            True,
        ),
    ],
    ids=["balanced, soft cap and sinks", "windows in a loop"],
)
def test_a_ring_of_kernels_attends_as_one_device_and_has_its_gradients(
    axes: dict[str, int], rules: ScoreRules, has_sinks: bool, is_traced: bool
) -> None:
    length = 512 if rules.is_balanced else 256
    constrain, segments = constrained(length, **axes), segments_of(length)
    draw = np.random.default_rng(0)
    arrays: list[Any] = [
        jnp.asarray(draw.normal(size=(2, length, heads, WIDTH)), jnp.float32)
        for heads in (HEADS, 2, 2)
    ]
    if has_sinks:
        arrays.append(jnp.linspace(-1.0, 1.0, HEADS))

    def value_and_gradients(rules: ScoreRules, constrain: Constrain) -> Any:
        def value(is_local: Any, *arrays: Any) -> jax.Array:
            stated = rules._replace(is_local=is_local) if is_traced else rules
            out = attend(*arrays[:3], jnp.asarray(segments), stated, constrain, *arrays[3:])
            return jnp.sum(jnp.sin(out))

        return jax.jit(jax.value_and_grad(value, argnums=tuple(range(1, 1 + len(arrays)))))(
            jnp.asarray(True), *arrays
        )

    whole = value_and_gradients(rules._replace(strategy="all_gather"), Constrain())
    ring = value_and_gradients(rules._replace(implementation="splash"), constrain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), whole, ring)


@pytest.mark.runs
def test_in_a_ring_of_kernels_a_document_changes_no_other_one_of_its_row() -> None:
    length, (first, end) = 512, (200, 384)  # the third document: over the parts of both devices
    constrain = constrained(length, fsdp=2, context=2, tensor=2)
    segments = jnp.asarray(segments_of(length))
    rules = ScoreRules(strategy="ring", is_balanced=True, implementation="splash")
    draw = np.random.default_rng(0)
    arrays = [jnp.asarray(draw.normal(size=(2, length, 2, WIDTH)), jnp.float32) for _ in range(3)]
    run = jax.jit(lambda *arrays: attend(*arrays, segments, rules, constrain))
    changed = [x.at[0, first:end].add(1.0) for x in arrays]
    before, after = np.asarray(run(*arrays)), np.asarray(run(*changed))
    rest = np.ones((2, length), bool)
    rest[0, first:end] = False
    np.testing.assert_array_equal(before[rest], after[rest])
    assert (before[~rest] != after[~rest]).any()


@pytest.mark.parametrize(
    ("num_parts", "rules", "busiest"),
    [
        (1, PLAIN, 1.82),
        (2, PLAIN, 1.0),
        (2, ScoreRules(window=4096, is_local=True), 1.14),  # a quarter of a row: its first tokens
    ],
    ids=["in order", "balanced", "balanced, windows"],
)
def test_in_balance_the_kernels_of_every_device_compute_as_many_blocks(
    num_parts: int, rules: ScoreRules, busiest: float
) -> None:
    """Counted from the mask that each kernel gets: the blocks of the row's own mask."""
    size, tokens = 8, 1024
    visits = SplashVisits(rules, num_parts * size, is_interpreted=True)
    ring = _Ring("context", size, num_parts, rules, bool(rules.is_local), visits)
    block = block_size(tokens)

    def blocks(mask: Any) -> jax.Array:
        starts = range(0, tokens, block)
        computed = [mask[i : i + block, j : j + block].any() for i in starts for j in starts]
        return jnp.asarray(float(sum(computed)))

    def step(a: int, b: int, place: Place, total: jax.Array) -> jax.Array:
        return place.if_near(rules, lambda total: total + visits.under_mask(place, blocks), total)

    def of_device() -> jax.Array:
        nothing = jnp.zeros((1, tokens), jnp.int32)
        visitors = [_Visitor((nothing, nothing), nothing)] * num_parts
        total = ring.around(
            lambda visitors, visit: visit(step, jnp.zeros(())),
            lambda total, visitors, visit: visit(step, total),
            _Operands([Queries(nothing, nothing)] * num_parts, visitors, None, None, None),
        )
        return total[None]

    mesh = constrained(64, context=size).mesh
    computed = jax.jit(
        jax.shard_map(of_device, mesh=mesh, in_specs=(), out_specs=P("context"), check_vma=False)
    )()
    blocks_of_devices = np.asarray(computed)
    places = np.arange(num_parts * size * tokens // block) * block
    if num_parts > 1:
        places = balanced_rows.places(num_parts * size * tokens, size)[::block]
    starts = np.arange(0, num_parts * size * tokens, block)
    nearest = places[:, None] - starts[None] - block + 1
    is_seen = (nearest < rules.window) if rules.is_local else True
    seen = (places[:, None] >= starts[None]) & is_seen
    np.testing.assert_array_equal(blocks_of_devices, seen.reshape(size, -1).sum(axis=1))
    assert blocks_of_devices.max() / blocks_of_devices.mean() == pytest.approx(busiest, abs=0.01)
