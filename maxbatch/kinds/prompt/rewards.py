"""Rewards: the user's functions, which score responses in worker processes.

A function takes (prompt, response, record), the texts without special tokens and the fields of the
prompt's record, and returns a number. If it raises, crashes, exceeds `reward_timeout_s` or returns
no finite number, this response scores `reward_on_failure` and is counted. Every response is scored
once, unless its worker is killed from outside (SIGKILL by a person, or when memory runs out); then
a new worker scores it again, and the third kill is a failure.

Workers and the trainer have equal shares of the machine's memory; an allocation beyond a worker's
share raises MemoryError in the function.

Limits: a function interrupted by the time limit may leave behind its own child processes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

import numpy as np

from maxbatch.config.sections import RLConfig
from maxbatch.kinds.prompt.reward_functions import ResponseToScore, RewardChanged, scorer
from maxbatch.kinds.prompt.reward_terms import (
    RewardTerm,
    identity_of,
    parse_rewards,
    reward_error,
    sources_of,
)
from maxbatch.run.compile.target import host_memory
from maxbatch.system.errors import ConfigError
from maxbatch.system.processes.worker_pool import TimedOut, WorkerEnded, WorkerPool

_ATTEMPTS = 3  # tries of a response whose worker is killed


class ResponseScores(NamedTuple):
    """The scores of n responses, in the order of the questions; `reward_on_failure` for failed
    ones.
    """

    rewards: np.ndarray  # float32[n], the weighted sum of the functions
    by_name: dict[str, np.ndarray]  # float32[n] of each function
    failed: np.ndarray  # bool[n]: a function raised, crashed or returned no finite number
    timed_out: np.ndarray  # bool[n]: it took more than `reward_timeout_s`; not counted as failed
    problem: str = ""  # the first failure or timeout, in words

    def to_json(self) -> dict[str, object]:
        by_name = {name: values.tolist() for name, values in self.by_name.items()}
        arrays = (self.rewards.tolist(), by_name, self.failed.tolist(), self.timed_out.tolist())
        return dict(zip(self._fields, (*arrays, self.problem), strict=True))

    @classmethod
    def joined(cls, hosts: Sequence[Mapping[str, Any]]) -> ResponseScores:
        """Concatenates the scores of several hosts, given by `to_json`."""

        def column(values: Iterable[Sequence[float]], kind: type) -> np.ndarray:
            return np.array(list(itertools.chain.from_iterable(values)), kind)

        return cls(
            rewards=column((host["rewards"] for host in hosts), np.float32),
            by_name={
                name: column((host["by_name"][name] for host in hosts), np.float32)
                for name in hosts[0]["by_name"]
            },
            failed=column((host["failed"] for host in hosts), bool),
            timed_out=column((host["timed_out"] for host in hosts), bool),
            problem=next((host["problem"] for host in hosts if host["problem"]), ""),
        )


@dataclasses.dataclass(frozen=True)
class Pending:
    """Scores in progress."""

    answers: Sequence[Future[tuple[float, ...]]]  # per response: a number of each term
    terms: Sequence[RewardTerm]
    on_failure: float  # the score of a failed response

    def result(self) -> ResponseScores:
        """Waits for all results and returns the scores.

        Raises:
          RuntimeError: the rewards were closed earlier.
          ConfigError: a worker was replaced, and a function's source has changed since the start.
        """
        values_NxF = np.full((len(self.answers), len(self.terms)), math.nan)
        problems: dict[int, Exception] = {}
        for i, answer in enumerate(self.answers):
            try:
                values_NxF[i] = answer.result()
            except CancelledError:
                raise RuntimeError("no scores: the rewards were closed") from None
            except RewardChanged as error:
                raise ConfigError(f"reward: {error}") from error
            except Exception as error:
                problems[i] = error
        with np.errstate(over="ignore", invalid="ignore"):
            total_N = values_NxF @ np.array([term.weight for term in self.terms])
            columns = np.concatenate([total_N[:, None], values_NxF], axis=1).astype(np.float32)
        is_bad = ~np.isfinite(columns).all(axis=1)
        (bad,) = np.nonzero(is_bad)
        columns[bad] = self.on_failure
        problem = ""
        if len(bad):
            problem = str(
                problems.get(bad[0]) or f"no finite number: {tuple(values_NxF[bad[0]].tolist())}"
            )
        timed_out = np.array(
            [isinstance(problems.get(i), TimedOut) for i in range(len(columns))], bool
        )
        return ResponseScores(
            rewards=columns[:, 0],
            by_name={term.name: columns[:, 1 + i] for i, term in enumerate(self.terms)},
            failed=is_bad & ~timed_out,
            timed_out=timed_out,
            problem=problem,
        )


class Rewards:
    """The reward functions of a config, in `reward_worker_count` processes; a context manager."""

    def __init__(self, config: RLConfig):
        """Starts the processes and waits until each has imported the functions.

        Raises:
          ConfigError: `reward` is malformed, or a function cannot be imported.
        """
        self._terms = parse_rewards(config.reward)
        self._on_failure = float(config.reward_on_failure)
        try:
            self._sources = sources_of(self._terms)
        except (ImportError, ValueError, AttributeError) as error:
            raise reward_error(config.reward, error) from error
        setup = functools.partial(scorer, self._sources)
        workers = config.reward_worker_count
        share = host_memory() // (workers + 1)
        self._pool = WorkerPool(
            setup,
            workers,
            limit_s=float(config.reward_timeout_s),
            memory_bytes=share,
            attempts=_ATTEMPTS,
        )
        try:
            self._pool.wait_for_setup()
        except BaseException as error:
            self.close()
            if isinstance(error, ImportError | WorkerEnded):
                raise reward_error(config.reward, error) from error
            raise

    @property
    def identity(self) -> dict[str, str]:
        """The functions' names, weights and hashes of sources, as all workers have them."""
        return identity_of(self._terms, self._sources)

    def submit(self, questions: Sequence[ResponseToScore]) -> Pending:
        """Queues a batch and returns at once; batches are scored in order."""
        return Pending(self._pool.submit(questions), self._terms, self._on_failure)

    def close(self) -> None:
        """Ends the processes; pending scores never arrive."""
        self._pool.close()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
