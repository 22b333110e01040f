"""The interface of a model scored on tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from maxbatch.data.store.tokenizers import Tokenizer
from maxbatch.sampling.sampler import SamplingRules
from maxbatch.training.scoring import RowScores


class AskedModel(Protocol):
    """A model for the harness."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    @property
    def context(self) -> int:
        """The model's largest context, in tokens."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a text, besides the tokenizer's own end."""

    def first_ids(self) -> list[int]:
        """Returns the token put before a text, if any."""

    def scorer(self, most_rows: int | None = None) -> Callable[[Sequence[np.ndarray]], list[RowScores]]:
        """Returns the function that assigns log-probabilities to tokens."""

    def completer(
        self, most_rows: int | None = None
    ) -> Callable[[Sequence[Sequence[int]], SamplingRules, Sequence[str]], list[str]]:
        """Returns the function that completes prompts."""
