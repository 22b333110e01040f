"""The partition of parameters: which mesh axes split which of their dimensions. No JAX.

A mesh axis splits only one dimension of a parameter, the first that lists it. The pipeline axis
splits the layers of parameters that are stacked by layer, and the width of all others, because
outside of the pipeline its devices share the work by rows. The context axis splits the width as
fsdp does, but not beside a pipeline, which would gather it at every tick. A dimension that its mesh
axes do not divide stays whole. The fsdp axis then takes the largest dimension without an axis that
it divides, so a width of 128 on 3 devices costs memory and not correctness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from maxbatch.families.family import FORMS
from maxbatch.families.matrices import NORMS
from maxbatch.families.parameter import DENSE_LAYERS, LAST_LAYERS, LAYERS, STACKS

# Dimensions that the tensor axis splits, of parameters and activations alike.
OVER_TENSOR = (
    "vocab",
    "heads",
    "kv_heads",
    *(axis for form in FORMS for axis in form.over_tensor),
)
# Dimensions that no axis splits, of parameters and activations alike.
WHOLE = (
    "head_dim",
    "position",
    *(axis for form in FORMS for axis in form.whole),
)
# Dimensions that are split as the width of the stream: a product sums over them.
SUMMED = ("embed", *(axis for form in FORMS for axis in form.summed))
# Dimensions of tables that are looked up for rows that are not split.
LOOKED_UP = tuple(axis for form in FORMS for axis in form.looked_up)
# dimension -> mesh axes that split it
PARAMETER_RULES: dict[str, tuple[str, ...]] = {
    LAYERS: ("pipeline",),
    "experts": ("expert",),
    **dict.fromkeys(LOOKED_UP, ("fsdp", "tensor")),
    **dict.fromkeys(SUMMED, ("fsdp", "context", "expert", "pipeline")),
    **dict.fromkeys(OVER_TENSOR, ("tensor",)),
    **dict.fromkeys((*WHOLE, *NORMS, "rank"), ()),
    **dict.fromkeys((DENSE_LAYERS, LAST_LAYERS), ()),  # outside of the pipeline
}


def partition(
    names: tuple[str, ...], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """Returns the mesh axes that split each dimension of a parameter.

    Args:
      names: of the dimensions.
      shape: their sizes.
      sizes: of the mesh axes.
    """
    axes_of_dimensions: list[tuple[str, ...]] = []
    for name, size in zip(names, shape, strict=True):
        wanted = tuple(
            axis
            for axis in PARAMETER_RULES[name]
            if not any(axis in axes for axes in axes_of_dimensions)
        )
        # Axes of one device are left out, so that such a mesh has the partition of one without them.
        left_out = {axis for axis in ("context", "expert") if sizes[axis] == 1}
        if sizes["pipeline"] > 1:
            left_out.add("context")
        wanted = tuple(axis for axis in wanted if axis not in left_out)
        if sizes["pipeline"] == 1 and name != LAYERS:
            wanted = tuple(axis for axis in wanted if axis != "pipeline")
        # Drop axes from the last on, until the rest divides the dimension.
        while wanted and size % math.prod(sizes[axis] for axis in wanted):
            wanted = wanted[:-1]
        axes_of_dimensions.append(wanted)

    # The fsdp axis takes another dimension where it divides none of its own.
    if "embed" in names and not any("fsdp" in axes for axes in axes_of_dimensions):
        whole = [
            (size, i)
            for i, size in enumerate(shape)
            if not axes_of_dimensions[i] and names[i] not in STACKS
        ]
        fits = [(size, i) for size, i in whole if size % sizes["fsdp"] == 0]
        if fits:
            axes_of_dimensions[max(fits)[1]] = ("fsdp",)
    return axes_of_dimensions
