"""The products of the model: the one that applies a weight, and those whose fastest form depends on
the machine.

Shapes: M micro-batch, L length, D input, F output, V vocabulary, H heads, h head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import EllipsisType
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from maxbatch.config.sections import Quantization
from maxbatch.model.eight_bits import (
    CodedMatrices,
    axes_of,
    eight_bit_einsum,
    eight_bit_groups,
    eight_bit_pair,
)
from maxbatch.model.experts.grouped import Groups, grouped_product
from maxbatch.parallel.sharding import OVER_ROWS, Constrain, num_shards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A matrix of 8-bit products with a low-rank adapter, which they leave in the compute dtype.

    It is the value of a parameter in place of the matrix W, and applies W + scale x A B.
    """

    matrix: jax.Array
    a: jax.Array  # W's inputs, then rank
    b: jax.Array  # rank, then W's outputs
    scale: float = dataclasses.field(metadata={"static": True})

    def __getitem__(self, key: EllipsisType) -> Adapted:
        """Returns itself, as a parameter returns its array."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.matrix.shape

    def astype(self, dtype: jax.typing.DTypeLike) -> Adapted:
        """Returns all three in a dtype."""
        return Adapted(
            self.matrix.astype(dtype), self.a.astype(dtype), self.b.astype(dtype), self.scale
        )

    @property
    def low_rank(self) -> jax.Array:
        """The adapter as a matrix, scale x A B."""
        return (self.scale * jnp.tensordot(self.a, self.b, axes=1)).astype(self.matrix.dtype)

    def with_outputs(self, change: Callable[[jax.Array], jax.Array]) -> Adapted:
        """Returns the matrix with its last axis reordered."""
        return Adapted(change(self.matrix), self.a, change(self.b), self.scale)


Weight: TypeAlias = jax.Array | Adapted | CodedMatrices


def product(
    x: jax.Array,
    w: Weight,
    form: str | Groups,
    quantization: Quantization = "",
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Returns activations times a weight. Every matrix of the model is applied here, but the
    router's.

    Args:
      x: the activations, in the compute dtype.
      w: the matrix, cast to that dtype; of groups, one matrix per group, in 8 bits with its codes.
        An adapter is applied in that dtype, beside the product in 8 bits.
      form: an einsum of x and w, or the groups of x's rows.
      quantization: the 8-bit type that both are rounded to; "": none.
      out_dtype: of an einsum's sums and result, without quantization; None: x's.
    """
    if isinstance(w, CodedMatrices):
        assert isinstance(form, Groups) and quantization, (
            "codes are of groups' matrices, for products in 8 bits"
        )
        return eight_bit_groups(x, w, form, quantization)
    if isinstance(w, Adapted):
        assert isinstance(form, str), "experts have no adapters"
        whole = product(x, w.matrix, form, quantization, out_dtype=out_dtype)
        return whole + _low_rank(x, w, form, out_dtype)
    if quantization:
        assert isinstance(form, str), "matrices of groups come with their codes"
        return eight_bit_einsum(x, w, form, quantization)
    w = w.astype(x.dtype)
    if isinstance(form, Groups):
        return grouped_product(x, w, form.sizes_E, form.platform)
    return jnp.einsum(form, x, w, preferred_element_type=out_dtype)


