"""Text: a sample is a row of tokens, each predicted from the previous ones."""

from __future__ import annotations

from maxbatch.update.recipe import TrainedRecipe


class TextRecipe(TrainedRecipe):
    """Text: all defaults."""


RECIPE = TextRecipe()
