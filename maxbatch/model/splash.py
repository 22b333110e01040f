"""Attention on a TPU: JAX's Pallas splash kernels, which never hold the square of scores.

By the TPU compiler, the step of a 7B model on a v5e:4x4 (2 rows of 2,048 tokens per device, full
remat) takes 7.2 GB of temporaries with them and 10.1 GB with the plain implementation.

Shapes: M micro-batch, L length, H query heads, K key and value heads, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.model.balanced_rows import collected, dealt
from maxbatch.model.balanced_rows import places as balanced_places
from maxbatch.model.placed_heads import PlacedHeads
from maxbatch.model.scores import PLAIN, ScoreRules
from maxbatch.parallel.remat import CONTEXT
from maxbatch.parallel.sharding import Constrain, num_shards
from maxbatch.plan.program import LANES

# queries by keys: scores of 1 MiB in float32, a small part of any TPU's vector memory
_LARGEST_BLOCK = 512


def block_size(length: int) -> int:
    """Returns the largest multiple of 128 up to 512 that divides a length, itself a multiple of
    128.
    """
    return next(block for block in range(_LARGEST_BLOCK, 0, -LANES) if length % block == 0)


def block_sizes(block_q: int, block_kv: int) -> Any:
    """Returns the blocks of kernels, forward and backward alike."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    return kernels.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
    )


def splash_attend(
    q_MxLxHxh: jax.Array,
    k_MxLxKxh: jax.Array,
    v_MxLxKxh: jax.Array,
    segments_MxL: jax.Array,
    constrain: Constrain,
    scores: ScoreRules = PLAIN,
) -> jax.Array:
    """Returns causal attention within segments, in a local layer within a window, as `attend` of
    attention.py does.

    Every device runs the kernel on its own rows, heads and queries, since the compiler cannot split
    it. If the context axis splits the length, keys and values are gathered over it, and queries
    may be in the balanced order meanwhile. Few key heads may be repeated (`PlacedHeads`).

    Args:
      constrain: with a mesh, whose context axis splits L into multiples of 128. On CPUs the kernel
        is interpreted.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    mesh = constrain.mesh
    assert mesh is not None, "the kernel is placed by hand"
    _, length, heads, head_dim = q_MxLxHxh.shape
    batch, context, tensor, k_MxLxKxh, v_MxLxKxh = PlacedHeads.of(
        q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, constrain
    )
    over_heads = (tensor,) if isinstance(tensor, str) else tensor or ()
    shards = mesh.shape[context] if context else 1, num_shards(mesh, over_heads)

    size = shards[0]  # of the context axis; rows of odd shares stay in order
    is_balanced = scores.is_balanced and size > 1 and length % (2 * size) == 0
    scale = scores.scale or head_dim**-0.5

    def attend_here(
        kernel: Callable[..., jax.Array],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        q_segments: jax.Array,
        kv_segments: jax.Array,
    ) -> jax.Array:
        if is_balanced and context:
            q, q_segments = (dealt(x, context, size) for x in (q, q_segments))
        # Scaled in float32: rounding the scale to bfloat16 would shift every score alike.
        if scale != 1.0:
            q = (q.astype(jnp.float32) * scale).astype(q.dtype)
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        segments = kernels.SegmentIds(q_segments, kv_segments)
        attended = _attended(kernel, q, k, v, segments).transpose(0, 2, 1, 3)
        return collected(attended, context, size) if is_balanced and context else attended

    q_spec, kv_spec = P(batch, context, tensor, None), P(batch, None, tensor, None)
    operands = q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, segments_MxL, segments_MxL

    def everywhere(sees_window: bool) -> jax.Array:
        kernel = _kernel(
            length, heads, shards, scores, sees_window, is_balanced, constrain.platform
        )
        kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, P(tensor, context)))
        attended: jax.Array = jax.shard_map(
            attend_here,
            mesh=mesh,
            in_specs=(kernel_spec, q_spec, kv_spec, kv_spec, P(batch, context), P(batch, None)),
            out_specs=q_spec,
            check_vma=False,  # kernels do not say over which axes their results vary
        )(kernel, *operands)
        return attended

    if isinstance(scores.is_local, bool):
        return everywhere(scores.is_local)
    chosen: jax.Array = jax.lax.cond(
        scores.is_local, partial(everywhere, True), partial(everywhere, False)
    )
    return chosen


@jax.custom_vjp
def _attended(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any) -> jax.Array:
    """Returns the kernel's attention of each row, [M, H, L, h].

    The forward kernel writes each sum of a softmax to 128 lanes. Without a barrier in the backward
    pass the TPU's compiler takes one of these lanes twice, once for each kernel there: 0.78M cycles
    in place of 0.25M (4 rows of 2,048 tokens, 32 heads of 128, v6e:16x16, libtpu 0.0.46).
    """
    attended: jax.Array = jax.vmap(kernel)(q, k, v, segments)
    return attended


def _attended_forward(
    kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any
) -> tuple[jax.Array, Callable[..., Any]]:
    return jax.vjp(lambda *qkv: jax.vmap(kernel)(*qkv, segments), q, k, v)


def _attended_backward(gradient_of: Callable[..., Any], gradient: jax.Array) -> tuple[Any, ...]:
    def read_once(residual: jax.Array) -> jax.Array:
        is_sums_MxHxL = residual.ndim == 3 and residual.dtype == jnp.float32
        held: jax.Array = jax.lax.optimization_barrier(residual) if is_sums_MxHxL else residual
        return held

    return None, *jax.tree.map(read_once, gradient_of)(gradient), None


_attended.defvjp(_attended_forward, _attended_backward)


def _kernel(
    length: int,
    heads: int,
    shards: tuple[int, int],
    scores: ScoreRules,
    sees_window: bool,
    is_balanced: bool,
    platform: str,
) -> Any:
    """Returns the kernel of global layers, or of those that see a window; `shards` split queries
    and heads, the queries in the balanced order or in that of the row.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    query_shards, head_shards = shards
    block_q, block_kv = block_size(length // query_shards), block_size(length)
    mask: Any = masks.CausalMask((length, length), shard_count=query_shards)
    if sees_window:
        mask = masks.LocalMask(
            (length, length), (scores.window - 1, 0), 0, shard_count=query_shards
        )
    if is_balanced:
        mask.q_sequence = balanced_places(length, query_shards)
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        head_shards=head_shards,
        q_seq_shards=query_shards,
        interpret=platform == "cpu",
        attn_logits_soft_cap=scores.soft_cap or None,
        residual_checkpoint_name=CONTEXT,
        block_sizes=block_sizes(block_q, block_kv),
    )
