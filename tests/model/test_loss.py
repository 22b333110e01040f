"""The fused loss against the plain one for any cut, and the work that it skips."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.model.decoder import Hidden
from maxbatch.model.loss import MAX_LOGITS, Rules, target_scores, token_losses
from maxbatch.model.products import exchanges_tokens
from maxbatch.model.scores import soft_capped
from maxbatch.parallel.sharding import (
    OVER_ROWS,
    OVER_TOKENS,
    Constrain,
    activation_constraint,
    unconstrained,
)
from tests.helpers.tiny import loss_sums

M, L, D, V = 8, 12, 16, 96
Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def inputs(dtype: str = "float32", seed: int = 0) -> Arrays:
    x_key, w_key, target_key, weight_key = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(x_key, (M, L, D), jnp.float32).astype(dtype)
    w = (jax.random.normal(w_key, (D, V), jnp.float32) * 0.5).astype(dtype)
    targets = jax.random.randint(target_key, (M, L), 0, V)
    counts = jax.random.bernoulli(weight_key, 0.7, (M, L))
    weights = jnp.where(counts, jax.random.uniform(weight_key, (M, L)), 0.0)
    return x, w, targets, weights.at[0].set(0.0)


def plain(x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    logits = jnp.einsum("mld,dv->mlv", x.astype(jnp.float32), w.astype(jnp.float32))
    return jnp.sum(optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, V)) * weights)


def fused(max_logits: int | None = None, **options: Any) -> Callable[..., jax.Array]:
    def loss(*arrays: jax.Array) -> jax.Array:
        with mock.patch.dict(MAX_LOGITS, {"cpu": max_logits} if max_logits else {}):
            return token_losses(*arrays, **options)[0]

    return loss


def assert_close(got: Any, expected: Any, tolerance: float = 1e-6) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.max(jnp.abs(b.astype(jnp.float32))))
        np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=tolerance, atol=tolerance * scale
        )


CUTS = [
    {},
    {"max_logits": M * 4 * V},
    {"max_logits": 1},
    {"batch_shards": 4},
    {"batch_shards": 4, "max_logits": 2 * 4 * V},
]


@pytest.mark.runs
@pytest.mark.parametrize("options", CUTS, ids=str)
def test_value_and_gradients_equal_the_plain_loss(options: dict[str, int]) -> None:
    arrays = inputs()
    got, expected = (jax.value_and_grad(f, (0, 1, 3))(*arrays) for f in (fused(**options), plain))
    assert_close(got, expected)
    assert_close(jax.jit(fused(**options))(*arrays), expected[0])


@pytest.mark.runs
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_the_gradient_has_the_z_loss_and_the_value_has_not(soft_cap: float) -> None:
    x, w, targets, weights = inputs()

    def squares(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = soft_capped(jnp.einsum("mld,dv->mlv", x, w), soft_cap)
        return jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * weights)

    plainly = fused(rules=Rules(soft_cap=soft_cap))
    with_squares = fused(rules=Rules(soft_cap=soft_cap, z_loss=0.1))
    got, without = (
        jax.value_and_grad(f, (0, 1))(x, w, targets, weights) for f in (with_squares, plainly)
    )
    assert_close(got[0], without[0])
    more = jax.tree.map(lambda square: 0.1 * square, jax.grad(squares, (0, 1))(x, w))
    assert_close(got[1], jax.tree.map(jnp.add, without[1], more), 1e-5)


def test_the_gradient_of_a_multiple_is_the_multiple() -> None:
    arrays = inputs()
    got, expected = (
        jax.grad(lambda *a, f=f: 3.0 * f(*a), (0, 1))(*arrays) for f in (fused(), plain)
    )
    assert_close(got, expected)


def test_rows_of_weight_zero_leave_no_trace() -> None:
    x, w, targets, weights = inputs()
    loss, gradients = jax.value_and_grad(fused(), (0, 1))(x, w, targets, weights)
    assert not jnp.any(gradients[0][0])
    changed = jax.value_and_grad(fused(), (0, 1))(
        x.at[0].set(9.0), w, targets.at[0].set(1), weights
    )
    assert_close(changed[0], loss)
    assert_close(changed[1][1], gradients[1])
    assert token_losses(x, w, targets, weights)[1] == pytest.approx(float(weights.sum()))


def test_logits_far_from_zero_overflow_nothing() -> None:
    x, w, targets, weights = inputs()
    got, expected = (
        jax.value_and_grad(f, (0, 1))(x * 300.0, w, targets, weights) for f in (fused(), plain)
    )
    assert bool(jnp.isfinite(got[0]))
    assert_close(got, expected, 2e-6)


def test_bfloat16_is_close_and_sums_in_float32() -> None:
    arrays = inputs("bfloat16")
    loss, gradients = jax.value_and_grad(fused(), (0, 1))(*arrays)
    expected = jax.value_and_grad(plain, (0, 1))(*arrays)
    assert loss.dtype == jnp.float32 and gradients[0].dtype == gradients[1].dtype == jnp.bfloat16
    assert_close(loss, expected[0], 1e-5)
    for a, b in zip(gradients, expected[1], strict=True):
        difference = jnp.linalg.norm((a.astype(jnp.float32) - b.astype(jnp.float32)).ravel())
        assert difference < 0.01 * jnp.linalg.norm(b.astype(jnp.float32).ravel())


def shapes_in(jaxpr: Any) -> set[tuple[int, ...]]:
    shapes: set[tuple[int, ...]] = set()
    for equation in jaxpr.eqns:
        shapes |= {v.aval.shape for v in equation.outvars}
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                shapes |= shapes_in(inner)
    return shapes


def all_logits_made(options: dict[str, Any]) -> bool:
    jaxpr = jax.make_jaxpr(jax.grad(fused(**options), (0, 1)))(*inputs())
    return any(
        shape and shape[-1] == V and np.prod(shape) == M * L * V for shape in shapes_in(jaxpr.jaxpr)
    )


def test_where_the_length_is_cut_the_logits_of_all_of_it_never_exist() -> None:
    assert all_logits_made({})
    assert not all_logits_made({"max_logits": M * 4 * V})


def test_the_devices_of_the_mesh_say_how_much_is_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not those of the machine that compiles."""
    monkeypatch.setattr("maxbatch.model.loss.MAX_LOGITS", {"cpu": M * 4 * V, "tpu": M * L * V})
    elsewhere = type("Elsewhere", (Constrain,), {"platform": "tpu"})()
    assert not all_logits_made({})
    assert all_logits_made({"rules": Rules(elsewhere)})


