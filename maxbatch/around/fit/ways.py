"""The ways to a batch that fit, found within a time budget: each costs a compilation."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from maxbatch.around.fit.choices import Choice, Sizes, choose, choose_smaller
from maxbatch.around.fit.oracle import CORES, CompilerOracle

_BUDGET_S = 350  # budget of the ways that are compiled one after the other
_SIGN_OF_LIFE_S = 30
_LIKELY_BEST = ("minimal", "full")  # the policies that are compiled first


@dataclasses.dataclass(frozen=True)
class Way:
    """A mesh and a remat policy, with the micro-batches that it may have."""

    oracle: CompilerOracle
    sizes: Sizes
    mesh: str = ""  # the config keys of its mesh; "" for the one that is stated

    @property
    def name(self) -> str:
        """Its name in the list of ways left out."""
        policy: str = self.oracle.config.remat_policy
        return f"{self.mesh} remat_policy={policy}" if self.mesh else policy


class Stopwatch:
    """The time since its creation, and the longest time of a way."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._started, self._longest = now, now(), 0.0

    def timed(self, find: Callable[[], Choice | None]) -> Choice | None:
        """Runs `find` and records its duration."""
        begun = self._now()
        choice = find()
        self._longest = max(self._longest, self._now() - begun)
        return choice

    @property
    def has_time(self) -> bool:
        """Whether another way would fit into the budget if it took as long as the longest so
        far.
        """
        return self._now() - self._started + self._longest <= _BUDGET_S


def find_ways(
    ways: Sequence[Way], in_turn: bool, cuts: bool, say: Callable[[str], None]
) -> tuple[list[Choice], list[str]]:
    """Returns the choices that fit, the best first, and the names of the ways without time.

    Args:
      ways: each gives the largest micro-batch that fits.
      in_turn: one after the other while there is time, likely best first; otherwise in parallel.
      cuts: whether smaller micro-batches are tried in the time that is left; only `in_turn`.
      say: called with a line of text to print.
    """
    find = (
        partial(_one_by_one, ways, Stopwatch(), cuts) if in_turn else partial(_side_by_side, ways)
    )
    # In a thread, which a Ctrl-C does not wait for.
    pool = ThreadPoolExecutor(1, "maxbatch-fit")
    try:
        work = pool.submit(find)
        for second in itertools.count(1):
            if wait([work], timeout=1).done:
                break
            if second % _SIGN_OF_LIFE_S == 0:
                say("still compiling")
        choices, left = work.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    skipped = [way.name for way in left]
    if skipped:
        say(f"no time left for {', '.join(skipped)}; the same command again continues with them")
    return sorted(choices, key=lambda choice: choice.rank), skipped


def _side_by_side(ways: Sequence[Way]) -> tuple[list[Choice], list[Way]]:
    """Returns the choice of each way; with enough cores, also compiles two neighbouring sizes in
    parallel.
    """
    at_once = min(2, max(1, CORES // len(ways)))
    with ThreadPoolExecutor(len(ways), "maxbatch-fit") as pool:
        choices = list(pool.map(lambda way: choose(way.oracle, way.sizes, at_once), ways))
    return [choice for choice in choices if choice is not None], []


def _one_by_one(
    ways: Sequence[Way], stopwatch: Stopwatch, cuts: bool
) -> tuple[list[Choice], list[Way]]:
    """Returns the choices of the ways that fit into the time, and the names of the others.

    The TPU compiler keeps two cores busy with one program.
    """

    def likelihood(way: Way) -> int:
        policy = way.oracle.config.remat_policy
        return _LIKELY_BEST.index(policy) if policy in _LIKELY_BEST else len(_LIKELY_BEST)

    chosen: list[tuple[Choice, Way]] = []
    left = sorted(ways, key=likelihood)
    while left and (not chosen or stopwatch.has_time):
        way = left.pop(0)
        choice = stopwatch.timed(partial(choose, way.oracle, way.sizes, at_once=1))
        if choice is not None:
            chosen.append((choice, way))
    smaller = []
    for choice, way in sorted(chosen, key=lambda pair: pair[0].rank):
        if cuts and not left and stopwatch.has_time:
            smaller.append(stopwatch.timed(partial(choose_smaller, way.oracle, way.sizes, choice)))
    choices = [choice for choice, _ in chosen]
    return choices + [choice for choice in smaller if choice is not None], left
