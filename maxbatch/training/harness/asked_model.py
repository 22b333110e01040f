"""What a model must answer to be scored on tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from maxbatch.data.store.tokenizers import Tokenizer
from maxbatch.sampling.sampler import SamplingRules
from maxbatch.training.scoring import RowScores


class AskedModel(Protocol):
    """A model that the harness asks."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    @property
    def context(self) -> int:
        """The most tokens that the model reads at once."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a text, besides the tokenizer's own end."""

    def first_ids(self) -> list[int]:
        """Returns the token that a text begins with, if one is put before it."""

    def scorer(self, most_rows: int | None = None) -> Callable[[Sequence[np.ndarray]], list[RowScores]]:
        """Returns what assigns log-probabilities to tokens."""

    def completer(
        self, most_rows: int | None = None
    ) -> Callable[[Sequence[Sequence[int]], SamplingRules, Sequence[str]], list[str]]:
        """Returns what completes prompts."""
