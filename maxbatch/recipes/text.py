"""Text: a sample is a row of tokens, of which each is predicted from those before it."""

from __future__ import annotations

from maxbatch.training.update.recipe import TrainedRecipe


class TextRecipe(TrainedRecipe):
    """Text: all of it the defaults."""


RECIPE = TextRecipe()
