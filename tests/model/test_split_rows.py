"""Attention of rows split over devices: rings and all-to-alls give what one device gives."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch.model import balanced_rows, ring_blocks
from maxbatch.model.attention import attend
from maxbatch.model.ring_attention import ring_attend_to_compressed
from maxbatch.model.scores import ScoreRules
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import Constrain, activation_constraint
from tests.helpers.tiny import tiny_config

LENGTH, HEADS, WIDTH = 32, 8, 4
# The documents of four rows: one, some that end on the edges of shares, some that end inside of
# them, and a document per token.
SEGMENTS_4xL = np.stack(
    [np.zeros(LENGTH), np.arange(LENGTH) // 8, np.arange(LENGTH) // 5, np.arange(LENGTH)]
).astype(np.int32)
# key heads, rules, whether each head has a sink
CASES: dict[str, tuple[int, ScoreRules, bool]] = {
    "two key heads": (2, ScoreRules(), False),
    "windows": (8, ScoreRules(window=6, is_local=True), False),
    "soft cap and sinks": (4, ScoreRules(scale=0.7, soft_cap=2.0), True),
}
STRATEGIES = {
    "ring": {"strategy": "ring"},
    "balanced ring": {"strategy": "ring", "is_balanced": True},
    "ulysses": {"strategy": "ulysses"},
}


def constrained(**axes: int) -> Constrain:
    stated = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1} | axes
    config = tiny_config(
        f"max_target_length={LENGTH}",
        *(f"ici_{axis}_parallelism={size}" for axis, size in stated.items()),
    )
    return activation_constraint(make_mesh(config), ("fsdp",))


def operands(kv_heads: int) -> tuple[jax.Array, ...]:
    """Queries, keys and values of rows in two halves, for `jax.vmap` over the data axis."""
    draw = np.random.default_rng(0)
    shapes = ((2, 2, LENGTH, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads))
    return tuple(jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes)


def attended(constrain: Constrain, rules: ScoreRules, *arrays: Any) -> jax.Array:
    """The attention of rows in two halves, as the train step has it."""
    segments = jnp.asarray(SEGMENTS_4xL.reshape(2, 2, LENGTH)[:, :, : arrays[0].shape[2]])

    def of_rows(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return attend(q, k, v, segments, rules, constrain, *arrays[3:])

    return jax.vmap(of_rows, spmd_axis_name="data")(*arrays[:3], segments)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_split_rows_attend_as_whole_ones_and_have_their_gradients(
    strategy: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_blocks, "_BLOCK_TOKENS", 4 if case == "windows" else 512)
    kv_heads, rules, has_sinks = CASES[case]
    arrays: tuple[Any, ...] = operands(kv_heads)
    if has_sinks:
        arrays = (*arrays, jnp.linspace(-1.0, 1.0, HEADS))

    def value(constrain: Constrain, rules: ScoreRules, *arrays: Any) -> jax.Array:
        return jnp.sum(jnp.sin(attended(constrain, rules, *arrays)))

    def value_and_gradients(constrain: Constrain, rules: ScoreRules) -> Any:
        every = tuple(range(2, 2 + len(arrays)))
        function = jax.value_and_grad(value, argnums=every)
        return jax.jit(lambda *arrays: function(constrain, rules, *arrays))(*arrays)

    whole = value_and_gradients(Constrain(), rules)
    split = value_and_gradients(
        constrained(data=2, context=4), rules._replace(**STRATEGIES[strategy])
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), whole, split)


@pytest.mark.parametrize("strategy", ["ring", "balanced ring"])
def test_latents_go_around_in_place_of_the_keys_and_values_that_are_made_of_them(
    strategy: str,
) -> None:
    latent_width, rotated_width, tokens = 6, 2, (4, LENGTH)
    draw = np.random.default_rng(0)
    shapes = (
        (*tokens, HEADS, WIDTH + rotated_width),
        (*tokens, latent_width),
        (*tokens, rotated_width),
        (latent_width, HEADS, WIDTH + WIDTH),
    )
    arrays = tuple(jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes)
    segments = jnp.asarray(SEGMENTS_4xL)
    rules = ScoreRules(**STRATEGIES[strategy])  # type: ignore[arg-type]
    constrain = constrained(fsdp=2, context=2, tensor=2)

    def of_keys(q: jax.Array, latent: jax.Array, rotated: jax.Array, up: jax.Array) -> jax.Array:
        made, v = jnp.split(jnp.einsum("mlc,cne->mlne", latent, up), 2, axis=-1)
        shared = jnp.broadcast_to(rotated[:, :, None], (*made.shape[:3], rotated_width))
        return attend(q, jnp.concatenate([made, shared], axis=-1), v, segments)

    def of_latents(*arrays: jax.Array) -> jax.Array:
        return ring_attend_to_compressed(*arrays, segments, constrain, rules)

    def value_and_gradients(attended: Any) -> Any:
        value = jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(attended(*x))), (0, 1, 2, 3))
        return jax.jit(value)(*arrays)

    whole, ring = value_and_gradients(of_keys), value_and_gradients(of_latents)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5), whole, ring)


@pytest.mark.parametrize("length", [28, 30])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_of_any_length_attend_alike(strategy: str, length: int) -> None:
    """Scoring has rows that the devices divide into odd shares (28), or that they do not (30)."""
    arrays = [x[:, :, :length] for x in operands(2)]
    rules = ScoreRules(**STRATEGIES[strategy])  # type: ignore[arg-type]
    whole = attended(Constrain(), ScoreRules(), *arrays)
    constrain = constrained(data=2, context=4)
    split = jax.jit(lambda *arrays: attended(constrain, rules, *arrays))(*arrays)
    np.testing.assert_allclose(whole, split, atol=2e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_of_200_documents_attends_alike(strategy: str) -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 4, size=200)
    lengths[0] += -lengths.sum() % 8  # the parts of the devices have edges inside of documents
    segments = jnp.asarray(np.repeat(np.arange(200), lengths)[None], jnp.int32)
    shape = (1, segments.shape[1], HEADS, WIDTH)
    q, k, v = (jnp.asarray(draw.normal(size=shape), jnp.float32) for _ in range(3))
    constrain, rules = constrained(tensor=2, context=4), ScoreRules(**STRATEGIES[strategy])  # type: ignore[arg-type]
    split = jax.jit(lambda *arrays: attend(*arrays, segments, rules, constrain))(q, k, v)
    np.testing.assert_allclose(attend(q, k, v, segments), split, atol=2e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_document_changes_no_other_one_of_its_row(strategy: str) -> None:
    rules = ScoreRules(**STRATEGIES[strategy])  # type: ignore[arg-type]
    constrain, (q, k, v) = constrained(data=2, context=4), operands(2)
    run = jax.jit(lambda *arrays: attended(constrain, rules, *arrays))
    changed = (x.at[1, 0, 10:15].add(1.0) for x in (q, k, v))  # the third document of the third row
    before, after = np.asarray(run(q, k, v)), np.asarray(run(*changed))
    rest = np.ones((2, 2, LENGTH), bool)
    rest[1, 0, 10:15] = False
    np.testing.assert_array_equal(before[rest], after[rest])
    assert (before[~rest] != after[~rest]).any()


def test_a_ring_passes_keys_on_and_ulysses_exchanges_heads_and_neither_gathers() -> None:
    constrain, arrays = constrained(data=2, context=4), operands(4)

    def program(strategy: str) -> str:
        rules = ScoreRules(**STRATEGIES[strategy])  # type: ignore[arg-type]

        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                names = ("batch", "length", "heads", "head_dim")
                pinned = [
                    jax.vmap(lambda x: constrain(x, names), spmd_axis_name="data")(x)
                    for x in (q, k, v)
                ]
                return jnp.sum(jnp.square(attended(constrain, rules, *pinned)))

            return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

        text = jax.jit(run).lower(*arrays).compile().as_text()
        assert text is not None
        return text

    for strategy in ("ring", "balanced ring"):
        text = program(strategy)
        assert "collective-permute" in text
        assert not re.search(r"f32\[\S+ (all-gather|all-to-all)", text)
    text = program("ulysses")
    assert re.search(r"f32\[.* all-to-all", text) and not re.search(r"f32\[\S+ all-gather", text)


def test_in_balance_every_device_sees_as_much() -> None:
    seen_by_device = (balanced_rows.places(64, 8) + 1).reshape(8, -1).sum(axis=1)
    assert (seen_by_device == seen_by_device.mean()).all()
    in_order = np.arange(1, 65).reshape(8, -1).sum(axis=1)
    assert in_order.max() / in_order.mean() > 1.8
