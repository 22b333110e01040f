"""The answers of a fine-tuned model to held-out records, in a run folder."""

from __future__ import annotations

from typing import NamedTuple

from maxbatch.run.folder.metrics import read_step_log
from maxbatch.system.storage.storage import AnyPath

ANSWERS_FILE = "answers.jsonl"


class Answer(NamedTuple):
    """The answer of a model, as text, special tokens spelled out."""

    question: str
    answer: str
    expected: str  # the record's


def read_answers(run_dir: AnyPath) -> tuple[int, list[Answer]] | None:
    """Returns the step of the last eval with answers, and the answers; None if there is none.

    Raises:
      ConfigError: the file cannot be read.
    """
    for record in reversed(read_step_log(run_dir / ANSWERS_FILE)):
        answers = record.get("answers")
        if isinstance(answers, list) and answers and all(map(_is_answer, answers)):
            return record["step"], [Answer(**answer) for answer in answers]
    return None


def _is_answer(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != set(Answer._fields):
        return False
    return all(isinstance(text, str) for text in value.values())
