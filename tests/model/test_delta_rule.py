"""The gated delta rule in chunks, against its recurrence token by token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch.model.delta_rule import causal_convolution, gated_delta_rule

ROWS, LENGTH, KEY_HEADS, HEADS, KEY, VALUE, WIDTH = 2, 22, 2, 4, 6, 5, 4
# Documents that end within chunks and at their borders, one of one token, and padding.
SEGMENTS = np.array([[1] * 9 + [2] + [3] * 7 + [4] * 3 + [0] * 2, [1] * 22], np.int32)
Inputs = tuple[Any, ...]
rule = jax.jit(gated_delta_rule, static_argnums=6)


def inputs(seed: int = 0) -> Inputs:
    """Returns queries, keys, values, the logarithms of decays, and rates; some decays are
    strong.
    """
    rng = np.random.default_rng(seed)
    queries, keys = (rng.normal(size=(ROWS, LENGTH, KEY_HEADS, KEY)) for _ in range(2))
    values = rng.normal(size=(ROWS, LENGTH, HEADS, VALUE))
    decays = -np.exp(rng.normal(size=(ROWS, LENGTH, HEADS)) * 2 - 1)
    return tuple(
        x.astype(np.float32)
        for x in (queries, keys, values, decays, rng.random((ROWS, LENGTH, HEADS)))
    )


def token_by_token(
    q: Any, k: Any, v: Any, log_decay: Any, rate: Any, segments: Any, state: Any = None
) -> Inputs:
    """Returns what each token reads and the last state, in float64, as the definition has it."""
    q, k, v, log_decay, rate = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, rate))
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (q * KEY**-0.5, k))
    read, states = (
        np.zeros(v.shape),
        np.zeros((len(v), HEADS, KEY, VALUE)) if state is None else np.array(state),
    )
    for row, head in np.ndindex(len(v), HEADS):
        own = states[row, head]
        for place in range(v.shape[1]):
            if place and segments[row, place] != segments[row, place - 1]:
                own = np.zeros_like(own)
            own = np.exp(log_decay[row, place, head]) * own
            key = k[row, place, head]
            own = own + rate[row, place, head] * np.outer(key, v[row, place, head] - own.T @ key)
            read[row, place, head] = own.T @ q[row, place, head]
        states[row, head] = own
    return read, states


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_chunks_give_what_the_recurrence_gives(chunk_size: int) -> None:
    read, state = rule(*inputs(), SEGMENTS, chunk_size)
    expected, last = token_by_token(*inputs(), SEGMENTS)
    np.testing.assert_allclose(read, expected, atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


def test_a_row_goes_on_from_the_state_of_its_first_part() -> None:
    ones, cut = np.ones_like(SEGMENTS), LENGTH // 2
    whole, last = rule(*inputs(), ones, 4)
    first, state = token_by_token(*(x[:, :cut] for x in inputs()), ones[:, :cut])
    second, end = rule(*(x[:, cut:] for x in inputs()), ones[:, cut:], 4, state.astype(np.float32))
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=1e-5)
    np.testing.assert_allclose(end, last, atol=1e-5)
    # A state belongs to the first document alone.
    packed, _ = rule(
        *(x[:, cut:] for x in inputs()), SEGMENTS[:, cut:], 4, state.astype(np.float32)
    )
    expected, _ = token_by_token(*(x[:, cut:] for x in inputs()), SEGMENTS[:, cut:], state)
    np.testing.assert_allclose(packed, expected, atol=1e-5)


def test_a_document_is_what_it_is_alone() -> None:
    whole, _ = rule(*inputs(), SEGMENTS, 4)
    for document in (2, 3, 4):
        own = np.flatnonzero(SEGMENTS[0] == document)
        others = np.flatnonzero(SEGMENTS[0] != document)
        at_start = [x[:, np.concatenate([own, others])] for x in inputs(1)]
        for x, y in zip(at_start, inputs(), strict=True):
            x[0, : own.size] = y[0, own]
        segments = np.where(np.arange(LENGTH) < own.size, 1, 0) + np.zeros_like(SEGMENTS)
        alone, _ = rule(*at_start, segments, 4)
        np.testing.assert_allclose(whole[0, own], alone[0, : own.size], atol=1e-5)


def test_tokens_of_other_documents_and_padding_change_no_bit_of_a_document() -> None:
    is_own = np.zeros(LENGTH, bool)
    is_own[SEGMENTS[0] == 3] = True

    @jax.jit
    def both(kernel: Any, *own: Any) -> Any:
        def loss(kernel: Any, q: Any, *others: Any) -> Any:
            q = causal_convolution(q.reshape(ROWS, LENGTH, -1), kernel, SEGMENTS).reshape(q.shape)
            read, _ = gated_delta_rule(q, *others, SEGMENTS, 4)
            return jnp.sum(jnp.sin(jnp.where(is_own[:, None, None], read, 0)[0])), read

        return jax.value_and_grad(loss, argnums=range(6), has_aux=True)(kernel, *own)

    kernel = np.random.default_rng(2).normal(size=(KEY_HEADS * KEY, WIDTH)).astype(np.float32)
    mixed = tuple(
        np.where(is_own.reshape(-1, *[1] * (x.ndim - 2)), x, y)
        for x, y in zip(inputs(), inputs(1), strict=True)
    )
    (_, read), grads = both(kernel, *inputs())
    (_, other_read), other_grads = both(kernel, *mixed)
    np.testing.assert_array_equal(read[0, is_own], other_read[0, is_own])
    assert not np.array_equal(read[0, ~is_own], other_read[0, ~is_own])
    np.testing.assert_array_equal(grads[0], other_grads[0])
    for ours, theirs in zip(grads[1:], other_grads[1:], strict=True):
        np.testing.assert_array_equal(ours[0, is_own], theirs[0, is_own])
        assert not np.any(ours[0, ~is_own])


def test_gradients_are_those_of_the_recurrence() -> None:
    def loss(*given: Any, chunk_size: int) -> Any:
        read, state = gated_delta_rule(*given, SEGMENTS, chunk_size)
        return jnp.sum(jnp.sin(3 * read)) + jnp.sum(jnp.square(state))

    # Chunks of one token are the recurrence, which agrees with the definition above.
    expected = jax.jit(jax.grad(lambda *given: loss(*given, chunk_size=1), argnums=range(5)))(
        *inputs()
    )
    found = jax.jit(jax.grad(lambda *given: loss(*given, chunk_size=4), argnums=range(5)))(
        *inputs()
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    # And the definition's own slope, along one random direction of all inputs.
    rng, step = np.random.default_rng(3), 1e-5
    directions = [rng.normal(size=x.shape) for x in inputs()]

    def defined(sign: float) -> float:
        moved = (
            x.astype(np.float64) + sign * step * d
            for x, d in zip(inputs(), directions, strict=True)
        )
        read, state = token_by_token(*moved, SEGMENTS)
        return float(np.sum(np.sin(3 * read)) + np.sum(state**2))

    slope = sum(
        float(np.sum(np.asarray(grad, np.float64) * d))
        for grad, d in zip(found, directions, strict=True)
    )
    np.testing.assert_allclose(slope, (defined(1) - defined(-1)) / (2 * step), rtol=1e-4)


def test_a_token_of_rate_and_logarithm_zero_leaves_the_state() -> None:
    is_real = np.arange(LENGTH) < 13
    q, k, v, log_decay, rate = inputs()
    silent = (np.where(is_real[:, None], x, 0) for x in (log_decay, rate))
    _, state = rule(q, k, v, *silent, np.ones_like(SEGMENTS), 4)
    _, expected = token_by_token(
        *(x[:, is_real] for x in inputs()), np.ones_like(SEGMENTS[:, is_real])
    )
    np.testing.assert_allclose(state, expected, atol=1e-5)


def test_the_convolution_sees_the_last_tokens_of_its_document() -> None:
    rng = np.random.default_rng(4)
    x, kernel = (
        rng.normal(size=(ROWS, LENGTH, 3)).astype(np.float32),
        rng.normal(size=(3, WIDTH)).astype(np.float32),
    )
    expected = np.zeros(x.shape)
    for row, place, back in np.ndindex(ROWS, LENGTH, WIDTH):
        if place >= back and SEGMENTS[row, place] == SEGMENTS[row, place - back]:
            expected[row, place] += kernel[:, -1 - back] * x[row, place - back]
    convolution = jax.jit(causal_convolution)
    np.testing.assert_allclose(convolution(x, kernel, SEGMENTS), expected, atol=1e-6)
    ones, cut = np.ones_like(SEGMENTS), 8
    whole = convolution(x, kernel, ones)
    rest = convolution(x[:, cut:], kernel, ones[:, cut:], x[:, cut - WIDTH + 1 : cut])
    np.testing.assert_allclose(rest, whole[:, cut:], atol=1e-6)
