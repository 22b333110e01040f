"""The experts of a run's devices: how many a device holds, and the tokens of one product. No JAX.

The devices along the experts axis are a group: each holds some of the experts, and computes them
for the rows of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.sections import ModelConfig
from maxbatch.config.values import Number, plain_number
from maxbatch.families.matrices import parameters, shape_of, size_of
from maxbatch.families.parameter import LAYERS, Parameter
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.plan.partition import partition

_BYTES = {"float32": 4, "bfloat16": 2}


class ExpertGroups(NamedTuple):
    """The numbers of a group of devices that share the experts."""

    expert_group_size: int  # devices along the experts axis
    experts_per_device: int  # of each layer
    # of the experts' weights in the state of a device; an optimizer's moments are more
    expert_bytes_per_device: int
    rows_per_expert_group: Number  # of all devices of the group in one pass
    choices_per_expert: Number  # of these rows, if the experts share them evenly

    @classmethod
    def if_any(
        cls, model: ModelConfig, shape: MeshShape, rows: int, length: int
    ) -> ExpertGroups | None:
        """Returns the numbers for one pass over `rows` rows on all devices; None for a dense model."""
        if model.num_experts == 1:
            return None
        sizes = shape.sizes
        of_group = Fraction(rows * sizes["expert"], shape.batch_shards)
        choices = (
            of_group
            * Fraction(length, sizes["context"])
            * model.num_experts_per_tok
            / model.num_experts
        )
        values = sum(_of_device(row, model, sizes) for row in parameters(model) if row.per_expert)
        return cls(
            sizes["expert"],
            model.num_experts // sizes["expert"],
            values * _BYTES[model.weight_dtype],
            plain_number(of_group),
            plain_number(choices),
        )


def _of_device(row: Parameter, model: ModelConfig, sizes: Mapping[str, int]) -> int:
    """Returns the values of a parameter of experts, over all layers, that a device holds."""
    names, shape = (LAYERS, *row.axes), (sizes["pipeline"], *shape_of(row, model))
    split = partition(names, shape, sizes)
    return size_of(row, model) // math.prod(sizes[axis] for axes in split for axis in axes)
