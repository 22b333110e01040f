"""Preference pairs (`use_dpo`): a sample is a prompt with the chosen answer, then with the rejected
one.

A record has `chosen` and `rejected`, two texts or two lists of messages, and `prompt`, of the same
type; without it, the prompt is their common beginning. A record becomes two consecutive documents;
only the answers are trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from maxbatch.config.combined import StreamConfig
from maxbatch.config.sections import AllKeys, DataConfig
from maxbatch.config.values import shown_fields
from maxbatch.data.stream.recipe import Identity
from maxbatch.data.stream.split import Opened, Split
from maxbatch.data.tokenizers.chat_rendering import Conversation
from maxbatch.data.tokenizers.errors import ConversationError
from maxbatch.kinds.conversation.records import (
    Conversations,
    Texts,
    answer_of,
    extras_of,
    messages_of,
)
from maxbatch.update.recipe import TrainedRecipe

if TYPE_CHECKING:
    from maxbatch.config.combined import ProgramsConfig
    from maxbatch.data.store.store import Manifest
    from maxbatch.data.tokenizers.tokenizer import Tokenizer
    from maxbatch.kinds.pair.rows import PairRows
    from maxbatch.update.gradients import Objective

_T = TypeVar("_T")
# if `prompt` is absent, it is the common prefix of chosen and rejected
_PAIR = ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class PairRecords(Conversations):
    """Conversion of records to pairs of documents."""

    needs_trained: ClassVar[bool] = True

    @property
    def kind(self) -> dict[str, object]:
        return {"pairs": True}

    def documents(
        self, record: Mapping[str, object]
    ) -> tuple[Conversation | Texts, Conversation | Texts]:
        return _pair(record)


def _common(one: Iterable[_T], other: Iterable[_T]) -> Iterator[_T]:
    """Yields the common beginning of two sequences."""
    return (
        a
        for a, _ in itertools.takewhile(lambda two: two[0] == two[1], zip(one, other, strict=False))
    )


def _pair(record: Mapping[str, object]) -> tuple[Conversation | Texts, Conversation | Texts]:
    """Returns the prompt of a record with its chosen answer, and with its rejected one."""
    prompt, chosen, rejected = (record.get(name) for name in _PAIR)
    if chosen is None or rejected is None:
        raise ConversationError(
            f"use_dpo=true needs chosen and rejected; its fields: {shown_fields(record)}"
        )
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
        if prompt is None:
            same = sum(1 for _ in _common(chosen, rejected))
            prompt = chosen[
                : max((end for end in range(1, same + 1) if chosen[end - 1].isspace()), default=0)
            ]
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        chosen, rejected = answer_of(chosen, "chosen"), answer_of(rejected, "rejected")
        return Texts(prompt, chosen), Texts(prompt, rejected)
    if isinstance(chosen, list) and isinstance(rejected, list) and isinstance(prompt, list | None):
        answers = [messages_of(chosen, "chosen"), messages_of(rejected, "rejected")]
        if prompt is not None:
            asked = messages_of(prompt, "prompt")
        else:
            asked = list(_common(*answers))
            answers = [answer[len(asked) :] for answer in answers]
            if not all(answers):
                raise ConversationError(
                    "fields chosen and rejected: one of them is only the beginning of the other"
                )
        one, other = (
            Conversation([*asked, *answer], extras_of(record), len(asked)) for answer in answers
        )
        return one, other
    raise ConversationError(
        "fields prompt, chosen and rejected must be all texts, or all lists of messages"
    )


class PairRecipe(TrainedRecipe):
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

    def rows(self, config: StreamConfig, split: Split) -> Opened:
        rows = self._pairs(config, split)
        return Opened(rows, rows.num_overlong)

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
