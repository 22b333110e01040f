"""The types of JAX's trees: of what a model holds, and of trees that are passed on as they are."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias, TypeVar

from flax import nnx

# of a model: names to further states, and in the end to its variables
State: TypeAlias = nnx.State[Hashable, Any]
Tree: TypeAlias = object  # a tree of arrays, shapes or shardings, which `jax.tree` alone looks into
KeyPath: TypeAlias = tuple[Hashable, ...]  # to a leaf of a tree
TreeOf = TypeVar("TreeOf")  # a tree that a function returns in the same form
