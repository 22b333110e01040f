"""A parameter of a decoder: its path, its axes, and what is done with it.

Shapes, counts, initial values, partitions, the matrices of Muon and LoRA, the products that
rematerialisation keeps and the tensors of Hugging Face folders follow from its row. The forms of a
layer state the rows (`maxbatch.families.forms`), `maxbatch.families.matrices` joins them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

Axes = tuple[str, ...]
ParameterPath = tuple[str, ...]
# The keys of a model as attributes: a `ModelConfig`, whose choices of a family are made from here.
ModelKeys: TypeAlias = Any
# The stacks of layers, in order: the first, dense ones of a model with experts; most layers; and
# the last ones, whose keys and values are those of layers before them. Layers of several forms are
# stacked by their place in the cycle that they repeat, a number behind the stack's name
# (`layers.1.attention.query`).
STACKS = (DENSE_LAYERS, LAYERS, LAST_LAYERS) = ("dense_layers", "layers", "kv_shared_layers")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a decoder. Its logical axes are its inputs' axes, then its outputs' axes.

    Parameters of experts have an axis of experts before them.
    """

    # its path, joined by dots; in a stack of layers it also has a leading axis of the stack's name
    name: str
    outputs: Axes  # all axes of a norm's scale or a bias
    inputs: Axes = ()  # summed over by a product, or indexed by a lookup
    is_lookup: bool = False  # a lookup of rows; tied to the output, it also multiplies, transposed
    per_expert: bool = False  # whether each expert has one
    is_float32: bool = False  # whether it is float32 for any `weight_dtype`
    # the weights of a depthwise convolution; its width is the last axis
    is_convolution: bool = False
    first: Literal["zeros", "ones", "decays"] = "zeros"  # of vectors, unless they are scales
    kept: str = ""  # the name of its product for rematerialisation
    has: Callable[[ModelKeys], bool] = lambda _: True  # whether a model of the family has it

    @property
    def path(self) -> ParameterPath:
        """Its path as names."""
        return tuple(self.name.split("."))

    @property
    def module(self) -> str:
        """The name of its module."""
        return self.name.rpartition(".")[0]

    @property
    def axes(self) -> Axes:
        """The logical axes, of one layer."""
        return (("experts",) if self.per_expert else ()) + self.inputs + self.outputs

    @property
    def is_stacked(self) -> bool:
        """Whether each layer has one."""
        return self.path[0] in STACKS

    @property
    def layer(self) -> ParameterPath:
        """The path of its layer: its stack and its place in a cycle of several forms; empty outside
        of layers.
        """
        return self.path[: 1 + self.path[1].isdigit()] if self.is_stacked else ()

    @property
    def is_map(self) -> bool:
        """Whether it is a matrix that multiplies, not a lookup or a vector."""
        return bool(self.inputs) and not self.is_lookup

    @property
    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The indices of its input axes and of its output axes."""
        numbers = tuple(range(len(self.axes)))[self.per_expert :]
        return numbers[: len(self.inputs)], numbers[len(self.inputs) :]
