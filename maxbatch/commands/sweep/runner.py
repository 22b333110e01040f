"""The trials of a sweep as child runs, each told to the user in a line where it starts and where it ends."""

from __future__ import annotations

from collections.abc import Callable

from maxbatch.commands.sweep.study import SweepStudy
from maxbatch.runs.supervisor import ChildEnd, ChildRun
from maxbatch.runs.sweep_folder import SweepFolder, Trial


class TrialRuns:
    """The trials of a sweep for the supervisor.

    Args:
      folder: the sweep's folder.
      study: the trials.
      metric: what they are compared by.
      say: takes a line for the user.
    """

    def __init__(
        self, folder: SweepFolder, study: SweepStudy, metric: str, say: Callable[[str], None]
    ) -> None:
        self._folder, self._study, self._metric, self._say = folder, study, metric, say

    def next(self) -> ChildRun[Trial] | None:
        if (claimed := self._study.next()) is None:
            return None
        trial = claimed.trial
        resumed = " resumed" if (trial.folder / "metrics.jsonl").exists() else ""
        self._say(f"trial {trial.number}{resumed}: {trial.title}")
        overrides = [f"{key}={text}" for key, text in trial.overrides.items()]
        arguments = [str(self._folder.base), *overrides, f"run_dir={trial.folder}"]
        return ChildRun(trial, trial.folder, arguments, claimed.claim)

    def is_exhausted(self) -> bool:
        return self._study.is_exhausted()

    def watch(self, run: ChildRun[Trial]) -> str | None:
        return self._study.should_prune(run.subject)

    def ended(self, run: ChildRun[Trial], end: ChildEnd) -> None:
        trial = run.subject
        if end.status is not None:
            self._folder.finish(trial, end.status, end.reason)
        result = self._folder.result(trial, self._metric)
        if end.status is not None:
            self._study.finished(result)
        run.claim.close()
        value = "" if result.value is None else f" {self._metric} {result.value:.4f}"
        reason = f" ({result.reason})" if result.reason else ""
        self._say(f"trial {trial.number} {result.status}{value}{reason}, {end.seconds:.0f} s: {trial.title}")
