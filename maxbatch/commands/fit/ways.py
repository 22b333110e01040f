"""The ways to a batch that fit, within a time: each costs a compilation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from maxbatch.commands.fit.choices import Choice, Sizes, choose, choose_smaller
from maxbatch.commands.fit.oracle import CORES, CompilerOracle
from maxbatch.training.compile.modelled import has_clock

_BUDGET_S = 350  # within which the ways that a clock ranks are compiled
_SIGN_OF_LIFE_S = 30
_LIKELY_BEST = ("minimal", "full")  # the policies that are compiled first


class Stopwatch:
    """The time since it was made, and the longest that one way took."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._started, self._longest = now, now(), 0.0

    def timed(self, find: Callable[[], Choice | None]) -> Choice | None:
        """Returns what `find` finds, and takes its time."""
        begun = self._now()
        choice = find()
        self._longest = max(self._longest, self._now() - begun)
        return choice

    @property
    def has_time(self) -> bool:
        """Whether another way would be done within the budget if it took as long as the longest so far."""
        return self._now() - self._started + self._longest <= _BUDGET_S


def find_ways(
    oracles: Sequence[CompilerOracle], sizes: Sizes, wants_batch: bool, say: Callable[[str], None]
) -> tuple[list[Choice], list[str]]:
    """Returns what fits, the best first, and the remat policies that there was no time for.

    Of each oracle it is the largest micro-batch, and smaller ones if a clock ranks them.
    """
    find = partial(_side_by_side, oracles, sizes)
    if wants_batch and has_clock(oracles[0].target):
        find = partial(_one_by_one, oracles, sizes, Stopwatch())
    # In a thread, which a Ctrl-C does not wait for.
    pool = ThreadPoolExecutor(1, "maxbatch-fit")
    try:
        work = pool.submit(find)
        for second in itertools.count(1):
            if wait([work], timeout=1).done:
                break
            if second % _SIGN_OF_LIFE_S == 0:
                say("still compiling")
        choices, skipped = work.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if skipped:
        say(f"no time left for remat_policy={', '.join(skipped)}")
    return sorted(choices, key=lambda choice: choice.rank), skipped


def _side_by_side(oracles: Sequence[CompilerOracle], sizes: Sizes) -> tuple[list[Choice], list[str]]:
    """Returns what fits under each policy; where there are cores, also a size and the next one side by side."""
    at_once = min(2, max(1, CORES // len(oracles)))
    with ThreadPoolExecutor(len(oracles), "maxbatch-fit") as pool:
        found = list(pool.map(lambda oracle: choose(oracle, sizes, at_once), oracles))
    return [choice for choice in found if choice is not None], []


def _one_by_one(
    oracles: Sequence[CompilerOracle], sizes: Sizes, stopwatch: Stopwatch
) -> tuple[list[Choice], list[str]]:
    """Returns the ways that there is time for; the TPU compiler keeps two cores busy with one program."""

    def likelihood(oracle: CompilerOracle) -> int:
        policy = oracle.config.remat_policy
        return _LIKELY_BEST.index(policy) if policy in _LIKELY_BEST else len(_LIKELY_BEST)

    found: list[tuple[Choice, CompilerOracle]] = []
    left = sorted(oracles, key=likelihood)
    while left and (not found or stopwatch.has_time):
        oracle = left.pop(0)
        choice = stopwatch.timed(partial(choose, oracle, sizes, at_once=1))
        if choice is not None:
            found.append((choice, oracle))
    smaller = []
    for choice, oracle in sorted(found, key=lambda pair: pair[0].rank):
        if not left and stopwatch.has_time:
            smaller.append(stopwatch.timed(partial(choose_smaller, oracle, sizes, choice)))
    choices = [choice for choice, _ in found]
    return choices + [choice for choice in smaller if choice is not None], [one.config.remat_policy for one in left]
