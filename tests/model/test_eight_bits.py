"""Products in 8 bits: their numbers, whose scales they use, and which products they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Jaxpr, subjaxprs

from maxbatch.config.sections import Quantization
from maxbatch.model import eight_bits
from maxbatch.model.decoder import Decoder
from maxbatch.model.eight_bits import (
    CodedMatrices,
    MatrixCodes,
    check_platform,
    eight_bit_einsum,
    eight_bit_pair,
    largest_magnitude,
    without_values,
)
from maxbatch.model.experts.grouped import Groups
from maxbatch.model.products import Adapted, product
from maxbatch.system.errors import ConfigError
from tests.helpers.tiny import tiny_config

TYPES: tuple[Quantization, ...] = ("int8", "fp8")
FORMS = {"mld,dnh->mlnh": ((2, 5, 16), (16, 3, 8)), "mlnh,nhd->mld": ((2, 5, 3, 8), (3, 8, 16))}
NUMPY_TYPES: dict[Quantization, tuple[type, type]] = {
    "int8": (np.int8, np.int8),
    "fp8": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
}
LARGEST = {np.int8: 127, ml_dtypes.float8_e4m3fn: 448, ml_dtypes.float8_e5m2: 57344}


def as_eight_bits(x: np.ndarray, contraction: tuple[int, ...], dtype: type) -> np.ndarray:
    """Returns x rounded to 8 bits and back, in float64."""
    scale = np.maximum(np.abs(x).max(axis=contraction, keepdims=True), 2.0**-100) / LARGEST[dtype]
    codes = np.round(x / scale).astype(dtype) if dtype is np.int8 else (x / scale).astype(dtype)
    return codes.astype(np.float64) * scale


def reference(x: np.ndarray, w: np.ndarray, form: str, x_type: type, w_type: type) -> np.ndarray:
    of_x, of_w, of_y = form.replace("->", ",").split(",")
    summed = (set(of_x) & set(of_w)) - set(of_y)
    x8, w8 = (
        as_eight_bits(one, tuple(i for i, axis in enumerate(axes) if axis in summed), dtype)
        for one, axes, dtype in ((x, of_x, x_type), (w, of_w, w_type))
    )
    return np.asarray(np.einsum(form, x8, w8))


def operands(form: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x_shape, w_shape = FORMS[form]
    x = rng.normal(size=x_shape) * np.exp(
        rng.normal(size=(*x_shape[:2], *[1] * (len(x_shape) - 2)))
    )
    return x.astype(np.float32), rng.normal(size=w_shape).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quantization", TYPES)
def test_a_product_and_its_gradients_are_those_of_numpy(
    quantization: Quantization, form: str
) -> None:
    x, w = operands(form)
    forward, gradient = NUMPY_TYPES[quantization]
    y_shape = jax.eval_shape(partial(jnp.einsum, form), x, w).shape
    grad = np.random.default_rng(1).normal(size=y_shape).astype(np.float32)

    @jax.jit
    def run(x: jax.Array, w: jax.Array, grad: jax.Array) -> tuple[jax.Array, ...]:
        y, pull_back = jax.vjp(lambda x, w: eight_bit_einsum(x, w, form, quantization), x, w)
        return y, *pull_back(grad)

    y, grad_x, grad_w = run(x, w, grad)
    of_x, of_w, of_y = form.replace("->", ",").split(",")
    expected = (
        reference(x, w, form, forward, forward),
        reference(grad, w, f"{of_y},{of_w}->{of_x}", gradient, forward),
        np.einsum(f"{of_x},{of_y}->{of_w}", x, grad),  # not rounded
    )
    for found, wanted in zip((y, grad_x, grad_w), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(y - np.einsum(form, x, w)).max() > 1e-3, "8 bits round"


def outputs(
    x: jax.Array, grad: jax.Array, w: jax.Array, quantization: Quantization
) -> tuple[jax.Array, jax.Array]:
    y, pull_back = jax.vjp(lambda x: eight_bit_einsum(x, w, "mld,df->mlf", quantization), x)
    return y, pull_back(grad)[0]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("quantization", TYPES)
def test_grouped_products_are_those_of_numpy_with_scales_of_each_group(
    quantization: Quantization, platform: str
) -> None:
    rng, sizes = np.random.default_rng(0), (10, 0, 17, 9)
    group_n, real = np.repeat(range(4), sizes), sum(sizes)
    x, w, grad = (
        rng.normal(size=shape).astype(np.float32) for shape in ((40, 16), (4, 16, 8), (40, 8))
    )
    w *= np.exp(rng.normal(size=(4, 1, 1))).astype(np.float32)

    @jax.jit
    def run(x: jax.Array, w: jax.Array, grad: jax.Array) -> tuple[jax.Array, ...]:
        groups = Groups(jnp.asarray(sizes), platform)

        def grouped(x: jax.Array, w: jax.Array) -> jax.Array:
            return product(
                x,
                CodedMatrices(without_values(w), MatrixCodes.of(w, quantization)),
                groups,
                quantization,
            )

        y, pull_back = jax.vjp(grouped, x, w)
        return y, *pull_back(grad)

    forward, gradient = NUMPY_TYPES[quantization]
    expected = (
        np.einsum(
            "nd,ndf->nf",
            as_eight_bits(x, (1,), forward)[:real],
            as_eight_bits(w, (1,), forward)[group_n],
        ),
        np.einsum(
            "nf,ndf->nd",
            as_eight_bits(grad, (1,), gradient)[:real],
            as_eight_bits(w, (2,), forward)[group_n],
        ),
        np.stack(
            [x[:real][group_n == group].T @ grad[:real][group_n == group] for group in range(4)]
        ),
    )
    *of_rows, grad_w = run(x, w, grad)
    for found, wanted in zip((*(found[:real] for found in of_rows), grad_w), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    assert not any(found[real:].any() for found in of_rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quantization", TYPES)
def test_an_adapter_is_applied_beside_its_matrix_without_rounding(
    quantization: Quantization, form: str
) -> None:
    x, w = operands(form)
    of_x, of_w, of_y = form.replace("->", ",").split(",")
    num_inputs, rng = sum(axis not in of_y for axis in of_w), np.random.default_rng(2)
    a = rng.normal(size=(*w.shape[:num_inputs], 3)).astype(np.float32)
    b = rng.normal(size=(3, *w.shape[num_inputs:])).astype(np.float32)
    grad = rng.normal(size=jax.eval_shape(partial(jnp.einsum, form), x, w).shape).astype(np.float32)

    @jax.jit
    def run(a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        y, pull_back = jax.vjp(
            lambda a, b: product(jnp.asarray(x), Adapted(w, a, b, 0.5), form, quantization), a, b
        )
        return y, *pull_back(grad)

    forward, _ = NUMPY_TYPES[quantization]
    grad_w = 0.5 * np.einsum(f"{of_x},{of_y}->{of_w}", x, grad)
    flat = grad_w.reshape(-1, int(np.prod(w.shape[num_inputs:])))
    expected = (
        reference(x, w, form, forward, forward) + 0.5 * np.einsum(form, x, np.tensordot(a, b, 1)),
        (flat @ b.reshape(3, -1).T).reshape(a.shape),
        (a.reshape(-1, 3).T @ flat).reshape(b.shape),
    )
    for found, wanted in zip(run(a, b), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.usefixtures("standard_promotion")
def test_sums_beside_a_shorter_stream_stay_float32_with_an_adapter() -> None:
    """As of the decays of a gated delta rule, which 8 bits leave alone."""
    ones = jnp.ones((1, 1, 257), jnp.bfloat16)
    w = Adapted(jnp.ones((257, 1)), jnp.ones((257, 1)), jnp.ones((1, 1)), 1.0)
    # bfloat16 has 256 and 512; the stream of the rank has 256
    for matrix, total in ((w.matrix, 257), (w, 513)):
        y = product(ones, matrix, "mld,dn->mln", out_dtype=jnp.float32)
        assert (y.dtype, float(y[0, 0, 0])) == (jnp.float32, total)


def first_token_changes(quantization: Quantization) -> bool:
    """Returns whether a token's product or gradient depends on the others of its pass, or on their
    gradients.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (16, 8))
    x, grad = jax.random.normal(keys[1], (2, 4, 16)), jax.random.normal(keys[2], (2, 4, 8))
    larger = jnp.full((2, 4, 1), 1e6).at[0, 0].set(1.0)
    # traced in each call, with the scales of then
    run = jax.jit(lambda x, grad: outputs(x, grad, w, quantization))
    alone, among_larger = run(x, grad), run(x * larger, grad * larger)
    return any(bool((a[0, 0] != b[0, 0]).any()) for a, b in zip(alone, among_larger, strict=True))


