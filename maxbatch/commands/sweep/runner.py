"""Runs trials, some at a time, each in a process of its own, until none is left or somebody asks to stop."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from maxbatch.commands.sweep.trials import Claimed, TrialSource
from maxbatch.runs.sweep_folder import SweepFolder, Trial
from maxbatch.system.child_process import last_line, start_child
from maxbatch.system.errors import EXIT_DONE, EXIT_INPUT, EXIT_STOPPED
from maxbatch.system.stopping import Stopping

_POLL_S = 0.1
_GRADIENTS_DIVERGED = "a gradient that is not finite"


@dataclasses.dataclass
class _Running:
    claimed: Claimed
    process: subprocess.Popen[bytes]
    started: float
    is_pruned: bool = False

    @property
    def trial(self) -> Trial:
        return self.claimed.trial


class Runner:
    """Runs a sweep's trials.

    Args:
      folder: the sweep's folder.
      source: gives the trials.
      metric: what they are compared by.
      parallel: trials at a time.
      say: told, in a line, of each trial that starts or ends.
    """

    def __init__(
        self, folder: SweepFolder, source: TrialSource, metric: str, parallel: int, say: Callable[[str], None]
    ) -> None:
        self._folder, self._source, self._metric = folder, source, metric
        self._parallel, self._say = parallel, say
        self._running: list[_Running] = []

    def run(self, stop: Stopping) -> bool:
        """Run until nothing is left (True) or somebody asked to stop and every trial has saved (False)."""
        asked = False
        try:
            while True:
                for running in [one for one in self._running if one.process.poll() is not None]:
                    self._running.remove(running)
                    self._ended(running, stop.is_asked)
                if stop.is_asked and not asked:
                    asked = True
                    self._say(f"{stop.signal_name}: {len(self._running)} trials save and stop")
                    for running in self._running:
                        running.process.terminate()
                if asked and not self._running:
                    return False
                if not asked:
                    self._prune()
                    while len(self._running) < self._parallel and (claimed := self._source.next()):
                        self._start(claimed)
                    if not self._running and self._source.is_exhausted():
                        return True
                time.sleep(_POLL_S)
        finally:
            for running in self._running:
                running.process.kill()
                running.process.wait()

    def _start(self, claimed: Claimed) -> None:
        trial = claimed.trial
        overrides = [f"{key}={text}" for key, text in trial.overrides.items()]
        with open(trial.folder / "log.txt", "ab") as log:
            # The child holds the claim as well: until it is gone, nobody else starts this trial.
            process = start_child(
                ["train", str(self._folder.base), *overrides, f"run_dir={trial.folder}"],
                log, keep_open=[claimed.hold.fileno()],
            )  # fmt: skip
        resumed = " resumed" if (trial.folder / "metrics.jsonl").exists() else ""
        self._say(f"trial {trial.number}{resumed}: {trial.title}")
        self._running.append(_Running(claimed, process, time.monotonic()))

    def _prune(self) -> None:
        for running in self._running:
            reason = None if running.is_pruned else self._source.should_prune(running.trial)
            if reason:
                running.is_pruned = True
                self._folder.finish(
                    running.trial, "pruned", reason
                )  # first: a kill in between must not undo it
                running.process.terminate()

    def _ended(self, running: _Running, is_stopping: bool) -> None:
        trial, code = running.trial, running.process.returncode
        if running.process.stdin:
            running.process.stdin.close()
        if not running.is_pruned:
            status, reason = _judge(code, trial.folder)
            if status != "unfinished" and not (is_stopping and status != "done"):
                self._folder.finish(trial, status, reason)
        result = self._folder.result(trial, self._metric)
        if result.status != "unfinished":
            self._source.finished(result)
        running.claimed.hold.close()
        value = "" if result.value is None else f" {self._metric} {result.value:.4f}"
        reason = f" ({result.reason})" if result.reason else ""
        took = time.monotonic() - running.started
        self._say(f"trial {trial.number} {result.status}{value}{reason}, {took:.0f} s: {trial.title}")


def _judge(code: int, folder: Path) -> tuple[str, str]:
    """Return the status and the reason that a trial's exit code and its log's last line tell."""
    if code == EXIT_DONE:
        return "done", ""
    if code == EXIT_STOPPED:
        return "unfinished", ""
    with open(folder / "log.txt", "rb") as log:
        line = last_line(log)
    if code < 0:
        return "failed", f"killed by {signal.Signals(-code).name}"
    if code != EXIT_INPUT and _GRADIENTS_DIVERGED in line:
        return "diverged", line
    return "failed", line or f"exit code {code}"
