"""Completions of many prompts, each independent of the others.

Shapes: B rows, P slots of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from maxbatch.around.sampling.sampler import Sampler, Samplers, SamplingRules
from maxbatch.config.combined import DecoderConfig
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.parallel.trees import State

_PIECE_TOKENS = 16  # between looks for stops
_SLOTS_AT_ONCE = 8192  # of a batch shard, prompts and completions


class Completer:
    """A model that completes prompts.

    A row's shapes follow from its own prompt and rules, and its draws from its place in the list of
    prompts. So the number of rows in one pass does not matter.

    Args:
      params: parameters of a `Decoder`, on the mesh; the config and the tokenizer are their run's.
        They may be replaced by parameters of the same shapes.
      context: the most tokens of a prompt and its completion.
      most_rows: rows in one pass; None: by their length.
    """

    def __init__(
        self,
        params: State,
        tokenizer: Tokenizer,
        config: DecoderConfig,
        mesh: Mesh,
        context: int,
        most_rows: int | None = None,
    ) -> None:
        self.params, self._tokenizer, self._mesh = params, tokenizer, mesh
        self._context, self._most_rows = context, most_rows
        self._samplers = Samplers(config, tokenizer, mesh, context)

    def __call__(
        self, prompts: Sequence[Sequence[int]], rules: SamplingRules, stops: Sequence[str]
    ) -> list[str]:
        """Returns the completion of each prompt, up to and without its end or a stop.

        Args:
          prompts: ids, at least one; a prompt that leaves no room for `rules.max_new_tokens` loses
            its beginning.
          rules: how tokens are drawn; `max_new_tokens` must be less than the context.
          stops: texts that end a completion.

        Raises:
          TrainingError: a token has no finite log-probability.
        """
        most = rules.max_new_tokens
        assert most is not None and most < self._context, "the context has room for a prompt"
        room = self._context - most
        completions = [""] * len(prompts)
        by_slots: dict[tuple[int, int], list[int]] = {}
        for number, prompt in enumerate(prompts):
            by_slots.setdefault(self._samplers.slots(min(len(prompt), room), most), []).append(
                number
            )
        for slots, numbers in by_slots.items():
            at_once = self._most_rows or max(1, self._mesh.size * _SLOTS_AT_ONCE // slots[0])
            rows = self._most_rows or min(at_once, len(numbers))
            for begin in range(0, len(numbers), at_once):
                some = numbers[begin : begin + at_once]
                kept = [list(prompts[number])[-room:] for number in some]
                texts = self._batch(self._samplers.of(slots), kept, some, rows, rules, stops)
                for number, text in zip(some, texts, strict=True):
                    completions[number] = text
        return completions

    def _batch(
        self,
        sampler: Sampler,
        prompts: Sequence[Sequence[int]],
        draws: Sequence[int],
        rows: int,
        rules: SamplingRules,
        stops: Sequence[str],
    ) -> list[str]:
        """Returns the completions of one pass of `rows` rows; rows without a prompt end at once."""
        missing = rows - len(prompts)
        filled = sampler.rows(
            [*prompts, *[[self._tokenizer.pad_id]] * missing],
            [(d, 0, 0) for d in [*draws, *[0] * missing]],
        )
        ends = {self._tokenizer.eos_id, *rules.end_ids}

        def text(ids: Sequence[int]) -> str:
            return self._tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids)

        def is_enough(row: int, ids: Sequence[int]) -> bool:
            return row >= len(prompts) or _before(text(ids), stops) is not None

        *_, tokens = sampler.growing(self.params, filled, rules, _PIECE_TOKENS, is_enough)
        texts = map(text, tokens[: len(prompts)])
        return [whole if (part := _before(whole, stops)) is None else part for whole in texts]


def _before(text: str, stops: Sequence[str]) -> str | None:
    """Returns the text before its first stop; None if it has no stop."""
    places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else None
