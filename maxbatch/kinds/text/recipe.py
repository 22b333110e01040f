"""Text: a sample is a row of tokens, each predicted from the previous ones.

Other kinds extend its recipe, which has all that the rooms ask of a kind of sample: what they leave
as it is here, they have in common with text. A plan imports recipes, and so NumPy and JAX are
imported inside of methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from maxbatch.config.combined import StreamConfig
from maxbatch.config.keys import Fixes
from maxbatch.config.sections import DataConfig, names_fixing
from maxbatch.data.stream.recipe import Identity
from maxbatch.data.stream.split import Fitted, Split, SplitRows
from maxbatch.update.recipe import TrainedRecipe

if TYPE_CHECKING:
    from maxbatch.config.combined import ProgramsConfig
    from maxbatch.data.store.encoder import Encoder
    from maxbatch.data.store.store import Manifest
    from maxbatch.data.stream.document_rows import Cut
    from maxbatch.data.tokenizers.tokenizer import Tokenizer
    from maxbatch.update.gradients import Objective


class TextRecipe(TrainedRecipe):
    """Text: a document is the text of a record, and rows are cut from documents, joined or
    separate.

    Attributes:
      reads_blocks: whether rows can be found through blocks of a large document table.
    """

    reads_blocks: ClassVar[bool] = True

    def encoder(self, config: DataConfig, tokenizer: Tokenizer) -> Encoder | None:
        return None

    def has_made(self, made: Mapping[str, object] | None) -> bool:
        return made is not None and made.get("kind") == self.name

    def prepared_settings(self, manifest: Manifest) -> dict[str, object]:
        return {"add_bos": bool(manifest["bos"]), "add_eos": bool(manifest["eos"])}

    def row_identity(self, config: StreamConfig) -> Identity:
        return {key: config[key] for key in names_fixing(Fixes.TOKENS | Fixes.ROWS)}

    def rows(self, config: StreamConfig, split: Split) -> SplitRows:
        from maxbatch.data.stream.document_rows import open_documents

        return open_documents(config, split, self._cut(config, split))

    def num_rows_if_cached(self, config: StreamConfig, split: Split) -> int | None:
        from maxbatch.data.stream.document_rows import num_rows_if_cached

        return num_rows_if_cached(config, split, self._cut(config, split))

    def strategy(self, config: StreamConfig) -> str:
        """Returns the `packing_strategy` of documents."""
        return str(config.packing_strategy)

    def fitted(self, config: StreamConfig, split: Split) -> Fitted:
        """Returns the documents of a split, cut to fit rows."""
        from maxbatch.data.stream.rows import Extents

        return Fitted(Extents.of(split.store.offsets, split.numbers_S), 0)

    def _cut(self, config: StreamConfig, split: Split) -> Cut:
        from maxbatch.data.stream.document_rows import Cut

        return Cut(self.strategy(config), self.reads_blocks, partial(self.fitted, config, split))

    def objective(self, config: ProgramsConfig) -> Objective:
        """Returns the cross-entropy of each token."""
        from maxbatch.update.gradients import NEXT_TOKEN

        return NEXT_TOKEN


RECIPE = TextRecipe()
