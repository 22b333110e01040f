"""A fine-tuned model's answers to records: to held-out ones at each eval, and to one at the end of
the run.

A question is the part of a record before its first trained tokens, by a chat template or as a plain
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.around.sampling.sampler import Sampler, SamplingRules
from maxbatch.config.combined import DecoderConfig
from maxbatch.data.store.chat_prompts import chat_prompts
from maxbatch.data.stream.stream import Stream
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.parallel.trees import State
from maxbatch.run.compile.background import Background, MakeExecutable
from maxbatch.run.folder.answers import ANSWERS_FILE, Answer
from maxbatch.run.folder.metrics_log import StepLog
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.run.task import ShowText
from maxbatch.system.errors import TrainingError

_MOST_QUESTIONS = 4
_MOST_TOKENS = 64  # per answer, to keep evals short
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
    found = []
    for tokens, segments, weights in zip(
        rows["tokens"], rows["segments"], rows["weights"], strict=True
    ):
        trained = (segments == 1) & (weights > 0)
        begin = int(np.argmax(trained))
        if not trained.any() or begin <= 1:  # the first token of a segment never has weight
            continue
        rest = trained[begin:]
        end = begin + (int(np.argmin(rest)) if not rest.all() else len(rest))
        found.append(Question(tokens[:begin].tolist(), tokens[begin:end].tolist()))
    return found[:_MOST_QUESTIONS]


class Answers:
    """Greedy answers to questions, drawn one at a time, so that one program serves any mesh.

    Args:
      end_ids: tokens that end an answer, besides the tokenizer's and its chat template's.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
        end_ids: tuple[int, ...],
        questions: Sequence[Question],
    ) -> None:
        self.questions, self.tokenizer, self.prompts = questions, tokenizer, chat_prompts(tokenizer)
        end_ids += self.prompts.end_ids if self.prompts else ()
        self._rules = SamplingRules(0.0, max_new_tokens=_MOST_TOKENS, end_ids=end_ids)
        config = config.replaced({"scan_layers": True})
        self._sampler = Sampler(
            config, tokenizer, mesh, prompt_length=config.max_target_length, rescores=False
        )
        self._compiled: Future[jax.stages.Compiled] | None = None

    def compile(self, abstract_params: State, background: Background, make: MakeExecutable) -> None:
        """Starts compiling ahead of the first eval."""
        lower = partial(self._sampler.lower, abstract_params, 1, self._rules)
        self._compiled = background.start(partial(make, "answers", lower))

    def __call__(self, params: State) -> list[Answer]:
        """Answers all questions with these parameters; every host calls it.

        Raises:
          TrainingError: the parameters are not finite.
        """
        return [self.to(question, params) for question in self.questions]

    def to(self, question: Question, params: State) -> Answer:
        begin = len(question.prompt)
        self._sampler.executable = self._compiled.result() if self._compiled else None
        rows = self._sampler.rows([question.prompt], [(0, 0, 0)])
        found = jax.device_get(self._sampler(params, rows, self._rules))
        drawn = slice(begin, int(found.lengths_B[0]))
        if not np.isfinite(found.logprobs_BxL[0, drawn]).all():
            raise TrainingError(
                "the model gives no token a finite log-probability; its parameters are not finite"
            )
        texts = (question.prompt, found.tokens_BxL[0, drawn], question.answer)
        return Answer(*map(self.tokenizer.decode_markup, texts))


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
