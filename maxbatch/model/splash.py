"""Attention on a TPU: JAX's Pallas splash kernels, which never hold the square of scores.

By the TPU compiler, the step of a 7B model on a v5e:4x4 (2 rows of 2,048 tokens per device, full remat) takes 7.2 GB of
temporaries with them and 10.1 GB with the plain implementation.

Shapes: M micro-batch, L length, H query heads, K key and value heads, h head_dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.parallel.sharding import Constrain
from maxbatch.plan.program import LANES

_LARGEST_BLOCK = 512  # queries by keys: scores of 1 MiB in float32, a small part of any TPU's vector memory


def block_size(length: int) -> int:
    """Returns the largest multiple of 128 up to 512 that divides a length, itself a multiple of 128."""
    return next(block for block in range(_LARGEST_BLOCK, 0, -LANES) if length % block == 0)


def splash_attend(
    q_MxLxHxh: jax.Array,
    k_MxLxKxh: jax.Array,
    v_MxLxKxh: jax.Array,
    segments_MxL: jax.Array,
    constrain: Constrain,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns causal attention within segments, as `maxbatch.model.attention.attend` does.

    Every device runs the kernel on its own rows, heads and queries, since the compiler cannot split it. If the context
    axis splits the length, keys and values are gathered over it. If the tensor axis splits the query heads and cannot
    split the key heads, these are repeated.

    Args:
      constrain: with a mesh, whose context axis splits L into multiples of 128.
      interpret: run the kernel on a CPU, slowly.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mesh = constrain.mesh
    assert mesh is not None, "the kernel is placed by hand"
    _, length, heads, head_dim = q_MxLxHxh.shape
    batch, context, tensor, _ = constrain.spec(q_MxLxHxh.shape, ("batch", "length", "heads", "head_dim"))
    if constrain.spec(k_MxLxKxh.shape, ("batch", "length", "kv_heads", "head_dim"))[2] != tensor:
        repeats = heads // k_MxLxKxh.shape[2]
        k_MxLxKxh, v_MxLxKxh = (jnp.repeat(x, repeats, axis=2) for x in (k_MxLxKxh, v_MxLxKxh))
    query_shards, head_shards = (mesh.shape[axis] if axis else 1 for axis in (context, tensor))
    causal = masks.CausalMask((length, length), shard_count=query_shards)
    block_q, block_kv = block_size(length // query_shards), block_size(length)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([causal] * heads), head_shards=head_shards, q_seq_shards=query_shards, interpret=interpret,
        block_sizes=kernels.BlockSizes(
            block_q=block_q, block_kv=block_kv, block_q_dq=block_q, block_kv_dq=block_kv,
            block_q_dkv=block_q, block_kv_dkv=block_kv,
        ),
    )  # fmt: skip
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, P(tensor, context)))

    def attend_here(kernel: Any, q: Any, k: Any, v: Any, q_segments: Any, kv_segments: Any) -> jax.Array:
        # Scaled in float32: rounding the scale to bfloat16 would shift every score alike.
        q = (q.astype(jnp.float32) * head_dim**-0.5).astype(q.dtype)
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        segments = kernels.SegmentIds(q_segments, kv_segments)
        return jax.vmap(kernel)(q, k, v, segments).transpose(0, 2, 1, 3)

    q_spec, kv_spec = P(batch, context, tensor, None), P(batch, None, tensor, None)
    everywhere = jax.shard_map(
        attend_here,
        mesh=mesh,
        in_specs=(kernel_spec, q_spec, kv_spec, kv_spec, P(batch, context), P(batch, None)),
        out_specs=q_spec,
        check_vma=False,  # kernels do not say over which axes their results vary
    )
    return everywhere(kernel, q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, segments_MxL, segments_MxL)
