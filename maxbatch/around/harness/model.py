"""A model behind lm-evaluation-harness's interface; needs the extra `eval`.

Requests become tokens and answers become figures by the harness's own rules, as in its transformers
models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from maxbatch.around.sampling.sampler import SamplingRules
from maxbatch.around.scoring import RowScores
from maxbatch.data.tokenizers.chat_prompts import ChatPrompts
from maxbatch.data.tokenizers.chat_rendering import Message
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.system.errors import ConfigError

_MAX_NEW_TOKENS = 256  # default of a task, as in the harness


class AskedModel(Protocol):
    """A model for the harness."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    @property
    def context(self) -> int:
        """The model's largest context, in tokens."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a text, besides the tokenizer's own end."""

    def first_ids(self) -> list[int]:
        """Returns the token put before a text, if any."""

    def scorer(
        self, most_rows: int | None = None
    ) -> Callable[[Sequence[np.ndarray]], list[RowScores]]:
        """Returns the function that assigns log-probabilities to tokens."""

    def completer(
        self, most_rows: int | None = None
    ) -> Callable[[Sequence[Sequence[int]], SamplingRules, Sequence[str]], list[str]]:
        """Returns the function that completes prompts."""


class HarnessModel(TemplateLM):
    """A model for requests of lm-evaluation-harness.

    Args:
      batch_size: rows per pass; None: by their length. Answers do not depend on it.
      chat: the tokenizer's chat template for requests; None: plain text.
    """

    def __init__(
        self, model: AskedModel, batch_size: int | None = None, chat: ChatPrompts | None = None
    ) -> None:
        super().__init__()
        self._chat = chat
        self._model, self._tokenizer = model, model.tokenizer
        self._score, self._complete = model.scorer(batch_size), model.completer(batch_size)

    @property
    def eot_token_id(self) -> int | None:
        """The id of the token that ends a text."""
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text whose first token is scored."""
        return self._tokenizer.start_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: object
    ) -> list[int]:
        """Returns the ids of a text, after the model's first token unless that is declined.

        A chat template writes special tokens itself.
        """
        if self._chat:
            marked: list[int] = self._tokenizer.encode_markup_batch([string])[0].tolist()
            return marked
        first = [] if add_special_tokens is False else self._model.first_ids()
        ids: list[int] = self._tokenizer.encode(string).tolist()
        return first + ids

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, for the harness's cache of requests, which is off."""
        return type(self._tokenizer).__name__

    def apply_chat_template(
        self, chat_history: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """Returns a request's messages as text, up to the assistant's turn.

        Raises:
          ConfigError: the template refuses the messages, or the task begins the answer itself.
        """
        assert self._chat is not None, "the harness was told to apply it"
        if not add_generation_prompt:
            raise ConfigError(
                "--apply-chat-template: a task begins the assistant's answer (gen_prefix), which "
                "is not supported; works: without the flag"
            )
        return self._chat.text(list(chat_history))

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Returns each continuation's log-probability, and whether its tokens are the likeliest."""
        likelihoods: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return likelihoods

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Returns each whole text's log-probability, in windows of the model's context."""
        windows: list[tuple[tuple[str, str], list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            rolled = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._model.context,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolled):
                windows.append((("", ""), context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **unused: object
    ) -> list[tuple[float, bool]]:
        """Returns the scores of continuations; cuts the beginning of too long contexts."""
        rows = [
            tuple((context + continuation)[-(self._model.context + 1) :])
            for _, context, continuation in requests
        ]
        distinct = list(dict.fromkeys(rows))
        scores = dict(
            zip(distinct, self._score([np.array(row, np.int32) for row in distinct]), strict=True)
        )
        likelihoods: list[tuple[float, bool]] = []
        for row, (_, _, continuation) in zip(rows, requests, strict=True):
            last = slice(max(0, len(row) - 1 - len(continuation)), None)
            logprobs, is_likeliest = scores[row].logprobs[last], scores[row].is_likeliest[last]
            likelihoods.append(
                (float(np.sum(logprobs, dtype=np.float64)), bool(is_likeliest.all()))
            )
        return likelihoods

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[str]:
        """Completes each context, up to the request's stop texts."""
        texts = [""] * len(requests)
        by_rules: dict[tuple[SamplingRules, tuple[str, ...]], list[int]] = {}
        for number, request in enumerate(requests):
            by_rules.setdefault(self.rules(request.args[1]), []).append(number)
        for (rules, stops), numbers in by_rules.items():
            contexts = [requests[number].args[0] for number in numbers]
            prompts = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
            for number, text in zip(numbers, self._complete(prompts, rules, stops), strict=True):
                texts[number] = text
        return texts

    def rules(
        self, arguments: Mapping[str, object], task: str = "a task"
    ) -> tuple[SamplingRules, tuple[str, ...]]:
        """Returns a request's sampling rules, and its stop texts.

        Raises:
          ConfigError: the completion may exceed the model's context.
        """
        rules: Mapping[str, Any] = normalize_gen_kwargs(dict(arguments), _MAX_NEW_TOKENS)
        most, context = int(rules["max_gen_toks"]), self._model.context
        if most >= context:
            raise ConfigError(
                f"{task} asks for completions of up to {most} tokens (max_gen_toks), but the "
                f"model reads at most {context} at once; works: max_target_length={2 * most}, or "
                "a smaller max_gen_toks in the task's file"
            )
        temperature = float(rules.get("temperature") or 0.0) if rules["do_sample"] else 0.0
        top_k, top_p = int(rules.get("top_k") or 0), float(rules.get("top_p") or 1.0)
        drawn = SamplingRules(temperature, top_k, top_p, 0, most, self._model.end_ids)
        return drawn, tuple(str(stop) for stop in rules["until"])
