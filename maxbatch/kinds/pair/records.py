"""Records of preference pairs: `chosen` and `rejected`, two texts or two lists of messages, and
`prompt`, of the same type; without it, the prompt is their common beginning.

A record becomes two consecutive documents; only the answers are trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from maxbatch.config.values import shown_fields
from maxbatch.data.tokenizers.chat_rendering import Conversation
from maxbatch.data.tokenizers.errors import RecordError
from maxbatch.kinds.conversation.messages import extras_of, messages_of
from maxbatch.kinds.conversation.records import Conversations, Texts, answer_of

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


def _common(first: Iterable[_T], other: Iterable[_T]) -> Iterator[_T]:
    """Yields the common beginning of two sequences."""
    return (
        a
        for a, _ in itertools.takewhile(
            lambda two: two[0] == two[1], zip(first, other, strict=False)
        )
    )


def _pair(record: Mapping[str, object]) -> tuple[Conversation | Texts, Conversation | Texts]:
    """Returns the prompt of a record with its chosen answer, and with its rejected one."""
    prompt, chosen, rejected = (record.get(name) for name in _PAIR)
    if chosen is None or rejected is None:
        raise RecordError(
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
                raise RecordError(
                    "fields chosen and rejected: one of them is only the beginning of the other"
                )
        with_chosen, with_rejected = (
            Conversation([*asked, *answer], extras_of(record), len(asked)) for answer in answers
        )
        return with_chosen, with_rejected
    raise RecordError(
        "fields prompt, chosen and rejected must be all texts, or all lists of messages"
    )
