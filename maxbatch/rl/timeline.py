"""The times at which sampling and training had work: from its dispatch until it was done."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import jax

Interval = tuple[float, float]


class Timeline:
    """A context manager that observes dispatched work without delaying it."""

    def __init__(self) -> None:
        self._waiting: dict[str, ThreadPoolExecutor] = {}
        self._intervals: dict[str, list[Future[Interval]]] = defaultdict(list)

    def watch(self, side: str, output: object) -> None:
        """Notes that a side has work until an array is there; the works of a side end one after the other."""
        dispatched = time.perf_counter()
        if side not in self._waiting:
            self._waiting[side] = ThreadPoolExecutor(1, thread_name_prefix=f"maxbatch-{side}")

        def wait() -> Interval:
            jax.block_until_ready(output)
            return dispatched, time.perf_counter()

        self._intervals[side].append(self._waiting[side].submit(wait))

    def shares(self, since: float, until: float) -> dict[str, float]:
        """Returns the shares of a stretch of time in which each side had work, and in which both had.

        Waits for the dispatched work, and clears it.
        """
        works = {side: [work.result() for work in works] for side, works in self._intervals.items()}
        self._intervals.clear()
        ends = {end for intervals in works.values() for interval in intervals for end in interval}
        busy = dict.fromkeys((*works, "both"), 0.0)
        for start, end in pairwise(sorted({min(max(end, since), until) for end in ends})):
            at_work = [side for side in works if any(s <= start and end <= e for s, e in works[side])]
            for side in (*at_work, "both") if 1 < len(at_work) == len(works) else at_work:
                busy[side] += end - start
        return {side: seconds / max(until - since, 1e-9) for side, seconds in busy.items()}

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self._waiting.values():
            pool.shutdown()
