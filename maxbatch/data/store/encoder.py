"""Records whose documents have tokens that are trained on, and others that are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from maxbatch.data.tokenizers.errors import RecordError


class Encoded(NamedTuple):
    """A document."""

    ids: np.ndarray  # int32[n]
    trained: np.ndarray  # bool[n], whether each is trained on


class Encoder(Protocol):
    """Conversion of records to documents, for a kind of sample."""

    @property
    def identity(self) -> dict[str, object]:
        """The values that fix the tokens of records, besides the tokenizer."""

    def encode_batch(self, records: Sequence[bytes]) -> Sequence[Sequence[Encoded] | RecordError]:
        """Returns the documents of records, which are JSON objects, or why a record is bad."""
