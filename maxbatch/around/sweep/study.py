"""The trials of a sweep, as an Optuna study of the command that runs them.

The study is in memory. Each start rebuilds it from the records of the trials in the sweep's folder.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import deque
from types import ModuleType
from typing import TYPE_CHECKING

from maxbatch.around.sweep.continuing import check_recorded, check_settings
from maxbatch.around.sweep.folder import Result, SweepFolder, Trial
from maxbatch.around.sweep.sweep_file import Overrides, SweepFile
from maxbatch.run.folder.metrics import scan_metrics
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.old_forms import refuse_old_run
from maxbatch.run.folder.outcome import Status
from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    import optuna

MOST_COMBINATIONS = 100_000
_SAMPLED = 20  # random combinations tried before a sweep whose config refuses them all is refused


class SweepStudy:
    """The trials of a sweep: all of them, those that may start now, and their results.

    The combinations of a grid are taken in their order, so that a grid may grow, which Optuna's
    GridSampler does not allow. Optuna's random sampler and TPE (`optuna`) suggest the values of the
    others. With `pruner: median` trials are pruned by the median of the others' eval losses at
    equal `tokens_seen`, since steps of different batches cannot be compared.
    """

    def __init__(self, sweep: SweepFile, folder: SweepFolder) -> None:
        self._optuna = _optuna()
        self._sweep, self._folder = sweep, folder
        grid = _combinations(sweep) if sweep.sampler == "grid" else None
        recorded = folder.trials()
        check_recorded(sweep, recorded, None if grid is None else set(map(_items, grid)))
        check_settings(sweep, folder)
        pruners = self._optuna.pruners
        self._study = self._optuna.create_study(
            pruner=pruners.MedianPruner(n_startup_trials=4)
            if sweep.pruner == "median"
            else pruners.NopPruner()
        )
        taken = {_items(trial.overrides) for trial in recorded}
        # of a grid: without a trial
        self._left = grid and deque(
            combination for combination in grid if _items(combination) not in taken
        )
        self._numbers: set[int] = set()  # of all trials
        # by number
        self._trials: dict[int, optuna.Trial] = {}
        self._num_reported: dict[int, int] = {}  # by trial, the evals in the study
        self._waiting: deque[Trial] = deque()  # recorded, to start
        self._stopped: deque[Trial] = deque()  # to start again, after all others
        for trial in recorded:
            self._begin(trial.number, trial.overrides)
            if trial.is_finished:
                self.should_prune(trial)  # the others are compared with its evals
                self.finished(folder.result(trial, sweep.metric))
            else:
                refuse_old_run(trial.folder)
                self._waiting.append(trial)

    @property
    def num_trials(self) -> int:
        begun = len(self._numbers)
        return (
            begun + len(self._left)
            if self._left is not None
            else max(begun, self._sweep.trials or 0)
        )

    @property
    def num_ended(self) -> int:
        return sum(trial.state.is_finished() for trial in self._study.get_trials(deepcopy=False))

    @property
    def counted(self) -> str:
        """The number of ended trials, in words."""
        return f"{self.num_ended} of {self.num_trials} trials ended"

    def is_exhausted(self) -> bool:
        """Returns whether there is nothing left to start."""
        return not (self._waiting or self._stopped) and self._have_all_begun

    def next(self) -> Trial | None:
        """Returns a trial to start now; None if all have started."""
        while not self._waiting and not self._have_all_begun:
            number = next(n for n in itertools.count() if n not in self._numbers)
            overrides = self._begin(number, self._left.popleft() if self._left else None)
            self._record(number, overrides)
        queue = self._waiting or self._stopped
        return queue.popleft() if queue else None

    @property
    def _have_all_begun(self) -> bool:
        return len(self._numbers) >= self.num_trials

    def stopped(self, trial: Trial) -> None:
        """Queues a trial that stopped before its end, behind those that have not started."""
        self._stopped.append(trial)

    def _begin(self, number: int, overrides: Overrides | None) -> Overrides:
        """Adds a trial to the study, with values that the sampler suggests if it has none; returns
        its values.
        """
        self._study.sampler = self._sampler(number)
        is_grid = self._left is not None
        if overrides is not None and not is_grid:
            self._study.enqueue_trial(
                {p.key.name: p.suggested(overrides[p.key.name]) for p in self._sweep.parameters}
            )
        self._numbers.add(number)
        self._trials[number] = asked = self._study.ask()
        suggested = {} if is_grid else _suggested(self._sweep, asked)
        return suggested if overrides is None else overrides

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """Returns the sampler of one trial, whose seed is its own: a restart does not repeat the
        first suggestions.
        """
        seed = zlib.crc32(f"{self._sweep.seed} {number} ".encode())
        samplers = self._optuna.samplers
        is_random = self._sweep.sampler == "random"
        sampler: optuna.samplers.BaseSampler = (
            samplers.RandomSampler(seed)
            if is_random
            else samplers.TPESampler(seed=seed, constant_liar=True)
        )
        return sampler

    def _record(self, number: int, overrides: Overrides) -> None:
        """Makes the folder of a trial, and queues it; a trial that the config refuses fails at
        once.
        """
        try:
            self._waiting.append(
                self._folder.add(number, overrides, self._sweep.resolved(overrides))
            )
        except ConfigError as error:
            trial = self._folder.add(number, overrides, None)
            self._folder.finish(trial, Status.FAILED, str(error))
            self.finished(self._folder.result(trial, self._sweep.metric))

    def should_prune(self, trial: Trial) -> str | None:
        """Reports the new evals of a running trial; returns the reason to prune it, or None."""
        if self._sweep.pruner == "none":
            return None
        evals = [
            record
            for record in scan_metrics(trial.folder).records
            if record.get(Metric.EVAL_LOSS) is not None
        ]
        new = evals[self._num_reported.get(trial.number, 0) :]
        if not new:
            return None
        self._num_reported[trial.number] = len(evals)
        running = self._trials[trial.number]
        for record in new:
            loss, tokens = record[Metric.EVAL_LOSS], record[Metric.TOKENS_SEEN]
            running.report(loss, tokens)
        if not running.should_prune():
            return None
        return f"eval_loss {loss:.4f} at {tokens:,} tokens is above the others' median"

    def finished(self, result: Result) -> None:
        """Tells the study how a trial ended."""
        state = self._optuna.trial.TrialState
        # A diverged trial counts as pruned, so that the sampler avoids its region; it would ignore
        # a failure.
        states = {Status.DONE: state.COMPLETE, Status.FAILED: state.FAIL}
        told = states.get(Status(result.status), state.PRUNED)
        self._study.tell(
            self._trials[result.trial.number],
            result.value if told == state.COMPLETE else None,
            state=told,
        )


def check_combinations(sweep: SweepFile) -> None:
    """Refuses a sweep if its config refuses every combination of a grid, or every one of a few
    random ones.
    """
    if sweep.sampler == "grid":
        tried, which = _combinations(sweep), "the "
    else:
        library = _optuna()
        study = library.create_study(sampler=library.samplers.RandomSampler(sweep.seed))
        tried, which = [_suggested(sweep, study.ask()) for _ in range(_SAMPLED)], ""
    refusals = []
    for overrides in tried:
        try:
            sweep.resolved(overrides)
            return
        except ConfigError as error:
            refusals.append(str(error))
    others = f" (so is every one of {which}{len(tried)} combinations)" if len(tried) > 1 else ""
    raise ConfigError(refusals[0] + others)


def _suggested(sweep: SweepFile, asked: optuna.Trial) -> Overrides:
    return {parameter.key.name: parameter.suggest(asked) for parameter in sweep.parameters}


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "maxbatch sweep needs Optuna; works: pip install 'maxbatch[sweep]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _combinations(sweep: SweepFile) -> list[Overrides]:
    names = [parameter.key.name for parameter in sweep.parameters]
    axes = [parameter.grid() for parameter in sweep.parameters]
    count = math.prod(map(len, axes))
    if count > MOST_COMBINATIONS:
        raise ConfigError(
            f"{sweep.path}: parameters make {count:,} combinations, more than "
            f"{MOST_COMBINATIONS:,}; works: sampler: random"
        )
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*axes)]


def _items(overrides: Overrides) -> frozenset[tuple[str, str]]:
    return frozenset(overrides.items())
