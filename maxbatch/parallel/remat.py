"""Rematerialisation: what the forward pass of a layer keeps for the backward pass, which computes the rest again.

Policies and the names of what they keep are MaxText's (`src/maxtext/layers` in
https://github.com/AI-Hypercomputer/maxtext). Queries and keys are kept rotated, and queries scaled if the kernel wants
them so: the backward pass needs them in that form, and in no other.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

CONTEXT = "context"  # the output of attention, and what its kernel keeps of the softmax
_QKV = ("query_proj", "key_proj", "value_proj")
_PRODUCTS = (*_QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")
_KEPT = {
    "minimal_with_context": (*_PRODUCTS, CONTEXT),
    "minimal": _PRODUCTS,
    "save_qkv_proj": _QKV,
    "save_out_proj": ("out_proj",),
    "full": (),
}


def kept(x: jax.Array, name: str) -> jax.Array:
    """Returns x under a name by which a policy keeps it."""
    return checkpoint_name(x, name)


def kept_by(policy: str) -> Any:
    """Returns JAX's policy for the name of one that keeps less than everything."""
    return jax.checkpoint_policies.save_only_these_names(*_KEPT[policy])


def checkpointed(layer: Any, policy: str, in_loop: bool) -> Any:
    """Returns a layer that keeps what the policy says; `none` keeps everything.

    In a loop the compiler cannot merge the recomputation with the first run. Elsewhere a barrier keeps it from that,
    behind which everything kept is copied.
    """
    if policy == "none":
        return layer
    return jax.checkpoint(layer, policy=kept_by(policy), prevent_cse=not in_loop)
