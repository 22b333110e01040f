"""A conversation with a model: each answer sees all turns so far that fit into the context.

Shapes: L slots of a row, P slots of its prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from maxbatch.around.sampling.sampler import Samplers, SamplingRules
from maxbatch.config.combined import DecoderConfig
from maxbatch.data.tokenizers.chat_prompts import ChatPrompts
from maxbatch.data.tokenizers.chat_rendering import Message
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.parallel.trees import State
from maxbatch.system.errors import ConfigError

_MAX_NEW_TOKENS = 512
_PIECE_TOKENS = 4  # shown at a time
_TORN = "\ufffd"  # the end of a text whose last character is incomplete


class Chat:
    """The turns of a conversation, and the model that answers.

    Args:
      params: parameters of a `Decoder`; the config and the tokenizer are their run's.
      context: the most tokens that the model reads at once.
      system: the message that precedes all turns; empty: none.
      rules: how tokens are drawn; without `max_new_tokens` an answer has at most 512.

    Raises:
      ConfigError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        params: State,
        tokenizer: Tokenizer,
        config: DecoderConfig,
        rules: SamplingRules,
        context: int,
        system: str,
    ) -> None:
        self._params, self._tokenizer, self._context = params, tokenizer, context
        self._prompts = ChatPrompts(tokenizer)
        ends = (*rules.end_ids, *self._prompts.end_ids)
        self._most = rules.max_new_tokens or _MAX_NEW_TOKENS
        self._rules = dataclasses.replace(rules, end_ids=ends, max_new_tokens=self._most)
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turns: list[Message] = []
        self._samplers = Samplers(config, tokenizer, None, context)
        self._answers = 0
        self.forgotten = 0  # turns that no longer fit into the context
        self.ended = False  # whether the last answer ended by itself

    def say(self, text: str) -> Iterator[str]:
        """Adds a message of the user, and yields the answer to it in pieces.

        If the caller stops reading, the answer counts up to there.

        Raises:
          ConfigError: the message does not fit into the context, or the template refuses the
            conversation.
          TrainingError: a token has no finite log-probability.
        """
        self._turns.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
        except ConfigError:
            self._turns.pop()
            raise
        ids: list[int] = []
        self.ended, told = False, ""
        try:
            for piece in self._pieces(prompt):
                self.ended = piece[-1] in self._ends
                ids += piece[:-1] if self.ended else piece
                whole = self._tokenizer.decode(ids).removesuffix(_TORN)
                if len(whole) > len(told) and whole.startswith(told):
                    new, told = whole[len(told) :], whole
                    yield new
            if rest := self._tokenizer.decode(ids)[len(told) :]:
                yield rest
        finally:
            self._turns.append({"role": "assistant", "content": self._tokenizer.decode(ids)})
            self._answers += 1

    @property
    def _ends(self) -> tuple[int | None, ...]:
        return (self._tokenizer.eos_id, *self._rules.end_ids)

    def _prompt(self) -> np.ndarray:
        """Returns the ids of the conversation, without its oldest turns if they leave no room for
        an answer.
        """
        room, turns = min(self._most, max(1, self._context // 4)), self._turns
        ids = self._prompts.ids([*self._system, *turns])
        while len(ids) + room > self._context and len(turns) > 1:
            turns = turns[2:]
            ids = self._prompts.ids([*self._system, *turns])
        if len(ids) >= self._context:
            raise ConfigError(
                f"the message has {len(ids)} tokens with the chat template, and the model reads "
                f"at most {self._context}; works: a shorter message"
            )
        self.forgotten += len(self._turns) - len(turns)
        self._turns = turns
        return ids

    def _pieces(self, prompt: np.ndarray) -> Iterator[list[int]]:
        sampler = self._samplers.of(self._samplers.slots(len(prompt), self._most))
        rows = sampler.rows([prompt], [(self._answers, 0, 0)])
        responses = sampler.growing(self._params, rows, self._rules, _PIECE_TOKENS)
        read = 0
        for (response,) in responses:
            if new := response[read:]:
                yield new
            read = len(response)