@pytest.mark.parametrize("options", CUTS[:2], ids=str)
def test_a_loss_without_gradient_computes_none(options: dict[str, int]) -> None:
    compiled = jax.jit(fused(**options)).lower(*inputs()).compile()
    gradient = jax.jit(jax.grad(fused(**options), (0, 1))).lower(*inputs()).compile()
    assert compiled.cost_analysis()["flops"] < 0.6 * gradient.cost_analysis()["flops"]


MESHES = [(1, 8, 1, 1), (2, 4, 1, 1), (4, 2, 1, 1), (2, 2, 2, 1), (1, 1, 8, 1), (1, 2, 1, 4)]


@pytest.mark.parametrize("max_logits", [None, 2 * 4 * V])
@pytest.mark.parametrize("split", ["rows", "vocabulary"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_partial_gradients_on_a_mesh_sum_to_the_plain_one(
    shape: tuple[int, int, int, int], split: str, max_logits: int | None
) -> None:
    names = ("data", "fsdp", "tensor", "context")
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 4)
    axis_of = {"batch": "fsdp", "vocab": "tensor", "embed": None, "length": "context"}
    axes_of = axis_of | {
        OVER_ROWS: ("fsdp", "tensor") if split == "vocabulary" else None,
        OVER_TOKENS: ("fsdp", "context"),
    }

    constrain = Constrain(
        mesh, lambda _, axes: P(*(axes_of[axis] if axis else None for axis in axes))
    )
    assert exchanges_tokens(M * L // shape[0], V, constrain) == (split == "vocabulary")
    loss = fused(batch_shards=shape[1], max_logits=max_logits, rules=Rules(constrain))
    per_replica = jax.vmap(jax.value_and_grad(loss, (0, 1)), (0, None, 0, 0), spmd_axis_name="data")

    def place(array: jax.Array, *spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    x, w, targets, weights = inputs()
    split = [a.reshape(shape[0], -1, *a.shape[1:]) for a in (x, targets, weights)]
    x_s, targets_s, weights_s = (place(a, "data", "fsdp", "context") for a in split)
    losses, (grad_x, grad_w) = jax.jit(per_replica)(
        x_s, place(w, "fsdp", "tensor"), targets_s, weights_s
    )
    expected = jax.value_and_grad(plain, (0, 1))(x, w, targets, weights)
    assert_close(losses.sum(), expected[0], 1e-6)
    assert_close((grad_x.reshape(x.shape), grad_w.sum(axis=0)), expected[1], 1e-6)


@pytest.mark.parametrize("is_scored", [False, True], ids=["loss", "scores"])
def test_each_device_of_a_row_computes_the_logits_of_its_own_share_alone(is_scored: bool) -> None:
    names = ("data", "fsdp", "tensor", "pipeline", "context")
    mesh = jax.make_mesh((1, 2, 1, 1, 4), names, axis_types=(AxisType.Auto,) * 5)
    constrain = activation_constraint(mesh, ("fsdp", "pipeline"))
    specs = P("fsdp", "context"), P(), P("fsdp", "context"), P("fsdp", "context")
    x, *others = (
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(inputs(), specs, strict=True)
    )

    def scores(x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        decoder: Any = SimpleNamespace(
            constrain=constrain, output_projection=lambda: w, capped=lambda logits: logits
        )
        logprobs = target_scores(decoder, x, targets, batch_shards=2).logprobs_MxL
        return -jnp.sum(logprobs * weights)

    loss = scores if is_scored else fused(batch_shards=2, rules=Rules(constrain))
    with (
        mock.patch.dict(MAX_LOGITS, {"cpu": 1}),
        mock.patch("maxbatch.model.loss.exchanges_tokens", return_value=False),
    ):
        program = jax.jit(jax.value_and_grad(loss)).lower(x, *others).compile()
    text = program.as_text() or ""
    assert " while(" in text, "the length is cut"
    assert not re.search(r" all-gather(-start)?\(", text)
    expected = jax.value_and_grad(plain)(*inputs())
    assert_close(program(x, *others), expected)


def test_the_vocabulary_is_split_where_a_micro_batch_has_fewer_tokens_than_words() -> None:
    mesh = jax.make_mesh((1, 4, 2, 1, 1), ("data", "fsdp", "tensor", "pipeline", "context"))
    constrain = activation_constraint(mesh, ("fsdp", "pipeline"))
    assert exchanges_tokens(512, 512, constrain)
    assert not exchanges_tokens(513, 512, constrain)  # more tokens than words
    assert not exchanges_tokens(512, 516, constrain)  # eight devices do not divide it
    assert not exchanges_tokens(512, 512, unconstrained)


class Echo:
    """A decoder whose last hidden state is a one-hot of the token: it predicts from the present
    token alone.
    """

    def hidden(self, tokens: jax.Array, segments: jax.Array) -> Hidden:
        return Hidden(jax.nn.one_hot(tokens, V), None)

    def output_projection(self) -> jax.Array:
        # Expects token + 1 next.
        return 20.0 * jnp.roll(jnp.eye(V), 1, axis=1)

    constrain = unconstrained
    logits_soft_cap = 0.0
    z_loss = 0.0


def test_each_token_is_predicted_from_the_one_before_with_its_own_weight() -> None:
    tokens = jnp.asarray([[5, 6, 7, 40, 41, 0]])
    weights = jnp.asarray([[0.0, 1.0, 1.0, 0.0, 0.5, 0.0]])
    loss, weight = loss_sums(Echo(), tokens, jnp.ones_like(tokens), weights)  # type: ignore[arg-type]
    assert weight == 2.5 and loss < 1e-4
    surprised = loss_sums(Echo(), tokens, jnp.ones_like(tokens), weights.at[0, 3].set(2.0))  # type: ignore[arg-type]
    assert surprised[0] == pytest.approx(40.0, abs=1e-3)
