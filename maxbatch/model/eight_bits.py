"""Products of 8-bit integers or floats, with a scale of their own for each token and each channel.

Both operands are quantised along the contraction: x by the largest magnitude of each token, w by
that of each channel. No scale is taken over a pass, a device or a batch, and none is remembered, so
a token's product depends on that token and the weights alone, however a batch is cut. The gradient
by x is such a product too: of the output's gradient, again token by token, and of w, quantised
along its other axes. The gradient by w sums over tokens, so that a scale along its contraction
would tie a token to its neighbours: it is computed in the type of x.

References: scales of tokens and channels are those of LLM.int8() (Dettmers et al. 2022,
https://arxiv.org/abs/2208.07339, section 3.1); the types of fp8, e4m3 forward and e5m2 for
gradients, those of Micikevicius et al. 2022 (https://arxiv.org/abs/2209.05433).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.config.sections import Quantization
from maxbatch.model.experts.grouped import Groups, grouped_sums, outer_products
from maxbatch.system.errors import ConfigError

# The least magnitude that scales a row; smaller values give zeros, and a row of zeros divides by no
# zero.
_TINY = 2.0**-100

# Products of int8 that XLA gives to Triton have wrong sums. On one H200 (jaxlib 0.11.2) the
# gradient of a model of two layers had twice its norm, with other tiles the loss was wrong too;
# cuBLAS's products are right.
_NO_TRITON = "--xla_gpu_enable_triton_gemm=false"


class EightBits(NamedTuple):
    """A type of 8 bits, and the largest value that it holds on both sides of zero."""

    dtype: jax.typing.DTypeLike
    largest: float


class Codes(NamedTuple):
    """A quantised array: values times scales is the array, to rounding."""

    values: jax.Array  # in 8 bits
    scales: jax.Array  # float32, of as many axes, with size 1 along the contraction


_INT8, _E4M3, _E5M2 = (
    EightBits(jnp.int8, 127),
    EightBits(jnp.float8_e4m3fn, 448),
    EightBits(jnp.float8_e5m2, 57344),
)
_FORWARD: dict[Quantization, EightBits] = {"int8": _INT8, "fp8": _E4M3}
_GRADIENT: dict[Quantization, EightBits] = {"int8": _INT8, "fp8": _E5M2}  # of a product's output


def check_platform(quantization: Quantization, platform: str) -> None:
    """Raises ConfigError if a platform ("cpu", "gpu" or "tpu") computes such products wrongly."""
    if (
        quantization == "int8"
        and platform == "gpu"
        and _NO_TRITON not in os.environ.get("XLA_FLAGS", "").split()
    ):
        raise ConfigError(
            "quantization=int8: must be fp8 on GPUs, where XLA's Triton products of int8 give "
            f"wrong sums; works: quantization=fp8, or XLA_FLAGS={_NO_TRITON}, which leaves "
            "products to cuBLAS"
        )


def quantised(
    x: jax.Array, contraction: Sequence[int], to: EightBits, over: str | None = None
) -> Codes:
    """Returns x in 8 bits, scaled by the largest magnitudes along the axes of a contraction.

    Within `shard_map` a device may have a part of the contraction: `over` is the mesh axis that
    splits it. A value that is not finite makes the scale of its row so, and with it every product
    of that row.
    """
    return _scaled(x, largest_magnitude(x, contraction, over), to)


def largest_magnitude(
    x: jax.Array, contraction: Sequence[int], over: str | None = None
) -> jax.Array:
    """Returns the largest magnitude of x along the axes of a contraction, float32, with size 1
    there; `over` is that of `quantised`.
    """
    largest = jnp.maximum(
        jnp.max(jnp.abs(x.astype(jnp.float32)), axis=contraction, keepdims=True), _TINY
    )
    return largest if over is None else jax.lax.pmax(largest, over)


def _scaled(x: jax.Array, largest: jax.Array, to: EightBits) -> Codes:
    values = x.astype(jnp.float32) * (to.largest / largest)
    if to is _INT8:
        values = jnp.round(values)
    return Codes(values.astype(to.dtype), largest / to.largest)


def rounded(x: jax.Array, contraction: Sequence[int], quantization: Quantization) -> jax.Array:
    """Returns x as a product in 8 bits sees it, in x's dtype, for a product that is computed in
    another order.
    """
    codes = quantised(x, contraction, _FORWARD[quantization])
    return (codes.values.astype(jnp.float32) * codes.scales).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def eight_bit_einsum(
    x: jax.Array, w: jax.Array, form: str, quantization: Quantization
) -> jax.Array:
    """Returns an einsum of activations and a weight in 8 bits, in x's dtype; its gradient by x is
    in 8 bits too.

    Args:
      w: the weight, in any float type: it is quantised from its own, without rounding to x's first.
      form: as of `jnp.einsum`, of two operands.
      quantization: "int8" or "fp8".
    """
    to = _FORWARD[quantization]
    return _product(quantised(x, _summed(form)[0], to), w, form, to).astype(x.dtype)


def _backward(
    form: str, quantization: Quantization, kept: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    return _gradients(
        x, w, grad, largest_magnitude(grad, _summed(_by_x(form))[0]), form, quantization
    )


eight_bit_einsum.defvjp(lambda x, w, *how: (eight_bit_einsum(x, w, *how), (x, w)), _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def eight_bit_pair(
    x: jax.Array, first: jax.Array, second: jax.Array, form: str, quantization: Quantization
) -> tuple[jax.Array, jax.Array]:
    """Returns `eight_bit_einsum` of x with each of two weights.

    In the backward pass x is computed once, and so are both gradients that come back, with the
    magnitudes that scale them. The TPU compiler otherwise recomputes the norm that makes x for the
    gradient of each weight, and reads each gradient again for its scale; now it fuses gradients and
    magnitudes into the product that makes their source. A layer's MLP takes 0.92 of its cycles (4
    rows of 8,192 tokens, D 4,096, F 14,336; fp8 on tpu7x).
    """
    return eight_bit_einsum(x, first, form, quantization), eight_bit_einsum(
        x, second, form, quantization
    )


_Arrays = tuple[jax.Array, jax.Array, jax.Array]


def _pair_backward(
    form: str, quantization: Quantization, kept: _Arrays, grads: tuple[jax.Array, jax.Array]
) -> _Arrays:
    x, *weights = kept
    contraction, _ = _summed(_by_x(form))
    scaled = [(grad, largest_magnitude(grad, contraction)) for grad in grads]
    x, scaled = jax.lax.optimization_barrier((x, scaled))
    (x_1, first), (x_2, second) = (
        _gradients(x, w, grad, largest, form, quantization)
        for w, (grad, largest) in zip(weights, scaled, strict=True)
    )
    return x_1 + x_2, first, second


eight_bit_pair.defvjp(lambda *of: (eight_bit_pair(*of), of[:3]), _pair_backward)


def _gradients(
    x: jax.Array,
    w: jax.Array,
    grad: jax.Array,
    largest: jax.Array,
    form: str,
    quantization: Quantization,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients by x and by w of `eight_bit_einsum`; `largest` scales that of its
    output.
    """
    of_x, of_w, of_grad = axes_of(form)
    grad_x = _product(
        _scaled(grad, largest, _GRADIENT[quantization]), w, _by_x(form), _FORWARD[quantization]
    )
    return grad_x.astype(x.dtype), jnp.einsum(f"{of_x},{of_grad}->{of_w}", x, grad).astype(w.dtype)


