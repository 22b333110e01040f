"""The times when sampling and training had work, from dispatch to completion."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import jax


class Work(NamedTuple):
    """Dispatched work of one side."""

    dispatched: float
    ended: Future[float]


class Timeline:
    """A context manager that times dispatched work without delaying it."""

    def __init__(self) -> None:
        self._waiting: dict[str, ThreadPoolExecutor] = {}
        self._works: dict[str, list[Work]] = defaultdict(list)
        self._lock = Lock()  # of works, shared with the thread that samples ahead

    def watch(self, side: str, output: object) -> None:
        """Records that a side has work until an array is ready; a side's works end in order."""
        dispatched = time.perf_counter()
        if side not in self._waiting:
            self._waiting[side] = ThreadPoolExecutor(1, thread_name_prefix=f"maxbatch-{side}")

        def wait() -> float:
            jax.block_until_ready(output)
            return time.perf_counter()

        with self._lock:
            self._works[side].append(Work(dispatched, self._waiting[side].submit(wait)))

    def shares(self, since: float, until: float) -> dict[str, float]:
        """Returns the shares of a period in which each side, and both sides, had work.

        Clears ended work; work on batches ahead continues.
        """
        works: dict[str, list[tuple[float, float]]] = {}
        with self._lock:
            for side, of_side in self._works.items():
                going_on = [work for work in of_side if not work.ended.done()]
                works[side] = [(work.dispatched, until) for work in going_on]
                works[side] += [
                    (work.dispatched, work.ended.result())
                    for work in of_side
                    if work not in going_on
                ]
                of_side[:] = going_on
        ends = {end for intervals in works.values() for interval in intervals for end in interval}
        busy = dict.fromkeys((*works, "both"), 0.0)
        for start, end in pairwise(sorted({min(max(end, since), until) for end in ends})):
            at_work = [
                side for side in works if any(s <= start and end <= e for s, e in works[side])
            ]
            for side in (*at_work, "both") if 1 < len(at_work) == len(works) else at_work:
                busy[side] += end - start
        return {side: seconds / max(until - since, 1e-9) for side, seconds in busy.items()}

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self._waiting.values():
            pool.shutdown()
