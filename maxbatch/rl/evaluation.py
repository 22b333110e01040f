"""The quality of a policy: pass@1, greedy and sampled, and pass@k on the held-out prompts.

A response passes if the first of its rewards is at least one half. Sampled responses are drawn as rollouts are;
pass@1 is their mean, and pass@k the share of prompts of which one of the k = `eval_num_generations` responses passes
(Chen et al. 2021, https://arxiv.org/abs/2107.03374, of as many samples as k).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxbatch.plan.batch import BatchPlan
from maxbatch.rl.prompts import Prompt, Prompts, PromptSource
from maxbatch.rl.rewards import Rewards
from maxbatch.rl.rollout import Roller, ask, chunks
from maxbatch.runs.metrics import StepLog
from maxbatch.runs.metrics_schema import Metric
from maxbatch.runs.run_folder import RunFolder
from maxbatch.training.board import Board

PASSES = 0.5
_MOST_TRANSCRIPTS = 8
_FIRST_GENERATION = 2**31  # of an eval, which draws nothing that a rollout draws


class Transcript(NamedTuple):
    """One response of an eval."""

    prompt: str
    response: str
    greedy: bool
    passes: bool


class Evaluation(NamedTuple):
    """What an eval found.

    Attributes:
      figures: by the names of the metrics.
      transcripts: of the first prompts.
    """

    figures: dict[str, float]
    transcripts: list[Transcript]


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
        """Evaluates parameters that lie on the sampling devices."""
        sampled_times = self._config.eval_num_generations
        greedy_PxG, greedy_texts = self._passes(params, 1, 0.0)
        sampled_PxG, sampled_texts = self._passes(
            params, sampled_times, self._config.decode_sampling_temperature
        )
        figures = {
            Metric.EVAL_GREEDY_PASS_AT_1: float(greedy_PxG.mean()),
            Metric.EVAL_PASS_AT_1: float(sampled_PxG.mean()),
            Metric.EVAL_PASS_AT_K.of(sampled_times): float(sampled_PxG.any(axis=1).mean()),
        }
        transcripts = [
            Transcript(prompt.text, texts[i * group], is_greedy, bool(passes[i, 0]))
            for i, prompt in enumerate(self._prompts[:_MOST_TRANSCRIPTS])
            for is_greedy, group, texts, passes in (
                (True, 1, greedy_texts, greedy_PxG),
                (False, sampled_times, sampled_texts, sampled_PxG),
            )
        ]
        return Evaluation(figures, transcripts)

    def _passes(self, params: nnx.State, group: int, temperature: float) -> tuple[np.ndarray, list[str]]:
        """Returns bool[prompts, group], and the texts of the responses in order."""
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


def open_evaluator(
    config: ConfigDict, source: PromptSource, plan: BatchPlan, mesh: Mesh, rewards: Rewards
) -> PolicyEvaluator | None:
    """Returns the evaluator of a run on the mesh that samples; None if no eval is wanted or nothing is held out."""
    held_out = source.held_out() if config.eval_interval > 0 else None
    if held_out is None:
        return None
    assert plan.rl is not None, "the config states a batch of prompts"
    num_pairs, num_prompts = plan.eval_batch_size, held_out.num_prompts
    if config.eval_steps != -1:
        # The chunks of an update, which eval takes over if its batch is not stated, do not change the prompts.
        is_stated = config.eval_per_device_batch_size is not None
        batch = num_pairs if is_stated else plan.rl.effective_batch_size
        num_prompts = min(num_prompts, config.eval_steps * batch)
    roller = Roller(config, held_out.tokenizer, mesh, num_pairs)
    return PolicyEvaluator(config, held_out, num_prompts, roller, num_pairs, rewards)


class Transcripts:
    """Some responses of the evals: a line of `transcripts.jsonl` each, and a text in TensorBoard.

    Args:
      folder: the run's folder.
      board: TensorBoard.
      step: updates done at the start; transcripts of later ones, which will be redone, are dropped.
    """

    def __init__(self, folder: RunFolder, board: Board | None, step: int) -> None:
        self._log, self._board = StepLog(folder, "transcripts.jsonl", step), board

    def write(self, step: int, evaluation: Evaluation) -> None:
        """Adds those of an eval after `step` updates."""
        transcripts = [transcript._asdict() for transcript in evaluation.transcripts]
        self._log.append({"step": step, "transcripts": transcripts})
        lines = [
            f"    {'right' if t.passes else 'wrong'} {'greedy ' if t.greedy else 'sampled'} {t.prompt}{t.response}"
            for t in evaluation.transcripts
        ]
        if self._board:
            self._board.text(step, "transcripts", "\n".join(lines))

    def close(self) -> None:
        """Closes the file."""
        self._log.close()
