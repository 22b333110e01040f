"""The experts of a run's devices: how many a device holds, and the tokens of one product. No JAX.

The devices along the experts axis are a group: each holds some of the experts, and computes them for the rows of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.matrices import Parameter, parameters
from maxbatch.config.sections import ModelConfig
from maxbatch.config.values import Number, plain_number
from maxbatch.plan.mesh_shape import MeshShape

_BYTES = {"float32": 4, "bfloat16": 2}
# The axes of a matrix of experts, of the mesh axes that split them.
_SPLIT = {"experts": "expert", "embed": "fsdp", "attended": "fsdp", "moe_mlp": "tensor"}


class ExpertGroups(NamedTuple):
    """The numbers of a group of devices that share the experts."""

    expert_group_size: int  # devices along the experts axis
    experts_per_device: int  # of each layer
    expert_bytes_per_device: int  # of the experts' weights in the state of a device; an optimizer's moments are more
    rows_per_expert_group: Number  # of all devices of the group in one pass
    choices_per_expert: Number  # of these rows, if the experts share them evenly

    @classmethod
    def if_any(cls, model: ModelConfig, shape: MeshShape, rows: int, length: int) -> ExpertGroups | None:
        """Returns the numbers for one pass over so many rows on all devices; None for a dense model."""
        if model.num_experts == 1:
            return None
        sizes = shape.sizes
        of_group = Fraction(rows * sizes["expert"], shape.batch_shards)
        choices = of_group * Fraction(length, sizes["context"]) * model.num_experts_per_tok / model.num_experts
        values = sum(row.size(model) // _parts(row, model, sizes) for row in parameters(model) if row.per_expert)
        return cls(
            sizes["expert"], model.num_experts // sizes["expert"], values * _BYTES[model.weight_dtype],
            plain_number(of_group), plain_number(choices),
        )  # fmt: skip


def _parts(row: Parameter, model: ModelConfig, sizes: Mapping[str, int]) -> int:
    """Returns the parts that the mesh splits a parameter of experts into; an axis that does not divide leaves it whole.

    In that case the fsdp axis takes the largest other dimension that it divides.
    """
    shape = row.shape(model)
    parts = [sizes.get(_SPLIT.get(name, ""), 1) for name in row.axes]
    parts = [part if size % part == 0 else 1 for size, part in zip(shape, parts, strict=True)]
    fsdp = sizes["fsdp"]
    if any(_SPLIT.get(name) == "fsdp" and part != fsdp for name, part in zip(row.axes, parts, strict=True)):
        free = [(size, i) for i, size in enumerate(shape) if parts[i] == 1 and size % fsdp == 0]
        if free:
            parts[max(free)[1]] = fsdp
    return math.prod(parts) * sizes["pipeline"]
