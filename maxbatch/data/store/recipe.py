"""A kind of sample in the token stores: how its records become documents. Imports no NumPy by
itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from maxbatch.config.keys import Fixes
from maxbatch.config.recipes import Recipe
from maxbatch.config.sections import DataConfig, names_fixing

if TYPE_CHECKING:
    from maxbatch.data.store.encoder import Encoder
    from maxbatch.data.store.store import Manifest
    from maxbatch.data.tokenizers.tokenizer import Tokenizer


class StoreRecipe(Recipe):
    """A kind of sample as the token stores know it; by default a document is the text of a
    record.
    """

    documents_per_record: ClassVar[int] = 1

    def encoder(self, config: DataConfig, tokenizer: Tokenizer) -> Encoder | None:
        """Returns the encoder of records; None: a document is a text."""
        return None

    def store_settings(self, config: DataConfig, tokenizer: Tokenizer) -> dict[str, object]:
        """Returns the settings that fix the tokens of a store, for its signature."""
        if encoder := self.encoder(config, tokenizer):
            return {"conversations": encoder.identity}
        return {key: config[key] for key in names_fixing(Fixes.TOKENS)}

    def has_made(self, made: Mapping[str, object] | None) -> bool:
        """Returns whether a store is of this kind, by the identity of its encoder; None: it holds
        texts.
        """
        return made is not None and made.get("kind") == self.name

    def prepared_settings(self, manifest: Manifest) -> dict[str, object]:
        """Returns the settings that a store of this kind was made with, by the keys that must state
        them.
        """
        return {"add_bos": bool(manifest["bos"]), "add_eos": bool(manifest["eos"])}
