"""Last layers of a decoder that have queries alone: they take the keys and values of layers before
them.
"""

from __future__ import annotations

from maxbatch.families.forms.form import Form
from maxbatch.families.parameter import ModelKeys


class LastLayers(Form):
    """A form of last layers without keys and values of their own."""

    hidden = ""  # the hidden axis of their MLPs

    def num_layers(self, model: ModelKeys) -> int:
        """Returns the number of these layers."""
        raise NotImplementedError
