"""The trials of a sweep, as an Optuna study.

The study has the trials and their results; the folder of each trial is on the machine that runs it. In a shared
storage, a trial's `sweep_dir` attribute names the sweep's folder, so only the same command there continues it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import time
import zlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from maxbatch.commands.sweep.continuing import check_recorded, check_settings
from maxbatch.commands.sweep.storage import Storage
from maxbatch.commands.sweep.sweep_file import Overrides, SweepFile
from maxbatch.runs.metrics import scan_metrics
from maxbatch.runs.metrics_schema import Metric
from maxbatch.runs.outcome import Status
from maxbatch.runs.sweep_folder import Result, SweepFolder, Trial
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.bounded import read_bytes
from maxbatch.system.errors import ConfigError
from maxbatch.system.locks import exclusive
from maxbatch.system.storage import kept_here, send

if TYPE_CHECKING:
    import optuna

MOST_COMBINATIONS = 100_000
_LOST_S = 60  # from a trial's start to the record of its process; it takes milliseconds unless that process was killed
_SAMPLED = 20  # random combinations tried before a sweep whose config refuses them all is refused
_DATABASE = "optuna.db"
_MOST_BYTES = 1 << 30  # of the database
_HOME, _SETTINGS = "sweep_dir", "maxbatch_parameters"


class ClaimedTrial(NamedTuple):
    """A trial that only this process may run, and the claim on it, open while the trial runs."""

    trial: Trial
    claim: BinaryIO


class SweepStudy:
    """The trials of a sweep: all of them, those that may start now, and their results.

    The combinations of a grid are queued in their order, so that a grid may grow, which Optuna's GridSampler does not
    allow. Optuna's random sampler and TPE (`optuna`) suggest the values of the others.
    Trials of TPE are pruned by the median of the others' eval losses at equal `tokens_seen`, since steps of different
    batches cannot be compared. Several `maxbatch sweep` with one `storage` share the trials; `trials` is their total
    number.
    """

    def __init__(self, sweep: SweepFile, folder: SweepFolder) -> None:
        self._optuna = _optuna()
        self._sweep, self._folder = sweep, folder
        self._grid = _combinations(sweep) if sweep.sampler == "grid" else None
        recorded = folder.trials()
        check_recorded(sweep, recorded, None if self._grid is None else set(map(_items, self._grid)))
        self._check_combinations()
        check_settings(sweep, folder)
        self._here = kept_here(folder.path)
        self._lock_file = self._here / ".study.lock"  # lock for taking trials, of commands in one sweep_dir
        self._home = f"{socket.gethostname()}:{folder.path.resolve()}"
        self._study = self._open()
        self._num_reported: dict[int, int] = {}  # by trial, the evals in the study
        self._nobodys: dict[int, float] = {}  # by trial: since when this process has seen no process run it
        with self._storage.errors():
            if sweep.storage is None:
                with exclusive(self._lock_file):
                    self._add_missing(recorded)
            self._tell_recorded(recorded)

    def _check_combinations(self) -> None:
        """Refuses a sweep if its config refuses every tried combination."""
        tried, which = self._grid, "the "
        if tried is None:
            study = self._optuna.create_study(sampler=self._optuna.samplers.RandomSampler(self._sweep.seed))
            tried, which = [self._suggested(study.ask()) for _ in range(_SAMPLED)], ""
        refusals = []
        for overrides in tried:
            try:
                self._sweep.resolved(overrides)
                return
            except ConfigError as error:
                refusals.append(str(error))
        others = f" (so is every one of {which}{len(tried)} combinations)" if len(tried) > 1 else ""
        raise ConfigError(refusals[0] + others)

    def _open(self) -> optuna.Study:
        sweep, pruners = self._sweep, self._optuna.pruners
        self._fetch()
        url = sweep.storage or f"sqlite:///{self._here.resolve() / _DATABASE}"
        place = Storage.of(sweep.storage, self._here / _DATABASE)
        parameters = {parameter.key.name: parameter.to_json() for parameter in sweep.parameters}
        settings = json.dumps({"metric": sweep.metric, "parameters": parameters}, sort_keys=True)

        def opened() -> tuple[optuna.storages.RDBStorage, optuna.Study, str | None]:
            database = self._optuna.storages.RDBStorage(url)
            study = self._optuna.create_study(
                storage=database, study_name=sweep.path.stem, direction="minimize", load_if_exists=True,
                pruner=pruners.MedianPruner(n_startup_trials=4) if sweep.sampler == "optuna" else pruners.NopPruner(),
            )  # fmt: skip
            before = study.user_attrs.get(_SETTINGS)
            if before is None:
                study.set_user_attr(_SETTINGS, settings)
            return database, study, before

        self._database, study, before = place.open(opened)
        self._storage = place
        if sweep.storage and before not in (None, settings):
            raise ConfigError(
                f"{place.name}: holds study {sweep.path.stem} of {before}, not {settings}; "
                "give another storage, or another name to the sweep file"
            )
        return study

    def _fetch(self) -> None:
        """Fetches the database of a sweep from its object store, where another machine may have left it."""
        if self._sweep.storage is None and self._here != self._folder.path:
            with contextlib.suppress(FileNotFoundError):
                there = self._folder.path / _DATABASE
                write_atomically(self._here / _DATABASE, read_bytes(there, str(there), _MOST_BYTES))

    def _keep(self) -> None:
        """Copies the database of a sweep to its object store. The folders of trials tell which ones it lacks."""
        if self._sweep.storage is None:
            send(self._here / _DATABASE, self._folder.path / _DATABASE)

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _is_mine(self, frozen: optuna.trial.FrozenTrial) -> bool:
        return self._sweep.storage is None or frozen.user_attrs.get(_HOME) == self._home

    def _is_running(self, frozen: optuna.trial.FrozenTrial) -> bool:
        running: optuna.trial.TrialState = self._optuna.trial.TrialState.RUNNING
        return frozen.state == running

    def _running_trial(self, frozen: optuna.trial.FrozenTrial) -> optuna.Trial:
        """Returns a trial of the database that takes suggestions and reports."""
        study = self._database.get_study_id_from_name(self._study.study_name)
        trial = self._database.get_trial_id_from_study_id_trial_number(study, frozen.number)
        running: optuna.Trial = self._optuna.trial.Trial(self._study, trial)
        return running

    def _add_missing(self, recorded: Sequence[Trial]) -> None:
        """Adds the recorded trials that the study lacks: all, for a grid begun before grids had a study."""
        for trial in recorded:
            while len(self._trials()) <= trial.number:
                self._study.enqueue_trial(trial.overrides)
                added = self._study.ask()
                if added.number < trial.number:  # the folder of that trial was removed
                    self._study.tell(added, state=self._optuna.trial.TrialState.FAIL)

    def _tell_recorded(self, recorded: Sequence[Trial]) -> None:
        """Tells the study of trials that ended just before this sweep was killed."""
        running = {one.number for one in self._trials() if self._is_mine(one) and self._is_running(one)}
        for trial in recorded:
            if trial.number in running and trial.is_finished:
                self.finished(self._folder.result(trial, self._sweep.metric))

    def next(self) -> ClaimedTrial | None:
        """Returns a trial to start now; None if none may start yet."""
        if claimed := _claim_first(self._unfinished()):
            return claimed
        with self._storage.errors(), exclusive(self._lock_file):
            while (suggested := self._adopt() or self._ask()) is not None:
                trial = self._record(suggested)
                if trial.config is not None:
                    return _claim_first([trial])
        return None

    def is_exhausted(self) -> bool:
        """Returns whether there is nothing left to start, now or later."""
        with self._storage.errors():
            return not self._unfinished() and not self._may_ask() and not any(map(self._is_nobodys, self._trials()))

    @property
    def num_trials(self) -> int:
        """Trials of the whole sweep."""
        return len(self._grid) if self._grid is not None else self._sweep.trials or 0

    def _unfinished(self) -> list[Trial]:
        return [trial for trial in self._folder.trials() if not trial.is_finished]

    def _may_ask(self) -> bool:
        if self._grid is not None:
            return self._next_combination() is not None
        return len(self._trials()) < self.num_trials

    def _next_combination(self) -> Overrides | None:
        """Returns the first combination of the grid that no folder records."""
        recorded = {_items(trial.overrides) for trial in self._folder.trials()}
        return next((one for one in self._grid or () if _items(one) not in recorded), None)

    def _adopt(self) -> optuna.Trial | None:
        """Returns a trial without a folder, started here or by a process that was killed at once."""
        recorded = {trial.number for trial in self._folder.trials()}
        for frozen in self._trials():
            if not self._is_running(frozen) or frozen.number in recorded:
                continue
            if self._is_lost(frozen) or self._is_mine(frozen):
                self._study.sampler = self._sampler(frozen.number)
                return self._running_trial(frozen)
        return None

    def _is_nobodys(self, frozen: optuna.trial.FrozenTrial) -> bool:
        """Returns whether a trial of a shared study has begun without a record of the process that runs it."""
        is_shared = self._sweep.storage is not None
        return is_shared and self._is_running(frozen) and frozen.user_attrs.get(_HOME) is None

    def _is_lost(self, frozen: optuna.trial.FrozenTrial) -> bool:
        """Returns whether this process has seen a trial without a running process for long enough.

        The trial's start time is by another machine's clock, which may differ by hours.
        """
        if not self._is_nobodys(frozen):
            return False
        return time.monotonic() - self._nobodys.setdefault(frozen.number, time.monotonic()) >= _LOST_S

    def _ask(self) -> optuna.Trial | None:
        if not self._may_ask():
            return None
        self._study.sampler = self._sampler(len(self._trials()))
        if self._grid is not None and (combination := self._next_combination()) is not None:
            self._study.enqueue_trial(combination)
        asked = self._study.ask()
        if self._grid is None and asked.number >= self.num_trials:  # another machine took the last one
            self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
            return None
        return asked

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """Returns the sampler of one trial, whose seed is its own: a restart does not repeat the first suggestions."""
        machine = self._home if self._sweep.storage else ""
        seed = zlib.crc32(f"{self._sweep.seed} {number} {machine}".encode())
        samplers = self._optuna.samplers
        is_random = self._sweep.sampler == "random"
        sampler: optuna.samplers.BaseSampler = (
            samplers.RandomSampler(seed) if is_random else samplers.TPESampler(seed=seed, constant_liar=True)
        )
        return sampler

    def _suggested(self, suggested: optuna.Trial) -> Overrides:
        if self._grid is not None:
            fixed: Overrides = self._trials()[suggested.number].system_attrs["fixed_params"]
            return fixed
        return {parameter.key.name: parameter.suggest(suggested) for parameter in self._sweep.parameters}

    def _record(self, suggested: optuna.Trial) -> Trial:
        """Makes the folder of a trial; a trial that the config refuses fails at once."""
        suggested.set_user_attr(_HOME, self._home)
        overrides = self._suggested(suggested)
        try:
            return self._folder.add(suggested.number, overrides, self._sweep.resolved(overrides))
        except ConfigError as error:
            trial = self._folder.add(suggested.number, overrides, None)
            self._folder.finish(trial, Status.FAILED, str(error))
            self.finished(self._folder.result(trial, self._sweep.metric))
            return trial

    def should_prune(self, trial: Trial) -> str | None:
        """Returns the reason to prune a running trial, or None."""
        if self._sweep.sampler != "optuna" or self._sweep.metric != Metric.EVAL_LOSS:
            return None
        with self._storage.errors():
            return self._reason_to_prune(trial)

    def _reason_to_prune(self, trial: Trial) -> str | None:
        evals = [record for record in scan_metrics(trial.folder).records if record.get(Metric.EVAL_LOSS) is not None]
        new = evals[self._num_reported.get(trial.number, 0) :]
        frozen = next(one for one in self._trials() if one.number == trial.number) if new else None
        if frozen is None or not self._is_running(frozen):
            return None
        running = self._running_trial(frozen)
        for record in new:
            loss, tokens = record[Metric.EVAL_LOSS], record[Metric.TOKENS_SEEN]
            if tokens not in frozen.intermediate_values:
                running.report(loss, tokens)
        self._num_reported[trial.number] = len(evals)
        if not running.should_prune():
            return None
        return f"eval_loss {loss:.4f} at {tokens:,} tokens is above the others' median"

    def finished(self, result: Result) -> None:
        """Tells the study how a trial ended."""
        state = self._optuna.trial.TrialState
        # A diverged trial counts as pruned, so that the sampler avoids its region; it would ignore a failure.
        states = {Status.DONE: state.COMPLETE, Status.FAILED: state.FAIL}
        told = states.get(Status(result.status), state.PRUNED)
        value = result.value if told == state.COMPLETE else None
        # ValueError: the same command reported it before it was killed
        with self._storage.errors(), contextlib.suppress(ValueError):
            self._study.tell(result.trial.number, value, state=told)
        self._keep()


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError:
        raise ConfigError("maxbatch sweep needs Optuna; works: pip install 'maxbatch[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _combinations(sweep: SweepFile) -> list[Overrides]:
    names = [parameter.key.name for parameter in sweep.parameters]
    axes = [parameter.grid() for parameter in sweep.parameters]
    count = math.prod(map(len, axes))
    if count > MOST_COMBINATIONS:
        raise ConfigError(
            f"{sweep.path}: parameters make {count:,} combinations, more than {MOST_COMBINATIONS:,}; "
            "works: sampler: random"
        )
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*axes)]


def _items(overrides: Overrides) -> frozenset[tuple[str, str]]:
    return frozenset(overrides.items())


def _claim_first(trials: Iterable[Trial]) -> ClaimedTrial | None:
    """Returns the first trial that is neither finished nor claimed, by another process or by this one."""
    for trial in trials:
        if trial.is_finished or (claim := trial.claim()) is None:
            continue
        if not trial.is_finished:  # it may have ended just before its claim was released
            return ClaimedTrial(trial, claim)
        claim.close()
    return None
