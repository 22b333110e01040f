"""The embedding of tokens, where it enters the stream."""

from __future__ import annotations

import dataclasses
import math

from maxbatch.families.forms.form import Form
from maxbatch.families.parameter import ModelKeys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding(Form):
    """A table of tokens, as it is or multiplied by the root of its width."""

    is_scaled: bool = False
    caps_logits: bool = False  # in published models, where the table is the output projection too

    def scale(self, model: ModelKeys) -> float | None:
        """Returns the factor of the embedding; None if it has none."""
        return math.sqrt(model.base_emb_dim) if self.is_scaled else None


EMBEDDING = Embedding()  # as most families have it
