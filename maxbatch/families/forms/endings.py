"""What happens to the stream at the end of a layer, behind its MLP or its experts."""

from __future__ import annotations

from maxbatch.families.forms.form import Form, NormRows
from maxbatch.families.parameter import Parameter


class Ending(Form):
    """A form of a layer's end. `layer` is a function of the layer, the stream and the layer's input
    besides it.
    """

    norms: tuple[str, ...] = ()  # the names of its norms in a layer
    module = (
        ""  # the name of the decoder's module that makes what layers are given besides the stream
    )
    makes_inputs = ""  # "module:Class" of that module

    def rows(self, stack: str, norm: NormRows) -> tuple[Parameter, ...]:
        """Returns the parameters that one layer has for it."""
        raise NotImplementedError

    def rows_outside(self, norm: NormRows) -> tuple[Parameter, ...]:
        """Returns the parameters that it has outside of layers."""
        del norm
        return ()


class LayerScale(Ending):
    """A layer's output, the stream included, is multiplied by a learned number."""

    layer = "maxbatch.model.layer:scaled"
    whole = ("layer",)

    def rows(self, stack: str, norm: NormRows) -> tuple[Parameter, ...]:
        """Returns the number."""
        del norm
        return (Parameter(f"{stack}.layer_scale", ("layer",)),)

    def axis_sizes(self, model: object) -> dict[str, int]:
        """Returns the size of an axis for one number."""
        del model
        return {"layer": 1}


LAYER_SCALE = LayerScale()
