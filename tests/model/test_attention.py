"""Attention sees only the past of its own document, at relative positions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch.model.attention import _BLOCK_TOKENS, attend, attend_to_cache
from maxbatch.model.cache import Cache
from maxbatch.model.rope import apply_rope, frequencies_of, rope_tables

M, L, H, HEAD_DIM = 2, 16, 4, 8


def queries_keys_values(
    kv_heads: int = H, dtype: str = "float32"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(M, L, heads, HEAD_DIM) for heads in (H, kv_heads, kv_heads)]
    q, k, v = (
        jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    return q, k, v


def one_document() -> jax.Array:
    return jnp.ones((M, L), jnp.int32)


@pytest.mark.parametrize("shift", [1, 1000])
def test_rope_scores_depend_on_the_distance_alone(shift: int) -> None:
    rope = rope_tables(1016, frequencies_of(HEAD_DIM, 10_000))
    q, k, _ = (x[:1] for x in queries_keys_values())

    def scores(first_position: int) -> jax.Array:
        tables = tuple(table[first_position : first_position + L] for table in rope)
        return jnp.einsum("mqnh,mknh->mnqk", apply_rope(q, tables), apply_rope(k, tables))

    np.testing.assert_allclose(scores(0), scores(shift), atol=2e-5)


def test_rope_keeps_lengths_and_leaves_position_zero() -> None:
    q, _, _ = queries_keys_values()
    rotated = apply_rope(q, rope_tables(L, frequencies_of(HEAD_DIM, 10_000)))
    np.testing.assert_array_equal(rotated[:, 0], q[:, 0])
    np.testing.assert_allclose(
        jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(q, axis=-1), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rope_has_the_same_values_in_the_form_for_tpus(dtype: str) -> None:
    q, _, _ = queries_keys_values(dtype=dtype)
    rope = rope_tables(L, frequencies_of(HEAD_DIM, 10_000))
    np.testing.assert_array_equal(
        apply_rope(q, rope, "tpu", 0.25), apply_rope(q, rope, "cpu", 0.25)
    )
    gradients = [
        jax.grad(lambda q, p=p: jnp.sum(jnp.sin(apply_rope(q, rope, p))))(q) for p in ("tpu", "cpu")
    ]
    np.testing.assert_allclose(
        *(g.astype(jnp.float32) for g in gradients), atol=1e-6 if dtype == "float32" else 2e-2
    )


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_attention_agrees_with_the_formula_in_value_and_gradient(
    kv_heads: int, dtype: str, tolerance: float
) -> None:
    segments = jnp.asarray(np.repeat([[1, 2, 0, 0]], L // 4, axis=1).repeat(M, axis=0))

    def value_and_output(
        implementation: Callable[..., jax.Array], *qkv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        output = implementation(*qkv).astype(jnp.float32)
        return jnp.sum(jnp.sin(output)), output

    def ours(*qkv: jax.Array) -> jax.Array:
        return attend(*qkv, segments)

    def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """A plain version: one softmax per query, over its visible keys."""
        k, v = (jnp.repeat(x, H // kv_heads, axis=2) for x in (k, v))
        logits = jnp.einsum("mqnh,mknh->mnqk", q, k).astype(jnp.float32) / HEAD_DIM**0.5
        same_document = segments[:, None, :, None] == segments[:, None, None, :]
        visible = same_document & jnp.tril(jnp.ones((L, L), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(visible, logits, -1e30)).astype(q.dtype)
        return jnp.einsum("mnqk,mknh->mqnh", weights, v)

    qkv = queries_keys_values(kv_heads, dtype)
    gradient = jax.jit(jax.grad(value_and_output, (1, 2, 3), has_aux=True), static_argnums=0)
    got = gradient(ours, *qkv)
    expected = gradient(reference, *qkv)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=tolerance, atol=tolerance
        )


def test_grouped_queries_equal_repeated_heads() -> None:
    q, k, v = queries_keys_values(kv_heads=2)
    repeated = attend(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2), one_document())
    np.testing.assert_allclose(attend(q, k, v, one_document()), repeated, atol=1e-6)


def test_no_position_sees_a_later_one() -> None:
    q, k, v = queries_keys_values()
    changed = [x.at[:, L // 2 :].set(7.0) for x in (q, k, v)]
    before = attend(q, k, v, one_document())[:, : L // 2]
    np.testing.assert_array_equal(before, attend(*changed, one_document())[:, : L // 2])


def test_a_document_does_not_see_its_neighbour() -> None:
    q, k, v = queries_keys_values()
    segments = jnp.asarray([[1] * 6 + [2] * 10] * M)
    changed = [x.at[:, :6].set(7.0) for x in (q, k, v)]
    np.testing.assert_array_equal(
        attend(q, k, v, segments)[:, 6:], attend(*changed, segments)[:, 6:]
    )


def test_a_prompt_is_read_in_blocks_as_if_it_were_read_at_once() -> None:
    length = 2 * _BLOCK_TOKENS + 44
    q, k, v = (
        jax.random.normal(jax.random.key(i), (M, length, H, HEAD_DIM), jnp.float32)
        for i in range(3)
    )
    cache = Cache(*(x.swapaxes(1, 2) for x in (k, v)))
    positions = jnp.broadcast_to(jnp.arange(length), (M, length))
    in_blocks = jax.jit(attend_to_cache).lower(q, cache, positions).compile()
    at_once = attend(q, k, v, jnp.ones((M, length), jnp.int32))
    np.testing.assert_allclose(in_blocks(q, cache, positions), at_once, atol=1e-5)
    assert in_blocks.memory_analysis().temp_size_in_bytes < M * H * length * length * 4, (
        "less than all scores"
    )
