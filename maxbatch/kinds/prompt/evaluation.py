"""The quality of a policy: pass@1, greedy and sampled, and pass@k on the held-out prompts.

A response passes if its first reward is at least one half. Responses are sampled as in rollouts;
pass@1 is their mean, and pass@k the share of prompts with a passing response among k =
`eval_num_generations` (Chen et al. 2021, https://arxiv.org/abs/2107.03374, with k samples).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from maxbatch.config.combined import RolloutConfig
from maxbatch.config.sections import EvaluationConfig, RLConfig
from maxbatch.kinds.prompt.prompts import Prompt, Prompts
from maxbatch.kinds.prompt.rewards import Rewards
from maxbatch.kinds.prompt.rollout import Roller, chunks, score
from maxbatch.parallel.trees import State
from maxbatch.plan.batch import BatchPlan
from maxbatch.run.folder.metrics_schema import Metric

PASSES = 0.5
_MOST_TRANSCRIPTS = 8
_FIRST_GENERATION = 2**31  # of an eval; different from all draws of rollouts


class Transcript(NamedTuple):
    """One response of an eval."""

    prompt: str
    response: str
    greedy: bool
    passes: bool


class Evaluation(NamedTuple):
    """The result of an eval."""

    figures: dict[str, float]  # by metric
    transcripts: list[Transcript]  # of the first prompts


class PolicyEvaluator:
    """An eval that samples responses to held-out prompts, `num_pairs` at once, and scores them."""

    def __init__(
        self,
        config: RLConfig,
        prompts: Sequence[Prompt],
        roller: Roller,
        num_pairs: int,
        rewards: Rewards,
    ) -> None:
        self._config, self._prompts, self._roller = config, prompts, roller
        self._num_pairs, self._rewards = num_pairs, rewards

    def __call__(self, params: State) -> Evaluation:
        """Evaluates parameters on the sampling devices."""
        config, k = self._config, self._config.eval_num_generations
        greedy_Px1, _, greedy_texts = self._answers(params, 1, 0.0)
        sampled_PxG, rewards_PxG, sampled_texts = self._answers(
            params, k, config.decode_sampling_temperature
        )
        figures = {
            Metric.EVAL_GREEDY_PASS_AT_1: float(greedy_Px1.mean()),
            Metric.EVAL_PASS_AT_1: float(sampled_PxG.mean()),
            Metric.EVAL_REWARD: float(rewards_PxG.mean()),
            Metric.EVAL_PASS_AT_K.of(k): float(sampled_PxG.any(axis=1).mean()),
        }
        transcripts = [
            Transcript(prompt.text, texts[i], is_greedy, bool(passes[i, 0]))
            for i, prompt in enumerate(self._prompts[:_MOST_TRANSCRIPTS])
            for is_greedy, texts, passes in (
                (True, greedy_texts, greedy_Px1),
                (False, sampled_texts, sampled_PxG),
            )
        ]
        return Evaluation(figures, transcripts)

    def _answers(
        self, params: State, group: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Returns passes and rewards of responses, [prompts, group], and each prompt's first
        text.
        """
        group_at_once = min(group, self._num_pairs)
        passes: list[np.ndarray] = []
        rewards: list[np.ndarray] = []
        texts: list[str] = []
        for first, count in chunks(0, len(self._prompts), self._num_pairs // group_at_once):
            prompts = self._prompts[first : first + count]
            of_passes, of_rewards = [], []
            for start, number in chunks(0, group, group_at_once):
                generation = _FIRST_GENERATION + start
                responses = self._roller.start(params, prompts, number, temperature, generation)
                drawn = self._roller.read(prompts, number, responses)
                scores = score(self._rewards, drawn)
                of_passes.append(
                    next(iter(scores.by_name.values())).reshape(count, number) >= PASSES
                )
                of_rewards.append(scores.rewards.reshape(count, number))
                texts += drawn.texts[::number] if start == 0 else ()
            passes.append(np.concatenate(of_passes, axis=1))
            rewards.append(np.concatenate(of_rewards, axis=1))
        return np.concatenate(passes), np.concatenate(rewards), texts


def open_evaluator(
    config: EvaluationConfig,
    rollout: RolloutConfig,
    held_out: Prompts,
    plan: BatchPlan,
    mesh: Mesh,
    rewards: Rewards,
) -> PolicyEvaluator:
    """Returns the evaluator of a run on the sampling mesh."""
    assert plan.rl is not None, "the config states a batch of prompts"
    num_pairs, num_prompts = plan.eval_batch_size, held_out.num_prompts
    if config.eval_steps != -1:
        # An eval without its own batch size uses the update's chunks, which do not affect the
        # prompts.
        is_stated = bool(config.eval_per_device_batch_size)
        batch = num_pairs if is_stated else plan.rl.effective_batch_size
        num_prompts = min(num_prompts, config.eval_steps * batch)
    num_prompts = min(num_prompts, config.eval_samples or num_prompts)
    roller = Roller(rollout, held_out.tokenizer, mesh, num_pairs, end_ids=held_out.end_ids)
    return PolicyEvaluator(rollout.rl, held_out.read(0, num_prompts), roller, num_pairs, rewards)
