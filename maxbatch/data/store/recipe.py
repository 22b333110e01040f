"""The interface of a kind of sample to token stores: its records as documents. Imports no NumPy by
itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from maxbatch.config.recipes import Recipe
from maxbatch.config.sections import DataConfig

if TYPE_CHECKING:
    from maxbatch.data.store.encoder import Encoder
    from maxbatch.data.store.store import Manifest
    from maxbatch.data.tokenizers.tokenizer import Tokenizer


class StoreRecipe(Recipe):
    """A kind of sample as the token stores know it."""

    @abstractmethod
    def encoder(self, config: DataConfig, tokenizer: Tokenizer) -> Encoder | None:
        """Returns the encoder of records; None: a document is a text."""

    @abstractmethod
    def has_made(self, made: Mapping[str, object] | None) -> bool:
        """Returns whether a store is of this kind, by the identity of its encoder; None: it holds
        texts.
        """

    @abstractmethod
    def prepared_settings(self, manifest: Manifest) -> dict[str, object]:
        """Returns the settings that a store of this kind was made with, by the keys that must state
        them.
        """
