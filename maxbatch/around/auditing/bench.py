"""The runs of trials, each run once, judged by the trainer's own rounding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maxbatch.around.auditing import compare
from maxbatch.around.auditing.compare import Difference, Tolerance
from maxbatch.around.auditing.data import Data, RowSpec
from maxbatch.around.auditing.promises import Comparison, Promise, Side, whole
from maxbatch.around.auditing.resuming import ImportMake, NoProcess, resumed_elsewhere, resumed_here
from maxbatch.around.auditing.trainer import Refused, Run, Subject, Unsaved, is_equal
from maxbatch.system.errors import ConfigError

_ROWS = 8
_PERMUTATIONS = 6


class Broken(NamedTuple):
    """A trial that breaks its promise."""

    trial: Comparison
    difference: Difference
    raised: str = ""  # the exception of the second run, or ""


class Bench:
    """The runs of a trainer on the rows of one seed.

    Args:
      import_make: returns its `make` in a new process; None: imports it by the name of its module.

    Attributes:
      no_process: why no new process trains with the trainer, or "".

    Raises:
      ConfigError: a whole batch on one device does not train.
    """

    def __init__(self, subject: Subject, data: Data, import_make: ImportMake | None = None) -> None:
        self.data, self._subject, self._import_make = data, subject, import_make
        self._runs: dict[Side, Run | Refused] = {}
        self.no_process = ""
        layout = whole(_ROWS)
        try:
            self.base = self.run(Side(layout, RowSpec(_ROWS)))
            self.permuted = [
                self.run(Side(layout, RowSpec(_ROWS, order=order)))
                for order in _orders(data.seed, _ROWS)
            ]
        except Refused as refused:
            text = (
                f"make: a batch of {_ROWS} rows, whole on one device, cannot be trained on "
                f"({refused})"
            )
            raise ConfigError(text) from refused
        if not all(
            np.isfinite(array).all() for params in self.base.params for array in params.values()
        ):
            raise ConfigError(
                f"params: not finite within {data.updates} updates; a lower learning rate may work"
            )
        if not np.isfinite(self.base.losses).all():
            raise ConfigError(
                f"step: metrics['loss'] is not finite within {data.updates} updates of finite "
                "parameters"
            )
        if not compare.moved(self.base):
            raise ConfigError(
                f"step: changed no parameter in {data.updates} updates; works: a learning rate "
                "above 0"
            )
        self.tolerance, self.order_distance = compare.tolerance(self.base, self.permuted)

    def run(self, side: Side) -> Run:
        """Returns a run, from memory if it was run before; raises Refused."""
        if side not in self._runs:
            try:
                self._runs[side] = self._run(side)
            except Refused as refused:
                self._runs[side] = refused
        answer = self._runs[side]
        if isinstance(answer, Refused):
            raise answer
        return answer

    def _run(self, side: Side) -> Run:
        subject, batches = self._subject, self.data.batches(side.rows)
        if not side.save_after:
            return subject.run(side.layout, batches)
        if side.then:
            begun, saved = subject.run_and_save(side.layout, batches[: side.save_after])
            return begun.then(subject.resume(side.then, saved, batches[side.save_after :]))
        if not side.in_new_process:
            return resumed_here(subject, side.layout, batches, side.save_after)
        return resumed_elsewhere(subject, self._import_make, side.layout, batches, side.save_after)

    def first_broken(self, promise: Promise, num_rows: int) -> tuple[Broken | None, str]:
        """Returns the first trial of B rows that breaks the promise, and the reason if no trial
        applies.
        """
        refused, applies = "", False
        for trial in promise.trials(num_rows, self.data.updates):
            try:
                first = self.run(trial.first)
                if trial.second.in_new_process and self.no_process:
                    continue
                second = self.run(trial.second)
            except NoProcess as error:
                self.no_process = str(error)
                continue
            except Refused as error:
                if broken := self._raises(trial, error):
                    return broken, ""
                refused = refused or str(error)
                continue
            applies = True
            if promise.name == "order" and not self.order_distance:
                continue  # otherwise its spread does not measure rounding
            difference = (
                self._unseen(first, second) if trial.must_differ else self.difference(trial)
            )
            if difference:
                return Broken(trial, difference), ""
        return None, "" if applies else refused

    def smallest(self, promise: Promise, broken: Broken) -> Broken:
        """Returns the smallest counterexample, by rows and then by parts."""
        for num_rows in range(promise.least_rows, broken.trial.first.rows.num_rows):
            counterexample, _ = self.first_broken(promise, num_rows)
            if counterexample:
                return counterexample
        return broken

    def difference(self, trial: Comparison) -> Difference | None:
        """Returns the difference of the two runs of a trial beyond rounding, or None; raises
        Refused.
        """
        first, second = self.run(trial.first), self.run(trial.second)
        gap = compare.difference(first, second, self.tolerance)
        return gap and compare.difference(first, second, self.tolerance_of(trial.first))

    def tolerance_of(self, side: Side) -> Tolerance:
        """Returns the tolerance for the rows of a run.

        Which gradients are nearly zero depends on the rows, and Adam turns their rounding into
        steps.
        """
        rows = side.rows
        if self.order_distance or side.layout != whole(rows.rows_given):
            return self.tolerance
        order = rows.order or tuple(range(rows.num_rows))
        orders = [
            tuple(order[place] for place in places)
            for places in _orders(self.data.seed, len(order))
        ]
        permuted = [self.run(side._replace(rows=rows._replace(order=order))) for order in orders]
        return self.tolerance.or_more(compare.tolerance(self.run(side), permuted)[0])

    def repeats(self, side: Side) -> bool:
        """Returns whether a new trainer repeats the run."""
        run, again = self.run(side), self._subject.repeat(side.layout, self.data.batches(side.rows))
        return is_equal(run, again) or compare.difference(run, again, self.tolerance) is None

    def _unseen(self, first: Run, second: Run) -> Difference | None:
        params, loss = compare.is_same(first, second)
        array = "all parameters" if params else None
        loss = loss and not compare.is_coarse(first)  # a loss in bfloat16 may hide a row
        return Difference(1, array, 0.0, 0.0) if params or loss else None

    def _raises(self, trial: Comparison, error: Refused) -> Broken | None:
        """Returns a broken promise if the second run raises although rows of its shape have run in
        its layout.
        """
        if not trial.same_shapes or isinstance(error, Unsaved):
            return None
        try:
            self.run(trial.first)
            self.run(Side(trial.second.layout, RowSpec(trial.second.rows.num_rows)))
        except Refused:
            return None
        return Broken(trial, Difference(1, None, float("inf"), 0.0), str(error))


def _orders(seed: int, num_rows: int) -> list[tuple[int, ...]]:
    draw = np.random.default_rng(seed)
    drawn = [tuple(map(int, draw.permutation(num_rows))) for _ in range(_PERMUTATIONS - 1)]
    return [tuple(reversed(range(num_rows))), *drawn]
