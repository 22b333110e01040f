"""When each side had work: from its dispatch until it was done."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

Interval = tuple[float, float]


class Timeline:
    """Watches what is dispatched, without making anybody wait; a context manager."""

    def __init__(self) -> None:
        self._waiting: dict[str, ThreadPoolExecutor] = {}
        self._intervals: dict[str, list[Future[Interval]]] = defaultdict(list)

    def watch(self, side: str, output: Any) -> None:
        """Notes that a side has work until an array is there; the works of a side end one after the other."""
        dispatched = time.perf_counter()
        if side not in self._waiting:
            self._waiting[side] = ThreadPoolExecutor(1, thread_name_prefix=f"maxbatch-{side}")

        def wait() -> Interval:
            jax.block_until_ready(output)
            return dispatched, time.perf_counter()

        self._intervals[side].append(self._waiting[side].submit(wait))

    def shares(self, since: float, until: float) -> dict[str, float]:
        """Return the shares of a stretch of time in which each side had work, and in which all of them had.

        Waits for what was dispatched, and forgets it.
        """
        works = {
            side: _joined([work.result() for work in intervals], since, until)
            for side, intervals in self._intervals.items()
        }
        self._intervals.clear()
        whole = max(until - since, 1e-9)
        shares = {side: sum(end - start for start, end in work) / whole for side, work in works.items()}
        return {**shares, "both": sum(e - s for s, e in _common(list(works.values()))) / whole}

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self._waiting.values():
            pool.shutdown()


def _joined(intervals: list[Interval], since: float, until: float) -> list[Interval]:
    """Return intervals within a stretch of time, in order, those that touch made one."""
    joined: list[Interval] = []
    for start, end in sorted((max(s, since), min(e, until)) for s, e in intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif start < end:
            joined.append((start, end))
    return joined


def _common(works: list[list[Interval]]) -> list[Interval]:
    """Return when all sides have work."""
    if len(works) < 2:
        return []
    common = works[0]
    for work in works[1:]:
        pairs = [(max(a, c), min(b, d)) for a, b in common for c, d in work]
        common = [(start, end) for start, end in pairs if start < end]
    return common
