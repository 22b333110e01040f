"""Preference pairs (`use_dpo`): a sample is a prompt with the chosen answer, then with the rejected
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from maxbatch.config.combined import StreamConfig
from maxbatch.config.sections import AllKeys, DataConfig
from maxbatch.data.stream.recipe import Identity
from maxbatch.data.stream.split import Split, SplitRows
from maxbatch.kinds.text.recipe import TextRecipe

if TYPE_CHECKING:
    from maxbatch.config.combined import ProgramsConfig
    from maxbatch.data.store.store import Manifest
    from maxbatch.data.tokenizers.tokenizer import Tokenizer
    from maxbatch.kinds.pair.records import PairRecords
    from maxbatch.kinds.pair.rows import PairRows
    from maxbatch.update.gradients import Objective


class PairRecipe(TextRecipe):
    """Pairs of a chosen and a rejected answer."""

    unit = "pair"
    rows_per_sample = 2
    records = "pairs of answers"
    fields = "with prompt, chosen and rejected"
    has_answers = True
    documents_per_record = 2
    store_records = "pairs"
    counted = "pairs"
    means = ("margin", "pair_accuracy")
    takes_parts = False

    def check(self, config: AllKeys) -> None:
        if config.dpo_algo == "orpo" and config.dpo_label_smoothing:
            raise config.fault(
                "dpo_label_smoothing", "0 beside dpo_algo=orpo, whose loss has none", "0"
            )
        if config.z_loss_multiplier:
            rule = "0 beside use_dpo, whose loss compares whole answers"
            raise config.fault("z_loss_multiplier", rule, 0)

    def encoder(self, config: DataConfig, tokenizer: Tokenizer) -> PairRecords:
        from maxbatch.kinds.pair.records import PairRecords

        return PairRecords(tokenizer, completion_only=True)

    def has_made(self, made: Mapping[str, object] | None) -> bool:
        return made is not None and bool(made.get("pairs"))  # its stores predate the names of kinds

    def prepared_settings(self, manifest: Manifest) -> dict[str, object]:
        return {}

    def row_identity(self, config: StreamConfig) -> Identity:
        return {
            key: config[key]
            for key in ("use_dpo", "max_target_length", "overlong", "skip_bad_records")
        }

    def rows(self, config: StreamConfig, split: Split) -> SplitRows:
        rows = self._pairs(config, split)
        return SplitRows(rows, rows.num_overlong)

    def num_rows_if_cached(self, config: StreamConfig, split: Split) -> int:
        return self._pairs(config, split).num_rows

    def _pairs(self, config: StreamConfig, split: Split) -> PairRows:
        from maxbatch.kinds.pair.rows import PairRows

        return PairRows(
            split.store, split.numbers_S, config.max_target_length, config.overlong, split.pad_id
        )

    def objective(self, config: ProgramsConfig) -> Objective:
        from maxbatch.kinds.pair.objective import preference_objective

        return preference_objective(config.preferences)


RECIPE = PairRecipe()
