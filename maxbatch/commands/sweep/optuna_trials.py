"""Trials that Optuna suggests, from a storage that many machines may share.

The storage knows the trials and their results; the folder of each lies on the machine that runs it and names it in
the trial's `sweep_dir` attribute, so that the same command there, and no other, goes on with it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import socket
import zlib
from typing import Any

from maxbatch.commands.sweep.sweep_file import SweepFile
from maxbatch.commands.sweep.trials import Claimed, Resolver, check_config, check_settings, claim_first, draw
from maxbatch.runs.metrics import read_metrics
from maxbatch.runs.sweep_folder import Result, SweepFolder, Trial
from maxbatch.system.errors import ConfigError

_LOST_S = (
    60  # from a trial's start to the record of who runs it; milliseconds, unless that process was killed
)
_SAMPLED = 20  # combinations tried before a sweep whose config refuses them all is refused
_HOME, _SETTINGS = "sweep_dir", "maxbatch_parameters"


class OptunaTrials:
    """The trials of an Optuna study: sampled by TPE, pruned by the median of the others' eval losses.

    Several `maxbatch sweep` with one storage each take trials; `trials` is what all of them run together. A trial's
    eval losses are compared at equal `tokens_seen`, since steps of different batches are no measure.

    Raises:
      ConfigError: Optuna is not installed, the storage cannot be opened or holds another sweep, or the config refuses
        what it was tried with.
    """

    def __init__(self, sweep: SweepFile, folder: SweepFolder) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError("sampler=optuna needs Optuna; works: pip install 'maxbatch[sweep]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._sweep, self._folder = optuna, sweep, folder
        self._resolve = Resolver(sweep)
        self._check_base()
        for trial in folder.trials():
            if trial.config is not None:
                check_config(sweep, trial, self._resolve(trial.overrides))
        check_settings(sweep, folder)
        self._home = f"{socket.gethostname()}:{folder.path.resolve()}"
        self._study = self._open()
        self._reported: dict[int, int] = {}  # of a trial, the evals that the study knows
        self._tell_what_is_recorded()

    def _check_base(self) -> None:
        """Refuse a sweep of which the config refuses every combination that is tried."""
        refusal: ConfigError | None = None
        for number in range(_SAMPLED):
            try:
                self._resolve(draw(self._sweep, number))
                return
            except ConfigError as error:
                refusal = refusal or error
        raise ConfigError(f"{refusal} (so are {_SAMPLED} other random combinations)")

    def _open(self) -> Any:
        url = self._sweep.storage or f"sqlite:///{(self._folder.path / 'optuna.db').resolve()}"
        settings = {
            "metric": self._sweep.metric,
            "parameters": {parameter.key.name: parameter.to_json() for parameter in self._sweep.parameters},
        }
        text = json.dumps(settings, sort_keys=True)
        shown = re.sub(r"://[^@/]*@", "://...@", url)  # a password is nobody's business
        try:
            study = self._optuna.create_study(
                storage=url, study_name=self._sweep.path.stem, direction="minimize", load_if_exists=True,
                pruner=self._optuna.pruners.MedianPruner(n_startup_trials=4),
            )  # fmt: skip
            before = study.user_attrs.get(_SETTINGS)
            if before is None:
                study.set_user_attr(_SETTINGS, text)
        except Exception as error:  # whatever the database's own library raises
            raise ConfigError(
                f"storage={shown}: cannot be opened ({type(error).__name__}); works: sqlite:///sweep.db"
            ) from error
        if before is not None and before != text:
            raise ConfigError(
                f"storage={shown}: holds study {self._sweep.path.stem} of {before}, not {text}; "
                "give another storage, or another name to the sweep file"
            )
        return study

    def _mine(self) -> list[Any]:
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.user_attrs.get(_HOME) == self._home]

    def _is_running(self, trial: Any) -> bool:
        return trial.state == self._optuna.trial.TrialState.RUNNING

    def _tell_what_is_recorded(self) -> None:
        """Tell the study of trials that ended just before this sweep was killed."""
        recorded = {trial.number: trial for trial in self._folder.trials()}
        for frozen in self._mine():
            trial = recorded.get(frozen.number)
            if trial and self._is_running(frozen) and self._folder.is_finished(trial):
                self.finished(self._folder.result(trial, self._sweep.metric))

    def next(self) -> Claimed | None:
        if claimed := claim_first(self._folder, self._unfinished()):
            return claimed
        while (suggested := self._adopt() or self._ask()) is not None:
            trial = self._record(suggested)
            if trial.config is not None:
                return claim_first(self._folder, [trial])
        return None

    def is_exhausted(self) -> bool:
        return not self._unfinished() and len(self._study.get_trials(deepcopy=False)) >= (
            self._sweep.trials or 0
        )

    def _unfinished(self) -> list[Trial]:
        return [trial for trial in self._folder.trials() if not self._folder.is_finished(trial)]

    def _adopt(self) -> Any | None:
        """Return a trial that was begun here, or by a process that was killed at once, and has no folder yet."""
        recorded = {trial.number for trial in self._folder.trials()}
        lost_before = datetime.datetime.now() - datetime.timedelta(seconds=_LOST_S)
        for frozen in self._study.get_trials(deepcopy=False):
            home = frozen.user_attrs.get(_HOME)
            is_private = self._sweep.storage is None
            is_lost = home is None and (is_private or frozen.datetime_start < lost_before)
            if self._is_running(frozen) and frozen.number not in recorded and (is_lost or home == self._home):
                return self._optuna.trial.Trial(self._study, frozen._trial_id)
        return None

    def _ask(self) -> Any | None:
        count = len(self._study.get_trials(deepcopy=False))
        if count >= (self._sweep.trials or 0):
            return None
        # A sampler of the same seed would suggest its first values again after each restart, and on each machine.
        seed = zlib.crc32(f"{self._sweep.seed} {count} {self._home}".encode())
        self._study.sampler = self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        asked = self._study.ask()
        if asked.number >= (self._sweep.trials or 0):  # another machine took the last one
            self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
            return None
        return asked

    def _record(self, suggested: Any) -> Trial:
        """Make the folder of a trial; one that the config refuses is over at once."""
        suggested.set_user_attr(_HOME, self._home)
        overrides = {parameter.key.name: parameter.suggest(suggested) for parameter in self._sweep.parameters}
        try:
            return self._folder.add(suggested.number, overrides, self._resolve(overrides))
        except ConfigError as error:
            trial = self._folder.add(suggested.number, overrides, None)
            self._folder.finish(trial, "failed", str(error))
            self.finished(self._folder.result(trial, self._sweep.metric))
            return trial

    def should_prune(self, trial: Trial) -> str | None:
        if self._sweep.metric != "eval_loss":
            return None
        evals = [record for record in read_metrics(trial.folder) if record.get("eval_loss") is not None]
        new = evals[self._reported.get(trial.number, 0) :]
        if not new:
            return None
        frozen = next(one for one in self._mine() if one.number == trial.number)
        if not self._is_running(frozen):
            return None
        running = self._optuna.trial.Trial(self._study, frozen._trial_id)
        for record in new:
            if record["tokens_seen"] not in frozen.intermediate_values:
                running.report(record["eval_loss"], record["tokens_seen"])
        self._reported[trial.number] = len(evals)
        last = evals[-1]
        if not running.should_prune():
            return None
        return (
            f"eval_loss {last['eval_loss']:.4f} at {last['tokens_seen']:,} tokens is above the others' median"
        )

    def finished(self, result: Result) -> None:
        state = self._optuna.trial.TrialState
        states = {"done": state.COMPLETE, "failed": state.FAIL}
        # Diverged counts as pruned: the sampler learns to keep away, where it would ignore a failure.
        told = states.get(result.status, state.PRUNED)
        with contextlib.suppress(ValueError):  # told already, by the same command before it was killed
            self._study.tell(
                result.trial.number, result.value if told == state.COMPLETE else None, state=told
            )
