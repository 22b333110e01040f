"""Completions in place of samples, for `maxbatch rl`.

Shapes: Q prompts, B rows, G completions of a prompt, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxbatch.around.sampling.sampler import PromptRows, Responses, Sampler, SamplingRules
from maxbatch.model.loss import token_logprobs
from maxbatch.parallel.trees import State

Completions = Sequence[Sequence[Sequence[int]]]  # token ids, by prompt and number


def sampler_of(completions: Completions) -> type[Sampler]:
    """Returns a class of samplers whose responses are these completions, by the prompt's index in
    the stream and the response's number, with their log-probabilities under the policy.
    """

    class Given(Sampler):
        """A sampler that draws nothing."""

        def __call__(self, params: State, prompts: PromptRows, rules: SamplingRules) -> Responses:
            draws_Bx3, prompts_Q = np.asarray(prompts.draw_ids_Bx3), np.asarray(prompts.lengths_Q)
            rows, group = len(draws_Bx3), len(draws_Bx3) // len(prompts_Q)
            tokens_BxL = np.full((rows, self._program.length), self._program.pad_id, np.int32)
            starts_B, lengths_B = np.repeat(prompts_Q, group), np.zeros(rows, np.int32)
            for row, (index, _, number) in enumerate(draws_Bx3):
                start, completion = starts_B[row], completions[index][number]
                lengths_B[row] = start + len(completion)
                tokens_BxL[row, :start] = prompts.tokens_QxP[row // group, :start]
                tokens_BxL[row, start : lengths_B[row]] = completion
            slots_L = np.arange(self._program.length)
            segments_BxL = (slots_L < lengths_B[:, None]).astype(np.int32)
            is_response_BxL = (slots_L >= starts_B[:, None]) & (segments_BxL > 0)
            decoder = nnx.merge(self._program.graphdef, params)
            scores = token_logprobs(decoder, jnp.asarray(tokens_BxL), jnp.asarray(segments_BxL))
            return Responses(
                jnp.asarray(tokens_BxL),
                jnp.asarray(starts_B),
                jnp.asarray(lengths_B),
                jnp.where(is_response_BxL, scores.logprobs_MxL, 0.0),
            )

    return Given
