"""Rewards: functions of the user's own that score responses, in processes of their own.

A function takes (prompt, response, record), the texts without special tokens and the fields of the prompt's record,
and returns a number. What it does wrong is its own: an exception, a crash, a value that is no finite number or more
than `reward_timeout_s` fail this one response, which then scores `reward_on_failure`, and are counted; all others are
scored as ever, each once.

Limits: a function that a time limit interrupts may leave processes behind that it has started itself.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from maxbatch.config.values import shown
from maxbatch.rl.reward_process import Ended, RewardProcess, TimedOut
from maxbatch.rl.reward_worker import Answer, Request
from maxbatch.system.errors import ConfigError


class Question(NamedTuple):
    """One response to score.

    Attributes:
      prompt, response: texts, without special tokens.
      record: the fields of the prompt's record.
    """

    prompt: str
    response: str
    record: dict[str, Any]


class Scores(NamedTuple):
    """What n responses scored, in the order of the questions.

    Attributes:
      rewards: float32[n], the weighted sum of the functions.
      by_name: float32[n] of each function. A response that failed scores `reward_on_failure` here and in `rewards`.
      num_failed: responses on which a function raised, crashed or returned no finite number.
      num_timed_out: responses that took more than `reward_timeout_s`; they are not among the failed.
      problem: of the first response that failed or timed out: what happened; "" where there is none.
    """

    rewards: np.ndarray
    by_name: dict[str, np.ndarray]
    num_failed: int
    num_timed_out: int
    problem: str = ""


class RewardTerm(NamedTuple):
    """One function of the key `reward`: what names it there, what it is called in metrics, and its weight."""

    spec: str
    name: str
    weight: float


def parse_rewards(text: str) -> list[RewardTerm]:
    """Reads the key `reward`: "module:function", "FILE.py:function", or several, "a:f,0.7;b:g,0.3".

    Weights are used as they are; without one it is 1. A function is called by its name, by all of its term where two
    have one name.

    Raises:
      ConfigError: not of this form, or the same function twice.
    """
    works = "works: reward=maxbatch.rl.arithmetic:is_right"
    specs: list[str] = []
    weights: list[float] = []
    for item in text.split(";"):
        spec, comma, weight = (part.strip() for part in item.rpartition(","))
        if not comma:
            spec, weight = weight, "1"
        place, _, name = spec.rpartition(":")
        if not place or not name.isidentifier():
            raise ConfigError(
                f"reward={shown(repr(text))}: {shown(item)!r} is not module:function or FILE.py:function; {works}"
            )
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(
                f"reward={shown(repr(text))}: the weight {shown(weight)!r} is no finite number; works: {spec},1"
            )
        if spec in specs:
            raise ConfigError(
                f"reward={shown(repr(text))}: {spec} stands there twice; give it once, with one weight"
            )
        specs.append(spec)
        weights.append(number)
    names = [spec.rpartition(":")[2] for spec in specs]
    return [
        RewardTerm(spec, name if names.count(name) == 1 else spec, weight)
        for spec, name, weight in zip(specs, names, weights, strict=True)
    ]


class Pending:
    """Scores that are on their way."""

    def __init__(self, questions: Sequence[Question], terms: Sequence[RewardTerm], on_failure: float):
        """Takes what is asked, of which functions, and what a failure scores."""
        self._questions = questions
        self._terms = terms
        self._on_failure = on_failure
        self._answers: list[Answer | None] = [None] * len(questions)
        self._timed_out = np.zeros(len(questions), bool)
        self._left = len(questions)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        if not questions:
            self._done.set()

    def result(self) -> Scores:
        """Waits for all answers and returns the scores.

        Raises:
          RuntimeError: the rewards were closed before.
        """
        self._done.wait()
        if self._error is not None:
            raise RuntimeError("no scores: the reward processes were given up") from self._error
        answers = [answer for answer in self._answers if answer is not None]
        failure = (math.nan,) * len(self._terms)
        values_NxF = np.array([failure if values is None else values for values, _ in answers], np.float64)
        values_NxF = values_NxF.reshape(len(answers), len(self._terms))
        with np.errstate(over="ignore", invalid="ignore"):
            total_N = values_NxF @ np.array([term.weight for term in self._terms])
            columns = np.concatenate([total_N[:, None], values_NxF], axis=1).astype(np.float32)
        bad_N = ~np.isfinite(columns).all(axis=1)
        columns[bad_N] = self._on_failure
        first = int(np.argmax(bad_N)) if bad_N.any() else None
        return Scores(
            rewards=columns[:, 0],
            by_name={term.name: columns[:, 1 + i] for i, term in enumerate(self._terms)},
            num_failed=int((bad_N & ~self._timed_out).sum()),
            num_timed_out=int(self._timed_out.sum()),
            problem="" if first is None else answers[first][1] or f"no finite number: {answers[first][0]}",
        )

    def put(self, number: int, answer: Answer, timed_out: bool = False) -> None:
        """Takes the answer to question `number`."""
        with self._lock:
            self._answers[number] = answer
            self._timed_out[number] = timed_out
            self._left -= 1
            if not self._left:
                self._done.set()

    def requests(self, first: int, stop: int) -> list[Request]:
        """Returns questions first to stop - 1 as a worker reads them."""
        return [(prompt, response, record) for prompt, response, record in self._questions[first:stop]]

    def give_up(self, error: BaseException) -> None:
        """Lets whoever waits know that there will be no answer."""
        self._error = error
        self._done.set()


class _Part(NamedTuple):
    """Questions first to stop - 1 of a batch: what a process is handed at once."""

    pending: Pending
    first: int
    stop: int


class Rewards:
    """The reward functions of a config, in `reward_worker_count` processes; a context manager.

    Each process has a thread that hands it work, reads its answers, and replaces it when it has died.
    """

    def __init__(self, config: ConfigDict):
        """Starts the processes and waits until each has imported the functions.

        Raises:
          ConfigError: `reward` is not of its form, or names a function that cannot be had.
        """
        self._terms = parse_rewards(config.reward)
        self._on_failure = float(config.reward_on_failure)
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._closed = False
        specs = [term.spec for term in self._terms]
        timeout_s = float(config.reward_timeout_s)
        self._processes = [RewardProcess(specs, timeout_s) for _ in range(config.reward_worker_count)]
        starts: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(process, starts), name="maxbatch-rewards", daemon=True)
            for process in self._processes
        ]
        for thread in self._threads:
            thread.start()
        try:
            for _ in self._threads:
                problem = starts.get()
                if problem is not None:
                    raise ConfigError(f"reward={shown(repr(config.reward))}: {problem}") from problem
        except BaseException:
            self.close()
            raise

    def submit(self, questions: Sequence[Question]) -> Pending:
        """Hands in a batch and returns at once; batches are scored in the order in which they come."""
        if self._closed:
            raise RuntimeError("the rewards are closed")
        pending = Pending(questions, self._terms, self._on_failure)
        first = 0
        while first < len(questions):
            # Large parts first, single ones last, so that the processes finish together whatever a response takes
            # (guided self-scheduling: Polychronopoulos and Kuck 1987).
            stop = first + -(-(len(questions) - first) // (2 * len(self._processes)))
            self._parts.put(_Part(pending, first, stop))
            first = stop
        return pending

    def close(self) -> None:
        """Ends the processes; scores that are still on their way never arrive."""
        self._closed = True
        for process in self._processes:
            process.close()
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _serve(self, process: RewardProcess, starts: queue.SimpleQueue[BaseException | None]) -> None:
        """Runs in the thread of a process until the rewards are closed."""
        try:
            process.start()
        except BaseException as error:
            starts.put(error)
            return
        starts.put(None)
        while (part := self._parts.get()) is not None:
            try:
                self._score(process, part)
            except BaseException as error:
                part.pending.give_up(error)
        process.stop()

    def _score(self, process: RewardProcess, part: _Part) -> None:
        position = part.first
        while position < part.stop:
            try:
                process.start()
            except Ended as end:
                self._raise_if_closed()
                for number in range(position, part.stop):
                    part.pending.put(number, (None, str(end)))
                return
            try:
                for answer in process.answers(part.pending.requests(position, part.stop)):
                    part.pending.put(position, answer)
                    position += 1
            except Ended as end:
                self._raise_if_closed()
                part.pending.put(position, (None, str(end)), isinstance(end, TimedOut))
                position += 1
        # While nobody waits for it: a process that has just died is replaced.
        with contextlib.suppress(Ended):
            process.start()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the rewards were closed")
