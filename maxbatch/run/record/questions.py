"""Questions of records, and a fine-tuned model's answers to them: to held-out records at each eval,
and to one record at the end of the run.

A question is the part of a record before its first trained tokens, by a chat template or as a plain
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from maxbatch.data.stream.stream import Stream
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.parallel.trees import State
from maxbatch.run.compile.background import Background, MakeExecutable
from maxbatch.run.folder.answers_file import ANSWERS_FILE, Answer
from maxbatch.run.folder.metrics_log import StepLog
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.run.task import ShowText

if TYPE_CHECKING:
    from maxbatch.data.tokenizers.chat_prompts import ChatPrompts

_MOST_QUESTIONS = 4
_ROWS_PER_QUESTION = 8  # searched for questions


class Question(NamedTuple):
    """The tokens before an answer, and the record's answer."""

    prompt: list[int]
    answer: list[int]


def questions_of(stream: Stream) -> list[Question]:
    """Returns the first questions of a stream, one per row; skips records with all tokens trained
    on.
    """
    length = _MOST_QUESTIONS * _ROWS_PER_QUESTION
    rows = stream.read(0, min(length, stream.samples_per_epoch or length))
    questions = []
    for tokens, segments, weights in zip(
        rows["tokens"], rows["segments"], rows["weights"], strict=True
    ):
        trained = (segments == 1) & (weights > 0)
        begin = int(np.argmax(trained))
        if not trained.any() or begin <= 1:  # the first token of a segment never has weight
            continue
        rest = trained[begin:]
        end = begin + (int(np.argmin(rest)) if not rest.all() else len(rest))
        questions.append(Question(tokens[:begin].tolist(), tokens[begin:end].tolist()))
    return questions[:_MOST_QUESTIONS]


class Answers(Protocol):
    """Answers to questions by a model between two of its updates."""

    @property
    def questions(self) -> Sequence[Question]:
        """The questions that each eval asks."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of questions and answers."""

    @property
    def prompts(self) -> ChatPrompts | None:
        """The form of questions by the tokenizer's chat template; None without one."""

    def compile(self, abstract_params: State, background: Background, make: MakeExecutable) -> None:
        """Starts compiling ahead of the first eval."""

    def __call__(self, params: State) -> list[Answer]:
        """Answers all questions with these parameters; every host calls it.

        Raises:
          TrainingError: the parameters are not finite.
        """

    def to(self, question: Question, params: State) -> Answer:
        """Answers one question."""


class AnswersLog:
    """The answers of evals: a line of `answers.jsonl` each, and a text in TensorBoard.

    Drops answers of updates after `step`, which will be redone.
    """

    def __init__(self, folder: RunFolder, show: ShowText, step: int) -> None:
        self._log, self._show = StepLog(folder, ANSWERS_FILE, step), show

    def write(self, step: int, answers: Sequence[Answer]) -> None:
        """Adds the answers after `step` updates."""
        self._log.append({"step": step, "answers": [answer._asdict() for answer in answers]})
        text = "\n\n".join(f"{a.question}{a.answer}\n(the record: {a.expected})" for a in answers)
        self._show(step, "answers", "\n".join(f"    {line}" for line in text.splitlines()))

    def close(self) -> None:
        self._log.close()
