"""The pairs of a batch: sampled and scored in chunks of one size, trained on in chunks of another.

While a chunk is scored and trained on, the next one is being sampled.

Shapes: R pairs of a sampled chunk, M pairs of a trained one, L tokens, G responses to a prompt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import jax
import numpy as np

from maxbatch.around.sampling.sampler import Responses
from maxbatch.data.feed.passes import Passes, packed, token_counts
from maxbatch.data.stream.rows import RowArrays
from maxbatch.kinds.prompt.learner import Learner
from maxbatch.kinds.prompt.objective import (
    AdvantageScale,
    Pairs,
    group_advantages,
    pair_rows,
)
from maxbatch.kinds.prompt.prompts import Prompt, Prompts
from maxbatch.kinds.prompt.rewards import Rewards
from maxbatch.kinds.prompt.rollout import Roller, score
from maxbatch.kinds.prompt.timeline import Timeline
from maxbatch.parallel.trees import State
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.run.folder.metrics_schema import Metric


class KeptRollouts(Protocol):
    """Scored responses of batches that were trained on before."""

    def rollouts(self, first: int, workshop: Workshop, params: State) -> Rollouts | None:
        """Returns the responses to all prompts of the batch from prompt `first` on, as read by
        `CollectedBatch`; None if they are not kept.

        Args:
          params: the parameters that sample the batch, on the devices that sample.
        """


class Workshop(NamedTuple):
    """The parts that make the pairs of a run."""

    batch: RLBatch  # the numbers of prompts and pairs
    prompts: Prompts  # the stream of prompts
    roller: Roller  # samples responses
    rewards: Rewards  # score them
    learner: Learner  # places chunks on the devices that train
    timeline: Timeline  # notified when the sampling side has work
    takes_turns: bool  # whether sampling must end before other work on its devices begins
    temperature: float  # of the sampling
    advantage_scale: AdvantageScale
    length: int  # L
    kept: KeptRollouts | None = None  # take the place of sampling and scoring


class Rollouts(NamedTuple):
    """Scored pairs on the host, in stream order; the responses to a prompt are adjacent."""

    tokens_RxL: np.ndarray  # int32: prompt, response, padding
    mask_RxL: np.ndarray  # bool: where the response is
    logprobs_RxL: np.ndarray  # float32, of the response's tokens when they were sampled
    lengths_R: np.ndarray  # int32, tokens of prompt and response
    rewards_R: np.ndarray  # float32
    failed_R: np.ndarray  # bool: a reward function failed
    timed_out_R: np.ndarray  # bool: a reward function timed out
    by_name: dict[str, np.ndarray]  # float32[R], the values of each reward function

    def pairs(self, rows: slice | np.ndarray) -> Rollouts:
        pairs: Rollouts = jax.tree.map(lambda x: x[rows], self)
        return pairs


class TrainedResponse(NamedTuple):
    """One response that is trained on."""

    prompt: str
    prompt_index: int  # in the stream
    response: str
    tokens: list[int]  # ids of the response, with an end token that was drawn
    reward: float
    rewards: dict[str, float]  # by reward function
    advantage: float


class CollectedBatch:
    """The pairs of one batch of prompts, from prompt `first` of the stream on.

    They are collected once, for the batch's first update at the latest, and kept for the others.

    Args:
      first: the index of the first prompt that is read.
      read: the responses to all prompts that the batch reads, if they are sampled already.
    """

    def __init__(
        self, workshop: Workshop, first: int, num_prompts: int, read: Rollouts | None = None
    ) -> None:
        self._workshop, self.first, self.num_prompts = workshop, first, num_prompts
        self._group = workshop.batch.num_generations
        self._read = [read] if read else []
        self._is_whole = read is not None
        # on the devices that train, each with its update's part of the batch
        self._chunks: list[tuple[int, Pairs]] | None = None
        # by the update's part of the batch, once its pairs share rows
        self.passes: dict[int, Passes] = {}
        self._reward_wait_s = 0.0
        self.problem = ""  # the reason why the first unscored response has no score

    def chunks(self, part: int, params: State) -> Iterator[Pairs]:
        """Yields the chunks of an update, the last padded with rows of no weight; the first call
        samples the batch.

        The whole batch is sampled before the iteration ends, so that later parts do not depend on
        earlier updates. A part without a group is one chunk of padding.

        Args:
          part: the update's part of the batch, from 0 to `num_minibatches` - 1.
          params: the parameters on the devices that train.
        """
        learner = self._workshop.learner
        if self._chunks is None:
            self._chunks = []
            for of_part, rows in self._packed_rows(params) if self._packs else self._rows(params):
                self._chunks.append((of_part, learner.place_rows(rows, params)))
                if of_part == part:
                    yield self._chunks[-1][1]
        else:
            yield from (chunk for of_part, chunk in self._chunks if of_part == part)
        if not self.num_pairs(part):
            rows = self._no_pairs()
            rows = packed(rows, self._passes_of(rows)) if self._packs else rows
            yield learner.place_rows(self._filled(rows), params)

    @property
    def _packs(self) -> bool:
        """Whether pairs share rows."""
        return self._workshop.batch.max_tokens_per_pass is not None

    def _packed_rows(self, params: State) -> Iterator[tuple[int, RowArrays]]:
        """Yields the passes of all updates, each with its update's part of the batch, once the
        batch is sampled.
        """
        batch = self._workshop.batch
        pairs = [self._pair_rows(rollouts) for rollouts in self._rollouts(params)]
        rows = {name: np.concatenate([part[name] for part in pairs]) for name in pairs[0]}
        of_update, of_pass = batch.minibatch_size * self._group, batch.micro_batch_size
        for part, first in enumerate(range(0, len(rows["tokens"]), of_update)):
            of_part = {name: array[first : first + of_update] for name, array in rows.items()}
            passes = self.passes[part] = self._passes_of(of_part)
            shared = packed(of_part, passes)
            for row in range(0, passes.num_rows, of_pass):
                of_rows = {name: array[row : row + of_pass] for name, array in shared.items()}
                yield part, self._filled(of_rows)

    def _passes_of(self, rows: RowArrays) -> Passes:
        lengths = token_counts(rows["segments"])
        return Passes.of(lengths, self._workshop.length, self._workshop.batch.micro_batch_size)

    def _rollouts(self, params: State) -> Iterator[Rollouts]:
        """Yields the responses to the prompts of the batch, sampling those that are not yet."""
        if self._is_whole:
            yield from self._read
        else:
            yield from self.collecting(self._workshop.roller.take(params))

    def _pair_rows(self, rollouts: Rollouts) -> RowArrays:
        """Returns the rows of the pairs that are trained on."""
        kept = rollouts.pairs(self._trains_on(rollouts))
        return pair_rows(
            kept.tokens_RxL,
            kept.mask_RxL,
            kept.logprobs_RxL,
            kept.lengths_R,
            self._advantages(kept.rewards_R),
        )

    def _no_pairs(self) -> RowArrays:
        length = self._workshop.length
        tokens, mask, logprobs = (
            np.zeros((0, length), kind) for kind in (np.int32, bool, np.float32)
        )
        return pair_rows(tokens, mask, logprobs, np.zeros(0, np.int32), np.zeros(0, np.float32))

    def _rows(self, params: State) -> Iterator[tuple[int, RowArrays]]:
        """Yields chunks of a row a pair, each with its update's part of the batch."""
        batch, rows, part = self._workshop.batch, self._no_pairs(), 0
        # pairs of the update that are not in a chunk yet
        left = of_update = batch.minibatch_size * self._group
        for rollouts in self._rollouts(params):
            more = self._pair_rows(rollouts)
            rows = {name: np.concatenate([array, more[name]]) for name, array in rows.items()}
            while len(rows["tokens"]) >= (size := min(batch.micro_batch_size, left)):
                yield part, self._filled({name: array[:size] for name, array in rows.items()})
                rows = {name: array[size:] for name, array in rows.items()}
                left -= size
                if not left:
                    part, left = part + 1, of_update
        if len(rows["tokens"]):
            yield part, self._filled(rows)

    def _advantages(self, rewards_R: np.ndarray) -> np.ndarray:
        return group_advantages(rewards_R, self._group, self._workshop.advantage_scale)

    def _filled(self, rows: RowArrays) -> RowArrays:
        """Returns a chunk's rows with zeros after them: no tokens, no weight."""
        size = self._workshop.batch.micro_batch_size
        missing = size - len(rows["tokens"])
        return {
            name: np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
            for name, array in rows.items()
        }

    def _trains_on(self, rollouts: Rollouts) -> np.ndarray:
        """Returns bool[R]: the pairs that are trained on; with `filter_groups`, of groups whose
        rewards differ.
        """
        if self._workshop.batch.max_prompts_per_batch is None:
            return np.ones(len(rollouts.rewards_R), bool)
        return np.repeat(_differs(rollouts.rewards_R, self._group), self._group)

    def collecting(self, params: State) -> Iterator[Rollouts]:
        """Yields the responses to the prompts that the batch reads, chunk by chunk, as they are
        sampled and scored.

        A chunk may hold prompts beyond the last one that the batch needs; these stay for the next
        batch.

        Args:
          params: the parameters on the devices that sample.
        """
        workshop, group = self._workshop, self._group
        recorded = workshop.kept and workshop.kept.rollouts(self.first, workshop, params)
        if recorded:
            self._read.append(recorded)
            self._is_whole = True
            yield recorded
            return
        missing, begin = self.num_prompts, self.first
        limit = begin + (workshop.batch.max_prompts_per_batch or missing)
        under_way: deque[tuple[list[Prompt], Responses]] = deque()
        while missing:
            while (
                begin < limit
                and len(under_way) < 2
                and sum(len(prompts) for prompts, _ in under_way) < missing
            ):
                number = min(workshop.batch.rollout_micro_batch_size, limit - begin)
                under_way.append(self._start(params, workshop.prompts.read(begin, number)))
                begin += number
            if not under_way:
                break
            rollouts = self._score(*under_way.popleft())
            (kept,) = np.nonzero(self._trains_on(rollouts)[::group])
            if len(kept) >= missing:
                rollouts = rollouts.pairs(slice((kept[missing - 1] + 1) * group))
            missing -= min(missing, len(kept))
            self._read.append(rollouts)
            self._is_whole = not missing or (begin == limit and not under_way)
            yield rollouts

    def _start(self, params: State, prompts: list[Prompt]) -> tuple[list[Prompt], Responses]:
        workshop = self._workshop
        responses = workshop.roller.start(params, prompts, self._group, workshop.temperature)
        workshop.timeline.watch("sampling", responses.lengths_B)
        if workshop.takes_turns:
            jax.block_until_ready(responses)
        return prompts, responses

    def _score(self, prompts: list[Prompt], responses: Responses) -> Rollouts:
        sampled = self._workshop.roller.read(prompts, self._group, responses)
        asked = time.perf_counter()
        scores = score(self._workshop.rewards, sampled)
        self._reward_wait_s += time.perf_counter() - asked
        self.problem = self.problem or scores.problem
        return Rollouts(
            *sampled[1:5], scores.rewards, scores.failed, scores.timed_out, scores.by_name
        )

    @property
    def read(self) -> Rollouts:
        """The responses to all prompts that were read, once the batch is sampled."""
        read: Rollouts = jax.tree.map(lambda *arrays: np.concatenate(arrays), *self._read)
        return read

    @property
    def end(self) -> int:
        """The index after the last prompt that was read, once the batch is sampled."""
        return self.first + sum(len(rollouts.rewards_R) for rollouts in self._read) // self._group

    @property
    def num_groups(self) -> int:
        """Groups that are trained on, once the batch is sampled."""
        return sum(int(self._trains_on(rollouts).sum()) for rollouts in self._read) // self._group

    @property
    def groups_missing(self) -> int:
        """Groups that are missing after `max_prompts_per_batch` prompts."""
        return self.num_prompts - self.num_groups

    def num_pairs(self, part: int) -> int:
        """Returns the pairs of an update, by its part of the batch."""
        size = self._workshop.batch.minibatch_size
        return max(0, min(size, self.num_groups - part * size)) * self._group

    def responses(self) -> Iterator[TrainedResponse]:
        """Yields the responses that are trained on, in stream order, once the batch is sampled."""
        workshop, group = self._workshop, self._group
        read, prompts = self.read, workshop.prompts.read(self.first, self.end - self.first)
        (rows,) = np.nonzero(self._trains_on(read))
        kept = read.pairs(rows)
        advantages_R = self._advantages(kept.rewards_R)
        for number, row in enumerate(rows.tolist()):
            prompt = prompts[row // group]
            tokens = kept.tokens_RxL[number, kept.mask_RxL[number]]
            yield TrainedResponse(
                prompt=prompt.text,
                prompt_index=prompt.index,
                response=workshop.roller.text(tokens),
                tokens=tokens.tolist(),
                reward=float(kept.rewards_R[number]),
                rewards={name: float(values[number]) for name, values in kept.by_name.items()},
                advantage=float(advantages_R[number]),
            )

    def figures(self) -> dict[str, object]:
        """Returns the figures of all responses that the batch has read, by the names of the
        metrics.
        """
        read = self.read
        rewards = read.rewards_R
        means = {
            Metric.REWARD_BY_FUNCTION.of(name): float(values.mean())
            for name, values in read.by_name.items()
        }
        filtered = self._workshop.batch.max_prompts_per_batch is not None
        return {
            Metric.REWARD: float(rewards.mean()),
            Metric.REWARD_STD: float(rewards.std()),
            **(means if len(means) > 1 else {}),
            Metric.GROUPS_WITHOUT_SIGNAL: float(1 - _differs(rewards, self._group).mean()),
            **({Metric.GROUPS_MISSING: self.groups_missing} if filtered else {}),
            Metric.RESPONSE_LENGTH: float(read.mask_RxL.sum(axis=1).mean()),
            Metric.REWARDS_FAILED: int(read.failed_R.sum()),
            Metric.REWARDS_TIMED_OUT: int(read.timed_out_R.sum()),
            Metric.REWARD_WAIT_S: self._reward_wait_s,
        }


def _differs(rewards_R: np.ndarray, group: int) -> np.ndarray:
    """Returns bool[P]: the groups whose responses do not all have one reward."""
    groups_PxG = rewards_R.reshape(-1, group)
    differs: np.ndarray = (groups_PxG != groups_PxG[:, :1]).any(axis=1)
    return differs