def _product(x8: Codes, w: jax.Array, form: str, w_to: EightBits) -> jax.Array:
    """Returns the einsum of both, float32, with w quantised along the axes that it sums over."""
    of_x, of_w, of_y = axes_of(form)
    w8 = quantised(w, _summed(form)[1], w_to)
    sums = jnp.int32 if w_to is _INT8 else jnp.float32
    y = jnp.einsum(form, x8.values, w8.values, preferred_element_type=sums).astype(jnp.float32)
    return y * _spread(x8.scales, of_x, of_y) * _spread(w8.scales, of_w, of_y)


def _by_x(form: str) -> str:
    """Returns the einsum of an output's gradient and a weight that is the gradient by x."""
    of_x, of_w, of_y = axes_of(form)
    return f"{of_y},{of_w}->{of_x}"


def _summed(form: str) -> tuple[list[int], list[int]]:
    """Returns the positions of the axes that an einsum sums over, in both operands."""
    of_x, of_w, of_y = axes_of(form)
    summed = (set(of_x) & set(of_w)) - set(of_y)
    first, second = (
        [number for number, axis in enumerate(axes) if axis in summed] for axes in (of_x, of_w)
    )
    return first, second


def axes_of(form: str) -> tuple[str, str, str]:
    """Returns the axes of both operands of an einsum and of its result, a letter each."""
    operands, result = form.split("->")
    first, second = operands.split(",")
    return first, second, result


