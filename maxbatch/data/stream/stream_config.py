"""The config keys of a stream."""

from __future__ import annotations

from fractions import Fraction

from maxbatch.config.sections import DataConfig
from maxbatch.data.stream.recipe import StreamRecipe


class StreamConfig(DataConfig):
    """The data's keys, the kind of sample, the length of a row, the vocabulary, and for messages model and epochs."""

    max_target_length: int
    vocab_size: int
    load_parameters_path: str
    num_epochs: int | float | Fraction | None
    recipe: StreamRecipe
