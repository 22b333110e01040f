"""Answers to records by the model of a run, between two of its updates."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.around.sampling.sampler import Sampler, SamplingRules
from maxbatch.config.combined import DecoderConfig
from maxbatch.data.tokenizers.chat_prompts import chat_prompts
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.parallel.trees import State
from maxbatch.run.compile.background import Background, MakeExecutable
from maxbatch.run.folder.answers_file import Answer
from maxbatch.run.record.questions import Question
from maxbatch.system.errors import TrainingError

_MOST_TOKENS = 64  # per answer, to keep evals short


class GreedyAnswers:
    """Greedy answers to questions (`maxbatch.run.record.questions.Answers`), drawn one at a time, so
    that one program serves any mesh.

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
        """Answers one question."""
        begin = len(question.prompt)
        self._sampler.executable = self._compiled.result() if self._compiled else None
        rows = self._sampler.rows([question.prompt], [(0, 0, 0)])
        responses = jax.device_get(self._sampler(params, rows, self._rules))
        drawn = slice(begin, int(responses.lengths_B[0]))
        if not np.isfinite(responses.logprobs_BxL[0, drawn]).all():
            raise TrainingError(
                "the model gives no token a finite log-probability; its parameters are not finite"
            )
        texts = (question.prompt, responses.tokens_BxL[0, drawn], question.answer)
        return Answer(*map(self.tokenizer.decode_markup, texts))