def _spread(scales: jax.Array, axes: str, wanted: str) -> jax.Array:
    """Returns scales with the axes of a result, of size 1 where they do not vary; they are 1 along
    the others.
    """
    own_axes = "".join(axis for axis in wanted if axis in axes)
    moved = jnp.einsum(f"{axes}->{own_axes}", scales)
    return jnp.expand_dims(
        moved, [number for number, axis in enumerate(wanted) if axis not in own_axes]
    )


class MatrixCodes(NamedTuple):
    """Matrices of groups in 8 bits, [E, D, F], quantised along both of their contractions."""

    along_inputs: Codes  # for the product
    along_outputs: Codes  # for the gradient by its rows

    @classmethod
    def of(cls, w_ExDxF: jax.Array, quantization: Quantization) -> MatrixCodes:
        """Returns the codes of whole matrices, each with scales of its own; they have no
        gradient.
        """
        w_ExDxF = jax.lax.stop_gradient(w_ExDxF)
        return cls(*(quantised(w_ExDxF, [axis], _FORWARD[quantization]) for axis in (1, 2)))


class CodedMatrices(NamedTuple):
    """Matrices of groups whose products read their codes alone."""

    place_ExDxF: jax.Array  # of `without_values`: receives the gradient of the matrices
    codes: MatrixCodes


@jax.custom_vjp
def without_values(w: jax.Array) -> jax.Array:
    """Returns zeros in place of an array, whose gradient is the array's: a mesh moves none of its
    values.
    """
    return jnp.zeros_like(w)


without_values.defvjp(lambda w: (jnp.zeros_like(w), None), lambda _, grad: (grad,))


def eight_bit_groups(
    x_nxD: jax.Array, w: CodedMatrices, groups: Groups, quantization: Quantization
) -> jax.Array:
    """Returns each row times the matrix of its group in 8 bits, [n, F] in x's dtype, as
    `eight_bit_einsum` does.

    Rows behind the groups give zeros.
    """
    way = _Way(groups.platform, groups.inputs_over, groups.outputs_over, quantization)
    return _grouped(x_nxD, w, groups.sizes_E, way)


class _Way(NamedTuple):
    """The static arguments of grouped products: `Groups` without the sizes, and the type."""

    platform: str
    inputs_over: str | None
    outputs_over: str | None
    quantization: Quantization


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x_nxD: jax.Array, w: CodedMatrices, sizes_E: jax.Array, way: _Way) -> jax.Array:
    x8 = quantised(x_nxD, [1], _FORWARD[way.quantization], way.inputs_over)
    return _of_groups(x8, w.codes.along_inputs, sizes_E, way.platform, is_transposed=False).astype(
        x_nxD.dtype
    )


_Kept = tuple[jax.Array, Codes, jax.Array]


def _grouped_backward(
    way: _Way, kept: _Kept, grad_nxF: jax.Array
) -> tuple[jax.Array, CodedMatrices, None]:
    x_nxD, w8, sizes_E = kept
    grad8 = quantised(grad_nxF, [1], _GRADIENT[way.quantization], way.outputs_over)
    grad_x_nxD = _of_groups(grad8, w8, sizes_E, way.platform, is_transposed=True).astype(
        x_nxD.dtype
    )
    # codes have none
    grad_w = CodedMatrices._make((outer_products(x_nxD, grad_nxF, sizes_E, way.platform), None))
    return grad_x_nxD, grad_w, None


_grouped.defvjp(
    lambda x_nxD, w, sizes_E, way: (
        _grouped(x_nxD, w, sizes_E, way),
        (x_nxD, w.codes.along_outputs, sizes_E),
    ),
    _grouped_backward,
)


def _of_groups(
    x8: Codes, w8: Codes, sizes_E: jax.Array, platform: str, is_transposed: bool
) -> jax.Array:
    """Returns the products of quantised rows and matrices, or their transposes, float32."""
    y_nxF = grouped_sums(x8.values, w8.values, sizes_E, platform, is_transposed).astype(jnp.float32)
    rows_n = jnp.arange(y_nxF.shape[0], dtype=sizes_E.dtype)
    group_n = jnp.minimum(
        jnp.searchsorted(jnp.cumsum(sizes_E), rows_n, side="right"), sizes_E.size - 1
    )
    return y_nxF * x8.scales * w8.scales.reshape(sizes_E.size, -1)[group_n]
