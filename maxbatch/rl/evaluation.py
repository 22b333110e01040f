"""How good the policy is: pass@1, greedy and sampled, and pass@k on the held-out prompts.

A response passes where the first of its rewards is at least one half. Sampled responses are drawn as rollouts are;
pass@1 is their mean, and pass@k the share of prompts of which one of the k = `eval_num_generations` responses passes
(Chen et al. 2021, https://arxiv.org/abs/2107.03374, of as many samples as k).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from maxbatch.rl.prompts import Prompt, Prompts
from maxbatch.rl.rewards import Rewards
from maxbatch.rl.rollout import Roller, ask, chunks

PASSES = 0.5
_MOST_TRANSCRIPTS = 8
_FIRST_GENERATION = 2**31  # of an eval, which draws nothing that a rollout draws


class Evaluation(NamedTuple):
    """What an eval found.

    Attributes:
      figures: by the names that they have in metrics.
      transcripts: of the first prompts: prompt, response, reward, greedy.
    """

    figures: dict[str, float]
    transcripts: list[dict[str, Any]]


class PolicyEvaluator:
    """Samples from the held-out prompts and scores the responses.

    Args:
      config: `eval_num_generations`, `decode_sampling_temperature`.
      prompts: the held-out part.
      num_prompts: how many of them.
      roller: samples `num_pairs` responses at once.
      num_pairs: the eval's own batch, in pairs.
      rewards: score them.
    """

    def __init__(
        self,
        config: ConfigDict,
        prompts: Prompts,
        num_prompts: int,
        roller: Roller,
        num_pairs: int,
        rewards: Rewards,
    ) -> None:
        self._config, self._roller, self._rewards = config, roller, rewards
        self._num_pairs = num_pairs
        self._prompts = prompts.read(0, num_prompts)

    def __call__(self, params: nnx.State) -> Evaluation:
        """Evaluate parameters that lie on the sampling devices."""
        sampled_times = self._config.eval_num_generations
        greedy_PxG, greedy_texts = self._passes(params, 1, 0.0)
        sampled_PxG, sampled_texts = self._passes(
            params, sampled_times, self._config.decode_sampling_temperature
        )
        figures = {
            "eval_greedy_pass_at_1": float(greedy_PxG.mean()),
            "eval_pass_at_1": float(sampled_PxG.mean()),
            f"eval_pass_at_{sampled_times}": float(sampled_PxG.any(axis=1).mean()),
        }
        transcripts = [
            {
                "prompt": prompt.text,
                "response": texts[i * group],
                "greedy": is_greedy,
                "passes": bool(passes[i, 0]),
            }
            for i, prompt in enumerate(self._prompts[:_MOST_TRANSCRIPTS])
            for is_greedy, group, texts, passes in (
                (True, 1, greedy_texts, greedy_PxG),
                (False, sampled_times, sampled_texts, sampled_PxG),
            )
        ]
        return Evaluation(figures, transcripts)

    def _passes(self, params: nnx.State, group: int, temperature: float) -> tuple[np.ndarray, list[str]]:
        """Return bool[prompts, group], and the texts of the responses in order."""
        group_at_once = min(group, self._num_pairs)
        at_once = self._num_pairs // group_at_once
        passes: list[np.ndarray] = []
        texts: list[str] = []
        for first, count in chunks(0, len(self._prompts), at_once):
            prompts = self._prompts[first : first + count]
            columns = [
                self._draw(params, prompts, number, temperature, start)
                for start, number in chunks(0, group, group_at_once)
            ]
            passes.append(np.concatenate([column for column, _ in columns], axis=1))
            texts += [
                text
                for i in range(count)
                for column, drawn in columns
                for text in drawn[i * column.shape[1] : (i + 1) * column.shape[1]]
            ]
        return np.concatenate(passes), texts

    def _draw(
        self, params: nnx.State, prompts: Sequence[Prompt], number: int, temperature: float, start: int
    ) -> tuple[np.ndarray, Sequence[str]]:
        responses = self._roller.start(params, prompts, number, temperature, _FIRST_GENERATION + start)
        drawn = self._roller.read(prompts, number, responses)
        scores = ask(self._rewards, drawn).result()
        first_reward = next(iter(scores.by_name.values()))
        return first_reward.reshape(len(prompts), number) >= PASSES, drawn.texts
