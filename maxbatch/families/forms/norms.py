"""The norms around the parts of a layer."""

from __future__ import annotations

import dataclasses
from typing import Literal

from maxbatch.families.forms.form import Form
from maxbatch.families.parameter import Parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norms(Form):
    """Norms of the inputs of attention and MLP, of their outputs before they join the stream, or of
    both.
    """

    in_float32 = ("norm",)
    kind: Literal["rms", "layer"] = "rms"  # RMSNorm, or LayerNorm with a bias
    add_one: bool = False  # they multiply by 1 + scale
    are_before: bool = True
    are_after: bool = False

    def rows(self, name: str, axis: str = "norm") -> tuple[Parameter, ...]:
        """Returns the parameters of one norm."""
        weights = ("scale", "bias") if self.kind == "layer" else ("scale",)
        return tuple(Parameter(f"{name}.{part}", (axis,)) for part in weights)

    def rows_before(self, name: str) -> tuple[Parameter, ...]:
        """Returns the parameters of the norm of an input; none if outputs alone are normalised."""
        return self.rows(name) if self.are_before else ()

    def rows_after(self, name: str) -> tuple[Parameter, ...]:
        """Returns the parameters of the norm of an output; none if inputs alone are normalised."""
        return self.rows(name) if self.are_after else ()


RMS_BEFORE = Norms()  # as most families have them
