"""Batches sampled ahead: batch k by the policy at the beginning of batch k - `off_policy_steps`.

The policy of a batch depends only on the batch's number. On devices of its own, sampling runs in a
thread beside the training of earlier batches; on shared devices it comes first.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from maxbatch.kinds.prompt.collecting import CollectedBatch, Rollouts, Workshop
from maxbatch.parallel.trees import State

_ARRAYS = Rollouts._fields[:-1]
P = ParamSpec("P")
T = TypeVar("T")


class BatchesAhead:
    """The batches of a run in stream order; a context manager.

    Args:
      first: the index of the next prompt.
      num_prompts: returns the number of groups of a batch, by the index of its first prompt.
      is_apart: whether the devices that sample do not train.
      saved: the responses that a checkpoint holds (`saved`), None if there are none.
    """

    def __init__(
        self,
        workshop: Workshop,
        first: int,
        num_prompts: Callable[[int], int],
        is_apart: bool,
        saved: bytes | None,
    ) -> None:
        self._workshop, self._end, self._num_prompts = workshop, first, num_prompts
        self._last: CollectedBatch | None = None  # the batch that is trained on
        self._is_closed = False
        self._pool = (
            ThreadPoolExecutor(1, thread_name_prefix="maxbatch-sampling") if is_apart else None
        )
        # at most `off_policy_steps` between two batches
        self._waiting: deque[Future[CollectedBatch]] = deque()
        # whether the saved responses belong to batches other than the next ones
        self.left_out = False
        for batch in _read(saved) if saved else ():
            if len(self._waiting) < workshop.batch.off_policy_steps:
                self._take_over(batch)

    def _take_over(self, saved: _Saved) -> None:
        """Appends a saved batch, unless the plan has another batch in its place."""
        wanted, rollouts = self._num_prompts(saved.first), saved.read
        if self._workshop.batch.max_prompts_per_batch is None:
            rollouts = rollouts.pairs(slice(wanted * saved.num_generations))
        batch = CollectedBatch(self._workshop, saved.first, wanted, rollouts)
        own_numbers = list(self._workshop.prompts.own_numbers(batch.first, batch.end))
        is_next = saved.first == self._end and saved.own_numbers[: len(own_numbers)] == own_numbers
        if self.left_out or not is_next or not self._fits(saved, batch):
            self.left_out = True
            return
        self._waiting.append(_done(lambda: batch))
        self._end = batch.end

    def _fits(self, saved: _Saved, batch: CollectedBatch) -> bool:
        """Returns whether sampling now would give the saved batch, or the needed part of it."""
        most, length = self._workshop.batch.max_prompts_per_batch, saved.read.tokens_RxL.shape[1]
        if (
            length != self._workshop.length
            or saved.num_generations != self._workshop.batch.num_generations
        ):
            return False
        num_read = batch.end - batch.first
        if most is None:
            return num_read == batch.num_prompts
        is_whole = num_read == most or (num_read < most and not batch.groups_missing)
        return saved.num_prompts == batch.num_prompts and is_whole

    def take(self, update: int, params: State) -> CollectedBatch:
        """Returns the batch of an update; the first update on a batch takes the next one and starts
        sampling others.

        Without `off_policy_steps` the batch samples itself while it is trained on.

        Args:
          update: its number within the batch, from 0.
          params: the parameters before it, on the devices that train.
        """
        if self._last is None or update == 0:
            self._last = self._next(params)
        return self._last

    def _next(self, params: State) -> CollectedBatch:
        steps = self._workshop.batch.off_policy_steps
        if not steps:
            self._end = self._last.end if self._last else self._end
            return CollectedBatch(self._workshop, self._end, self._num_prompts(self._end))
        # The thread runs every program of the devices that sample, so that their order is the same
        # on all hosts.
        take = self._workshop.roller.take
        taken = self._begun(take.receive, take.hand_over(params))
        while len(self._waiting) <= steps:
            self._waiting.append(self._begun(self._sampled, taken))
        return self._waiting.popleft().result()

    def _begun(self, work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> Future[T]:
        """Queues the work on the sampling thread, or runs it now if there is none."""
        return (self._pool.submit if self._pool else _done)(work, *arguments, **keywords)

    def _sampled(self, taken: Future[State]) -> CollectedBatch:
        batch = CollectedBatch(self._workshop, self._end, self._num_prompts(self._end))
        for _ in batch.collecting(taken.result()):
            if self._is_closed:
                raise CancelledError
        self._end = batch.end
        return batch

    def settle(self) -> None:
        """Waits until every batch that was begun is sampled and scored."""
        for batch in self._waiting:
            batch.result()

    def saved(self) -> bytes | None:
        """Returns the responses of batches that are sampled but not yet trained on, as .npz; None
        if there are none.
        """
        if not self._waiting:
            return None
        arrays: dict[str, np.ndarray] = {}
        for number, waiting in enumerate(self._waiting):
            batch = waiting.result()
            place = batch.first, batch.num_prompts, self._workshop.batch.num_generations
            arrays[f"{number} place"] = np.array(place, np.int64)
            own_numbers = self._workshop.prompts.own_numbers(batch.first, batch.end)
            arrays[f"{number} own_numbers"] = np.array(own_numbers, np.int64)
            rollouts = batch.read
            arrays |= {f"{number} {name}": getattr(rollouts, name) for name in _ARRAYS}
            arrays |= {
                f"{number} by_name {name}": array for name, array in rollouts.by_name.items()
            }
        file = io.BytesIO()
        np.savez_compressed(file, allow_pickle=False, **arrays)
        return file.getvalue()

    def __enter__(self) -> BatchesAhead:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and jax.process_count() > 1:
            self.settle()  # a host that stopped earlier would leave another one waiting
        self._is_closed = True
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


class _Saved(NamedTuple):
    """A batch in a checkpoint."""

    first: int  # the index of its first prompt
    num_prompts: int  # the groups to collect
    num_generations: int
    read: Rollouts  # the responses to all prompts that were read
    own_numbers: list[int]  # of these prompts


def _read(saved: bytes) -> list[_Saved]:
    """Returns the batches that `BatchesAhead.saved` returned."""
    batches = []
    with np.load(io.BytesIO(saved), allow_pickle=False) as arrays:
        number = 0
        while f"{number} place" in arrays:
            fields, prefix = [arrays[f"{number} {name}"] for name in _ARRAYS], f"{number} by_name "
            by_name = {
                name.removeprefix(prefix): arrays[name]
                for name in arrays.files
                if name.startswith(prefix)
            }
            first, num_prompts, num_generations = arrays[f"{number} place"].tolist()
            read = Rollouts._make([*fields, by_name])
            if (of_prompts := f"{number} own_numbers") in arrays:
                own_numbers = arrays[of_prompts].tolist()
            else:  # made before streams had holes
                own_numbers = [*range(first, first + len(read.rewards_R) // num_generations)]
            batches.append(_Saved(first, num_prompts, num_generations, read, own_numbers))
            number += 1
    return batches


def _done(work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> Future[T]:
    done: Future[T] = Future()
    done.set_result(work(*arguments, **keywords))
    return done
