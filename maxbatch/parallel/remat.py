"""Rematerialisation: a layer's forward pass keeps some tensors for the backward pass, which
computes the rest again.

Policies and the names of kept tensors are MaxText's (`src/maxtext/layers` in
https://github.com/AI-Hypercomputer/maxtext). Queries and keys are kept rotated, and queries scaled
if the kernel needs them so: the backward pass needs them in that form, and in no other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from maxbatch.config.sections import REMAT_TENSORS, RematConfig
from maxbatch.families.matrices import MATRICES
from maxbatch.parallel.trees import Tree

Output = TypeVar("Output")
INPUT = "decoder_layer_input"  # of a layer; in a pipeline the input of a stage
CONTEXT = "context"  # the output of attention, and its kernel's sums of the softmax
_PRODUCTS = tuple(dict.fromkeys(row.kept for row in MATRICES.values() if row.kept))
_KEPT = {
    "minimal_with_context": (*_PRODUCTS, CONTEXT),
    "minimal": _PRODUCTS,
    "save_qkv_proj": tuple(MATRICES[name].kept for name in ("query", "key", "value")),
    "save_out_proj": (MATRICES["out"].kept,),
    "full": (),
}


def kept(x: jax.Array, name: str) -> jax.Array:
    """Returns x under a name by which a policy keeps it."""
    array: jax.Array = checkpoint_name(x, name)
    return array


@dataclasses.dataclass(frozen=True)
class Remat:
    """The names of the values that a layer's forward pass keeps for its backward pass."""

    keeps_all: bool  # `none`; the names are then empty
    on_device: tuple[str, ...]
    on_host: tuple[str, ...]  # moved to the host's memory and back

    @classmethod
    def of(cls, config: RematConfig) -> Remat:
        """Returns the tensors that a config's `remat_policy` keeps."""
        policy = config.remat_policy
        if policy != "custom":
            return cls(policy == "none", _KEPT.get(policy, ()), ())
        on_device, on_host = (
            tuple(name for name in REMAT_TENSORS if config[name] == place)
            for place in ("device", "offload")
        )
        return cls(False, on_device, on_host)

    @property
    def of_products(self) -> Remat:
        """Itself, or, in place of everything, matrix products and attention.

        Of everything, a loop would keep copies of the layers' matrices too.
        """
        return Remat(False, _KEPT["minimal_with_context"], ()) if self.keeps_all else self

    @property
    def policy(self) -> Any:
        """JAX's policy, of one that does not keep everything."""
        if not self.on_host:
            return jax.checkpoint_policies.save_only_these_names(*self.on_device)
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.on_device),
            names_which_can_be_offloaded=list(self.on_host),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def entering(self, x: jax.Array) -> jax.Array:
        """Returns the input of a layer under its name, if it is to leave the device."""
        return kept(x, INPUT) if INPUT in self.on_host else x


def checkpointed(
    layer: Callable[..., Output], remat: Remat, in_loop: bool
) -> Callable[..., Output]:
    """Returns a layer that keeps the tensors of `remat`. Its first argument is its input: an array,
    or a tree of which the layer computes nothing else.

    In a loop the compiler cannot merge the recomputation with the first run. Elsewhere a barrier
    prevents that, behind which everything kept is copied.
    """
    if remat.keeps_all:
        return layer

    def named(entering: Tree, *others: object) -> Output:
        return layer(jax.tree.map(remat.entering, entering), *others)

    run = named if INPUT in remat.on_host else layer
    checkpointed: Callable[..., Output] = jax.checkpoint(
        run, policy=remat.policy, prevent_cse=not in_loop
    )
    return checkpointed