def _low_rank(
    x: jax.Array, w: Adapted, form: str, out_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Returns the einsum of x with scale x A B; `out_dtype` as of `product`."""
    of_x, of_w, of_y = axes_of(form)
    inputs, outputs = (
        "".join(axis for axis in of_w if (axis in of_y) == is_output) for is_output in (False, True)
    )
    of_rank = "".join(axis for axis in of_x if axis in of_y) + "r"
    a, b = w.a.astype(x.dtype), (w.scale * w.b).astype(x.dtype)
    inner = jnp.einsum(f"{of_x},{inputs}r->{of_rank}", x, a)
    return jnp.einsum(f"{of_rank},r{outputs}->{of_y}", inner, b, preferred_element_type=out_dtype)


def two_products(
    x_MxLxD: jax.Array,
    first_DxF: Weight,
    second_DxF: Weight,
    platform: str,
    quantization: Quantization = "",
) -> tuple[jax.Array, jax.Array]:
    """Returns x @ first and x @ second, each [M, L, F] in x's dtype.

    On a CPU one product computes both, which saves a tenth of the layers' time. On a TPU there are
    two products: the compiler's model gives 18.9M cycles for one and 15.5M for two (4 rows of 4,096
    tokens, D 4,096, F 11,008, v5p). In 8 bits there are two everywhere, because the gradients of
    both have scales of their own.
    """
    form = "mld,df->mlf"
    if quantization:
        first, second = (w.matrix if isinstance(w, Adapted) else w for w in (first_DxF, second_DxF))
        assert isinstance(first, jax.Array) and isinstance(second, jax.Array), (
            "codes are of groups' matrices"
        )
        pair = eight_bit_pair(x_MxLxD, first, second, form, quantization)
        adapted = zip(pair, (first_DxF, second_DxF), strict=True)
        first, second = (
            y + _low_rank(x_MxLxD, w, form) if isinstance(w, Adapted) else y for y, w in adapted
        )
        return first, second
    if platform != "cpu":
        return product(x_MxLxD, first_DxF, form), product(x_MxLxD, second_DxF, form)
    assert isinstance(first_DxF, jax.Array) and isinstance(second_DxF, jax.Array), (
        "adapted for 8 bits alone"
    )
    weights = first_DxF.astype(x_MxLxD.dtype), second_DxF.astype(x_MxLxD.dtype)
    # Stacked, not joined, so that a mesh can split F, and taken apart by a split, whose gradient is
    # one concatenation.
    both_MxLx2xF = product(x_MxLxD, jnp.stack(weights, axis=1), "mld,dgf->mlgf")
    first_MxLx1xF, second_MxLx1xF = jnp.split(both_MxLx2xF, 2, axis=2)
    return first_MxLx1xF[:, :, 0, :], second_MxLx1xF[:, :, 0, :]


def gradients_together(
    first: jax.Array, second: jax.Array, platform: str
) -> tuple[jax.Array, jax.Array]:
    """Returns both unchanged; on a TPU their gradients are computed once, in one fusion (in 8 bits:
    `eight_bit_pair`).

    The TPU compiler otherwise stores the common source of both gradients and one gradient, and
    recomputes the other in every product that reads it. Computed together, both are fused into the
    product that makes their source: 5.85M cycles instead of 5.77M and 1.80M (gate and up of an MLP,
    4 rows of 4,096 tokens, D 4,096, F 11,008, v5p).
    """
    return _together(first, second) if platform == "tpu" else (first, second)


@jax.custom_vjp
def _together(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    return first, second


def _together_backward(
    _: None, gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    first, second = jax.lax.optimization_barrier(tuple(gradients))
    return first, second


_together.defvjp(lambda first, second: ((first, second), None), _together_backward)


def join_heads(
    x_MxLxHxh: jax.Array, w_HxhxD: Weight, platform: str, quantization: Quantization = ""
) -> jax.Array:
    """Returns the heads' sum of x @ w, [M, L, D] in x's dtype.

    On a TPU the matrix is turned to [D, H, h] before it is gathered over D. Otherwise the compiler
    turns the gathered matrix: 1.44M cycles in place of 0.59M forward, with residual and norm, and
    1.11M in place of 0.59M for the gradient of x, with its sums (4 rows of 2,048 tokens, H 32, h
    128, D 4,096, v6e:16x16, libtpu 0.0.46).
    """
    if platform == "tpu" and isinstance(w_HxhxD, jax.Array) and not quantization:
        w_DxHxh = jnp.transpose(w_HxhxD.astype(x_MxLxHxh.dtype), (2, 0, 1))
        return product(x_MxLxHxh, w_DxHxh, "mlnh,dnh->mld")
    return product(x_MxLxHxh, w_HxhxD, "mlnh,nhd->mld", quantization)


def quarter_turn(x_MxLxHxh: jax.Array) -> jax.Array:
    """Returns (-second half, first half) of the last axis, float32, as a product with a signed
    permutation: exact.

    A TPU's vectors have 128 lanes. Halves of 64 leave half of them empty, and joining them takes
    more passes.
    """
    half = x_MxLxHxh.shape[-1] // 2
    turn_hxh = np.zeros((2 * half, 2 * half), np.float32)
    turn_hxh[np.arange(half) + half, np.arange(half)] = -1
    turn_hxh[np.arange(half), np.arange(half) + half] = 1
    return jnp.einsum(
        "mlnh,hk->mlnk",
        x_MxLxHxh,
        jnp.asarray(turn_hxh, x_MxLxHxh.dtype),
        preferred_element_type=jnp.float32,
        precision=None if x_MxLxHxh.dtype == jnp.bfloat16 else "highest",
    )


def features_last(x_MxLxD: jax.Array, constrain: Constrain) -> jax.Array:
    """Returns x, laid out on a TPU with the features of a token side by side.

    The compiler may otherwise lay kept activations out by token, and the backward pass then
    transposes them: 3% of the cycles of an update of llama2-7b (4 rows of 4,096 tokens a device,
    remat minimal, v5p:4x4x4).
    """
    mesh = constrain.mesh
    if mesh is None or constrain.platform != "tpu":
        return x_MxLxD
    spec = constrain.spec(x_MxLxD.shape, ("batch", "length", "embed"))
    axes = (spec[0],) if isinstance(spec[0], str) else spec[0] or ()
    if x_MxLxD.shape[0] % num_shards(mesh, axes):
        return x_MxLxD
    hold = partial(with_layout_constraint, layouts=Layout(tuple(range(x_MxLxD.ndim))))
    # In shard_map, because the partitioner gathers an array whose layout is fixed.
    x_held: jax.Array = jax.shard_map(
        hold, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )(x_MxLxD)
    return x_held


def exchanges_tokens(num_tokens: int, vocabulary: int, constrain: Constrain) -> bool:
    """Returns whether the devices of a micro-batch split the last product by vocabulary instead of
    by rows.

    They then exchange hidden states instead of the matrix and its gradient, which is less if there
    are fewer tokens than vocabulary entries. An update of 20.6M parameters (2,048 tokens, 4 devices
    on two CPU cores) takes 0.83 of the CPU time.

    Args:
      num_tokens: tokens of the micro-batch, or of its part on a data shard.
    """
    if constrain.mesh is None or num_tokens > vocabulary:
        return False
    return constrain.spec((vocabulary,), (OVER_ROWS,))[0] is not None
