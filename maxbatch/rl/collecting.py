"""The pairs of a batch: sampled and scored in chunks of one size, trained on in chunks of another.

While a chunk is scored and trained on, the next one is being sampled.

Shapes: R pairs of a sampled chunk, M pairs of a trained one, L tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from maxbatch.parallel.trees import State
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.rl.learner import Learner
from maxbatch.rl.objective import Pairs, group_advantages
from maxbatch.rl.prompts import Prompt, Prompts
from maxbatch.rl.rewards import Rewards, Scores
from maxbatch.rl.rollout import Roller, SampledPairs, chunks, score
from maxbatch.rl.timeline import Timeline
from maxbatch.runs.metrics_schema import Metric
from maxbatch.sampling.sampler import Responses


class Workshop(NamedTuple):
    """The parts that make the pairs of a run."""

    batch: RLBatch  # numbers of prompts and pairs
    prompts: Prompts  # the stream of prompts
    roller: Roller  # samples responses
    rewards: Rewards  # score them
    learner: Learner  # places chunks on the devices that train
    timeline: Timeline  # notified when the sampling side has work
    takes_turns: bool  # whether sampling must end before other work on its devices begins
    temperature: float  # of the sampling


class CollectedBatch:
    """The pairs of one batch of prompts, from index `first` on: collected for its first update, kept for the others."""

    def __init__(self, workshop: Workshop, first: int, num_pairs: int) -> None:
        self._workshop, self._first = workshop, first
        self._group = workshop.batch.num_generations
        self._num_prompts = num_pairs // self._group
        self._chunks: list[Pairs] = []
        self._scored: list[tuple[SampledPairs, Scores]] = []
        self._reward_wait_s = 0.0

    def chunks(self, params: State) -> Iterator[Pairs]:
        """Yields the chunks to train on, the last padded with rows of no weight; only the first call samples."""
        if self._chunks:
            yield from self._chunks
            return
        for rows in self._rows(self._workshop.roller.take(params)):
            self._chunks.append(self._workshop.learner.place(*rows))
            yield self._chunks[-1]

    def _rows(self, params: State) -> Iterator[tuple[np.ndarray, ...]]:
        size = self._workshop.batch.micro_batch_size
        rows: tuple[np.ndarray, ...] = ()
        for sampled, scores in self._rollouts(params):
            self._scored.append((sampled, scores))
            more = (*sampled[1:5], group_advantages(scores.rewards, self._group))
            rows = tuple(map(np.concatenate, zip(rows, more, strict=True))) if rows else more
            while len(rows[0]) >= size:
                yield tuple(array[:size] for array in rows)
                rows = tuple(array[size:] for array in rows)
        if len(rows[0]):
            yield tuple(_filled(array, size) for array in rows)

    def _rollouts(self, params: State) -> Iterator[tuple[SampledPairs, Scores]]:
        workshop = self._workshop
        under_way: deque[tuple[list[Prompt], Responses]] = deque()
        for start, number in chunks(self._first, self._num_prompts, workshop.batch.rollout_micro_batch_size):
            prompts = workshop.prompts.read(start, number)
            responses = workshop.roller.start(params, prompts, self._group, workshop.temperature)
            workshop.timeline.watch("sampling", responses.lengths_B)
            if workshop.takes_turns:
                jax.block_until_ready(responses)
            under_way.append((prompts, responses))
            if len(under_way) > 1:
                yield self._score(*under_way.popleft())
        while under_way:
            yield self._score(*under_way.popleft())

    def _score(self, prompts: list[Prompt], responses: Responses) -> tuple[SampledPairs, Scores]:
        sampled = self._workshop.roller.read(prompts, self._group, responses)
        asked = time.perf_counter()
        scores = score(self._workshop.rewards, sampled)
        self._reward_wait_s += time.perf_counter() - asked
        return sampled, scores

    @property
    def num_chunks(self) -> int:
        """Chunks that were collected."""
        return len(self._chunks)

    def figures(self) -> dict[str, object]:
        """Returns the figures of the batch's rollouts, by the names of the metrics."""
        scores = [scores for _, scores in self._scored]
        rewards = np.concatenate([s.rewards for s in scores])
        lengths = np.concatenate([sampled.mask_RxL.sum(axis=1) for sampled, _ in self._scored])
        by_name = {name: np.concatenate([s.by_name[name] for s in scores]) for name in scores[0].by_name}
        means = {Metric.REWARD_BY_FUNCTION.of(name): float(one.mean()) for name, one in by_name.items()}
        groups = rewards.reshape(-1, self._group)
        return {
            Metric.REWARD: float(rewards.mean()),
            Metric.REWARD_STD: float(rewards.std()),
            **(means if len(means) > 1 else {}),
            Metric.GROUPS_WITHOUT_SIGNAL: float((groups == groups[:, :1]).all(axis=1).mean()),
            Metric.RESPONSE_LENGTH: float(lengths.mean()),
            Metric.REWARDS_FAILED: sum(s.num_failed for s in scores),
            Metric.REWARDS_TIMED_OUT: sum(s.num_timed_out for s in scores),
            Metric.REWARD_WAIT_S: self._reward_wait_s,
        }

    @property
    def problem(self) -> str:
        """The reason why the first unscored response has no score; "" if all were scored."""
        return next((scores.problem for _, scores in self._scored if scores.problem), "")


def _filled(array: np.ndarray, size: int) -> np.ndarray:
    """Returns rows with zeros after them: no tokens, no weight."""
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])
