"""Conversations (`use_sft`): a sample is a row of whole conversations, trained on their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from maxbatch.config.combined import StreamConfig
from maxbatch.config.keys import Fixes
from maxbatch.config.sections import DataConfig, names_fixing
from maxbatch.data.stream.recipe import Identity
from maxbatch.data.stream.split import Fitted, Split
from maxbatch.kinds.text.recipe import TextRecipe

if TYPE_CHECKING:
    from maxbatch.data.store.store import Manifest
    from maxbatch.data.tokenizers.tokenizer import Tokenizer
    from maxbatch.kinds.conversation.records import Conversations


class ConversationRecipe(TextRecipe):
    """Conversations, trained on their answers."""

    records = "conversations"
    fields = "sft_format names their fields"
    has_answers = True
    holds_chats = True
    reads_blocks = False  # packing needs all lengths
    answers_evals = True

    def encoder(self, config: DataConfig, tokenizer: Tokenizer) -> Conversations:
        from maxbatch.config.values import field_names
        from maxbatch.kinds.conversation.records import Conversations

        named = tuple(field_names(config.record_fields) or {})
        return Conversations(
            tokenizer,
            config.sft_train_on_completion_only,
            config.sft_format,
            config.text_field,
            named,
        )

    def has_made(self, made: Mapping[str, object] | None) -> bool:
        # the oldest kind, without a name in its stores
        return made is not None and not {"kind", "pairs"} & made.keys()

    def prepared_settings(self, manifest: Manifest) -> dict[str, object]:
        made = manifest["conversations"]
        completion_only, form = bool(made["completion_only"]), made.get("format", "auto")
        return {"sft_train_on_completion_only": completion_only, "sft_format": form}

    def row_identity(self, config: StreamConfig) -> Identity:
        identity = {key: config[key] for key in names_fixing(Fixes.ROWS | Fixes.CHAT)}
        # the form found is in the content; older streams lack the key
        if identity["sft_format"] == "auto":
            del identity["sft_format"]
        return identity | {"packing_strategy": self.strategy(config)}

    def strategy(self, config: StreamConfig) -> str:
        """Returns best fit, the only packing that cuts no conversation."""
        return "best_fit" if config.packing else config.packing_strategy

    def fitted(self, config: StreamConfig, split: Split) -> Fitted:
        from maxbatch.kinds.conversation.rows import fit_rows

        return fit_rows(split.store, split.numbers_S, config.max_target_length, config.overlong)


RECIPE = ConversationRecipe()
