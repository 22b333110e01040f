"""Visits in a ring by JAX's splash kernels, which never hold the square of scores.

A visit runs the forward kernel on the part's queries and the visiting keys, and returns its sums
with its values. The backward kernels read the sums over all keys, so each visit gives its exact
share of the gradients. The masks are static: the part itself, an earlier part, or one at each
distance that a window reaches. Keys that no query sees run no kernel.

Shapes: M micro-batch, H query heads, K key and value heads, p tokens of a part, h head_dim, v width
of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from maxbatch.model.ring_visits import HIDDEN, Gradients, Keys, Known, Place, Queries, Seen
from maxbatch.model.scores import ScoreRules
from maxbatch.model.splash import block_size, block_sizes

T = TypeVar("T")


class SplashVisits(NamedTuple):
    """The computation of a visit by splash kernels."""

    rules: ScoreRules
    num_parts: int  # of a row
    is_interpreted: bool  # on CPUs

    def seen(self, queries: Queries, keys: Keys, place: Place) -> Seen:
        """Returns the softmaxes of queries over keys; see `Visits`."""
        return self.under_mask(place, partial(self._seen, queries, keys))

    def gradients(self, queries: Queries, keys: Keys, known: Known, place: Place) -> Gradients:
        """Returns the gradients that come of queries and keys; see `Visits`."""
        return self.under_mask(place, partial(self._gradients, queries, keys, known))

    def under_mask(self, place: Place, run: Callable[[Any], T]) -> T:
        """Returns what `run` gives with the mask of a place."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        square = place.tokens, place.tokens

        def window(distance: int) -> Any:
            return masks.LocalMask(square, (self.rules.window - 1, 0), distance * place.tokens)

        whole = masks.CausalMask(square) if place.is_same else masks.FullMask(square)
        if place.is_local is False:
            return run(whole)
        farthest = max(1, min((self.rules.window - 2) // place.tokens + 1, self.num_parts - 1))
        local = [window(0)] if place.is_same else [window(d) for d in range(1, farthest + 1)]
        number = jnp.zeros((), jnp.int32) if place.is_same else place.distance - 1
        if place.is_local is not True:
            number, local = jnp.where(place.is_local, number + 1, 0), [whole, *local]
        if len(local) == 1:
            return run(local[0])
        result: T = jax.lax.switch(number, [partial(run, mask) for mask in local])
        return result

    def _seen(self, queries: Queries, keys: Keys, mask: Any) -> Seen:
        kernel = self._kernel(mask, queries.q_MxHxpxh.shape[1])
        values, (log_sums,) = jax.vmap(kernel)(*_operands(queries, keys))
        # queries without a key have no number
        is_seen = log_sums > HIDDEN
        values = jnp.where(is_seen[..., None], values, 0.0).astype(jnp.float32)
        return Seen(values, jnp.where(is_seen, log_sums, HIDDEN))

    def _gradients(self, queries: Queries, keys: Keys, known: Known, mask: Any) -> Gradients:
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as kernels,
        )

        kernel = self._kernel(mask, queries.q_MxHxpxh.shape[1])
        block = kernel.kwargs["block_sizes"].block_q
        alike = {
            "bq": block,
            "bkv": block,
            "is_mqa": False,
            "mask_value": kernels.DEFAULT_MASK_VALUE,
            "attn_logits_soft_cap": kernel.kwargs["attn_logits_soft_cap"],
            "mask_function": kernel.kwargs["mask_function"],
            "interpret": self.is_interpreted,
            **dict.fromkeys(("q_layout", "k_layout", "v_layout"), kernels.QKVLayout.HEAD_DIM_MINOR),
        }

        def of_row(q: Any, k: Any, v: Any, segments: Any, known: Known) -> Gradients:
            # no sinks: their share of the sums is in `known`
            operands = q, k, v, segments, None, *known
            # JAX has no public name for kernels that take the sums over other keys too
            of_q = kernels._splash_attention_bwd_dq(
                *operands, mask_info=kernel.dq_mask_info, **alike
            )
            _, of_k, of_v = kernels._splash_attention_bwd_dkv(
                *operands,
                mask_info=kernel.dkv_mask_info,
                bkv_compute=block,
                use_fused_bwd_kernel=False,
                **alike,
            )
            return Gradients(of_q, of_k, of_v)

        q, k, v, segments = _operands(queries, keys)
        gradients: Gradients = jax.vmap(of_row)(q, k, v, segments, known)
        return gradients

    def _kernel(self, mask: Any, heads: int) -> Any:
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as kernels,
        )
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        block = block_size(mask.shape[0])
        return kernels.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            head_shards=1,
            q_seq_shards=1,
            save_residuals=True,
            interpret=self.is_interpreted,
            attn_logits_soft_cap=self.rules.soft_cap or None,
            block_sizes=block_sizes(block, block),
        )


def _operands(queries: Queries, keys: Keys) -> tuple[Any, ...]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    segments = kernels.SegmentIds(queries.segments_Mxp, keys.segments_Mxp)
    return queries.q_MxHxpxh, keys.k_MxKxpxh, keys.v_MxKxpxv, segments