@pytest.mark.parametrize("quantization", TYPES)
def test_a_pair_of_products_and_its_gradients_are_those_of_each_alone(
    quantization: Quantization,
) -> None:
    form = "mld,df->mlf"
    x, first, second, *grads = (
        jax.random.normal(jax.random.key(n), shape)
        for n, shape in enumerate([(2, 5, 16), (16, 24), (16, 24), (2, 5, 24), (2, 5, 24)])
    )
    pair, back = jax.vjp(lambda *args: eight_bit_pair(*args, form, quantization), x, first, second)
    one, back_one = jax.vjp(lambda x, w: eight_bit_einsum(x, w, form, quantization), x, first)
    two, back_two = jax.vjp(lambda x, w: eight_bit_einsum(x, w, form, quantization), x, second)
    (by_x, *by_weights), (x_1, w_1), (x_2, w_2) = (
        back(tuple(grads)),
        back_one(grads[0]),
        back_two(grads[1]),
    )
    for ours, alone in zip(
        (*pair, by_x, *by_weights), (one, two, x_1 + x_2, w_1, w_2), strict=True
    ):
        np.testing.assert_array_equal(ours, alone)


@pytest.mark.parametrize("quantization", TYPES)
def test_a_token_depends_on_no_other_bit_for_bit(
    quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not first_token_changes(quantization)

    def over_the_pass(x: jax.Array, contraction: Sequence[int], over: None = None) -> jax.Array:
        shape = [1 if axis in contraction else size for axis, size in enumerate(x.shape)]
        return jnp.broadcast_to(largest_magnitude(x, range(x.ndim)), shape)

    monkeypatch.setattr(eight_bits, "largest_magnitude", over_the_pass)
    assert first_token_changes(quantization), "this test would see a scale over the pass"


@pytest.mark.parametrize("quantization", TYPES)
def test_a_row_of_zeros_gives_zeros_and_one_that_is_not_finite_no_number(
    quantization: Quantization,
) -> None:
    x = (
        jnp.ones((1, 5, 4))
        .at[0, 0]
        .set(0.0)
        .at[0, 1, 0]
        .set(jnp.nan)
        .at[0, 2, 0]
        .set(jnp.inf)
        .at[0, 3]
        .set(1e-38)
    )
    y, grad_x = jax.jit(outputs, static_argnums=3)(x, x, jnp.eye(4), quantization)
    for found in (y, grad_x):
        assert (found[0, 0] == 0).all() and (jnp.abs(found[0, 3]) < 1e-37).all()
        assert not jnp.isfinite(found[0, 1:3]).any()
        np.testing.assert_allclose(found[0, 4], 1.0, rtol=1e-6)


# Of each family: the matrices of a layer, those of experts by grouped products, and the products
# with its router.
FAMILIES = {
    "gpt2": (
        6,
        0,
        (
            "decoder_block=gpt2",
            "mlp_activations=gelu",
            "trainable_position_size=32",
            "base_num_kv_heads=4",
        ),
    ),
    "mixtral": (
        7,
        3,
        (
            "decoder_block=mixtral",
            "num_experts=4",
            "num_experts_per_tok=2",
            "base_moe_mlp_dim=16",
            "norm_topk_prob=true",
        ),
    ),
    "deepseek": (
        11,
        3,
        ("model_name=tiny-deepseek", "max_target_length=32", "first_num_dense_layers=0"),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("quantization", TYPES)
def test_all_products_of_a_layer_are_in_8_bits_and_no_others(
    quantization: Quantization, name: str
) -> None:
    matrices, router, overrides = FAMILIES[name]
    config = tiny_config(
        *overrides, "base_num_decoder_layers=1", "scan_layers=false", f"quantization={quantization}"
    )
    graphdef, params = nnx.split(Decoder(config.decoder, rngs=nnx.Rngs(params=0)))
    tokens = jnp.zeros((1, 8), jnp.int32)

    def loss(params: nnx.State) -> jax.Array:
        return jnp.sum(jnp.square(nnx.merge(graphdef, params)(tokens, jnp.ones_like(tokens))))

    found = Counter(types_of_products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr))
    forward, gradient = (
        ("int8", "int8") if quantization == "int8" else ("float8_e4m3fn", "float8_e5m2")
    )
    eight_bits = Counter([(forward, forward)] * matrices + [(gradient, forward)] * matrices)
    attention_and_logits, of_weights = 2 + 4 + 1 + 2, matrices
    assert found == eight_bits + Counter(
        {("float32", "float32"): attention_and_logits + router + of_weights}
    )


def types_of_products(jaxpr: Jaxpr) -> Iterator[tuple[str, str]]:
    """Yields the types of both operands of each product."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield str(eqn.invars[0].aval.dtype), str(eqn.invars[1].aval.dtype)
    for inner in subjaxprs(jaxpr):
        yield from types_of_products(inner)


def test_int8_on_gpus_is_refused_unless_xla_leaves_products_to_cublas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        ConfigError,
        match="works: quantization=fp8, or XLA_FLAGS=--xla_gpu_enable_triton_gemm=false",
    ):
        check_platform("int8", "gpu")
    for quantization, platform in (("fp8", "gpu"), ("", "gpu"), ("int8", "tpu"), ("int8", "cpu")):
        check_platform(quantization, platform)  # type: ignore[arg-type]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2 --xla_gpu_enable_triton_gemm=false")
    check_platform("int8", "gpu")
