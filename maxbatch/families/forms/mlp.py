"""The MLP, gated or plain."""

from __future__ import annotations

import dataclasses

from maxbatch.families.forms.form import Form
from maxbatch.families.parameter import ModelKeys, Parameter


def is_gated(model: ModelKeys) -> bool:
    """Returns whether the MLP multiplies an activated projection with a linear one."""
    return bool(model.mlp_activations.endswith(",linear"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainOrGated(Form):
    """An MLP with or without a gate, as `mlp_activations` states."""

    layer = "maxbatch.model.mlp:MLP"
    over_tensor = ("mlp",)
    # whether published models have a linear projection beside the activated one
    has_gate: bool = True
    has_biases: bool = False  # whatever mlp_projection_bias says

    def rows(self, name: str, hidden: str = "mlp") -> tuple[Parameter, ...]:
        """Returns the parameters of one layer's MLP, whose hidden axis is `hidden`."""

        def has_bias(model: ModelKeys) -> bool:
            return model.mlp_projection_bias or self.has_biases

        def has_gate_bias(model: ModelKeys) -> bool:
            return is_gated(model) and has_bias(model)

        return (
            Parameter(f"{name}.gate", (hidden,), ("embed",), kept="mlpwi_0", has=is_gated),
            # without a gate, the name of the gate
            Parameter(f"{name}.up", (hidden,), ("embed",), kept="mlpwi_1"),
            Parameter(f"{name}.down", ("embed",), (hidden,), kept="mlpwo"),
            Parameter(f"{name}.gate_bias", (hidden,), has=has_gate_bias),
            Parameter(f"{name}.up_bias", (hidden,), has=has_bias),
            Parameter(f"{name}.down_bias", ("norm",), has=has_bias),
        )

    def axis_sizes(self, model: ModelKeys) -> dict[str, int]:
        """Returns the hidden width."""
        return {"mlp": model.base_mlp_dim}


MLP = PlainOrGated()  # as most families have it
