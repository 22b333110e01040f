"""The pairs of a batch: sampled and scored a chunk at a time, handed on in the chunks that are trained on.

While a chunk is scored, and trained on by whoever takes it, the next one is being sampled.

Shapes: R pairs of a sampled chunk, M pairs of a trained one, L tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from maxbatch.rl.objective import Pairs, group_advantages
from maxbatch.rl.prompts import Prompt
from maxbatch.rl.rewards import Rewards, Scores
from maxbatch.rl.rollout import Drawn, ask, chunks
from maxbatch.rl.run import PolicyRun
from maxbatch.rl.timeline import Timeline
from maxbatch.sampling.sampler import Responses


class Collector:
    """Collects the pairs of one batch.

    Args:
      run: the run.
      rewards: score the responses.
      timeline: told when the sampling side has work.
      params: the parameters to draw from, on the devices that sample.
    """

    def __init__(self, run: PolicyRun, rewards: Rewards, timeline: Timeline, params: nnx.State) -> None:
        self._run, self._rewards, self._timeline, self._params = run, rewards, timeline, params
        self._group = run.batch.num_generations
        self._scored: list[tuple[Drawn, Scores]] = []
        self._reward_wait_s = 0.0

    def pairs(self, first: int, num_prompts: int) -> Iterator[Pairs]:
        """Yield the chunks to train on, of the prompts from `first` on; the last is filled with rows of no weight."""
        size = self._run.batch.micro_batch_size
        rows: tuple[np.ndarray, ...] = ()
        for drawn, scores in self._rollouts(first, num_prompts):
            self._scored.append((drawn, scores))
            advantages_R = group_advantages(scores.rewards, self._group)
            more = (drawn.tokens_RxL, drawn.mask_RxL, drawn.logprobs_RxL, drawn.lengths_R, advantages_R)
            rows = tuple(map(np.concatenate, zip(rows, more, strict=True))) if rows else more
            while len(rows[0]) >= size:
                yield self._run.learner.place(*(array[:size] for array in rows))
                rows = tuple(array[size:] for array in rows)
        if len(rows[0]):
            yield self._run.learner.place(*(_filled(array, size) for array in rows))

    def _rollouts(self, first: int, num_prompts: int) -> Iterator[tuple[Drawn, Scores]]:
        under_way: deque[tuple[list[Prompt], Responses]] = deque()
        for start, number in chunks(first, num_prompts, self._run.batch.rollout_micro_batch_size):
            prompts = self._run.prompts.read(start, number)
            temperature = self._run.config.decode_sampling_temperature
            responses = self._run.roller.start(self._params, prompts, self._group, temperature)
            self._timeline.watch("sampling", responses.lengths_B)
            if self._run.one_at_a_time:
                jax.block_until_ready(responses)
            under_way.append((prompts, responses))
            if len(under_way) > 1:
                yield self._scored_of(*under_way.popleft())
        while under_way:
            yield self._scored_of(*under_way.popleft())

    def _scored_of(self, prompts: list[Prompt], responses: Responses) -> tuple[Drawn, Scores]:
        drawn = self._run.roller.read(prompts, self._group, responses)
        asked = time.perf_counter()
        scores = ask(self._rewards, drawn).result()
        self._reward_wait_s += time.perf_counter() - asked
        return drawn, scores

    def figures(self) -> dict[str, Any]:
        """What the rollouts of the batch were like, by the names of the metrics."""
        scores = [scores for _, scores in self._scored]
        rewards = np.concatenate([s.rewards for s in scores])
        lengths = np.concatenate([drawn.mask_RxL.sum(axis=1) for drawn, _ in self._scored])
        by_name = {
            f"reward/{name}": float(np.concatenate([s.by_name[name] for s in scores]).mean())
            for name in scores[0].by_name
        }
        groups = rewards.reshape(-1, self._group)
        return {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            **(by_name if len(by_name) > 1 else {}),
            "groups_without_signal": float((groups == groups[:, :1]).all(axis=1).mean()),
            "response_length": float(lengths.mean()),
            "rewards_failed": sum(s.num_failed for s in scores),
            "rewards_timed_out": sum(s.num_timed_out for s in scores),
            "reward_wait_s": self._reward_wait_s,
        }

    @property
    def problem(self) -> str:
        """What happened to the first response that could not be scored; "" where all were."""
        return next((scores.problem for _, scores in self._scored if scores.problem), "")


def _filled(array: np.ndarray, size: int) -> np.ndarray:
    """Return rows with zeros after them: no tokens, no weight."""
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])
