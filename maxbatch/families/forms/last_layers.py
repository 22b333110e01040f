"""Last layers of a decoder that have queries alone: they take the keys and values of layers before
them.
"""

from __future__ import annotations

from maxbatch.families.forms.form import Form
from maxbatch.families.parameter import ModelKeys


class LastLayers(Form):
    """A form of last layers without keys and values of their own."""

    hidden = ""  # the hidden axis of their MLPs

    def hidden_times(self, model: ModelKeys) -> int:
        """Returns how many times `base_mlp_dim` the hidden width of their MLPs is."""
        del model
        return 1

    def num_layers(self, model: ModelKeys) -> int:
        """Returns the number of these layers."""
        raise NotImplementedError

    def axis_sizes(self, model: ModelKeys) -> dict[str, int]:
        """Returns the hidden width of their MLPs."""
        return {self.hidden: model.base_mlp_dim * self.hidden_times(model)}

    def summed_times(self, config: ModelKeys) -> dict[str, int]:
        """Returns those of an MLP, whose last product sums over its hidden width."""
        return {"base_mlp_dim": self.hidden_times(config)}
