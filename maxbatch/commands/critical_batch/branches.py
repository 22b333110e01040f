"""The branches on disk, and their training: each an ordinary run folder, trained in a process of its own.

RUN/critical-batch/sqrt-4096/step-400-batch-64/
    config.yml, metrics.jsonl   as of every run; its first update is 401
    checkpoints/                starts as hard links to the fork; removed once the branch is done
    log.txt                     what the training printed
    outcome.json                how it ended, once it did
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from maxbatch.commands.critical_batch.critical_size import Chunk, last_chunks
from maxbatch.commands.critical_batch.measured_run import MeasuredRun
from maxbatch.commands.critical_batch.plan import Branch, Plan
from maxbatch.config.loading import dump_config, load_config
from maxbatch.runs.metrics import read_metrics
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.child_process import last_line, start_child
from maxbatch.system.errors import EXIT_DONE, EXIT_INPUT, EXIT_STOPPED, ConfigError, TrainingError
from maxbatch.system.locks import take_lock
from maxbatch.system.stopping import Stopping

_POLL_S = 0.2
_LOCK_S = 20  # for the branch of a command that was killed to end
_DIVERGED = "a gradient that is not finite"


def locked(folder: Path) -> BinaryIO:
    """Returns the lock on a folder, which is free once this process and its branch have closed it.

    Raises:
      ConfigError: another command measures in it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder / ".lock", _LOCK_S)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None
    if lock is None:
        raise ConfigError(f"{folder}: another command measures in it; wait for it")
    return lock


class Branches:
    """The branches of a plan.

    Args:
      run: the run that they fork from.
      plan: what is measured.
      folder: RUN/critical-batch.
      lock: held while a branch trains, by its process too.
      train_flags: flags of `maxbatch train` that every branch gets.
    """

    def __init__(
        self, run: MeasuredRun, plan: Plan, folder: Path, lock: BinaryIO, train_flags: Sequence[str]
    ) -> None:
        self._run, self._plan, self._lock, self._flags = run, plan, lock, train_flags
        self._folder = folder / f"{plan.scaling}-{plan.samples}"
        self.all = [branch for fork in plan.forks for branch in plan.branches(fork)]

    def folder(self, branch: Branch) -> Path:
        return self._folder / branch.name

    def is_done(self, branch: Branch) -> bool:
        return (self.folder(branch) / "outcome.json").exists()

    def left(self) -> list[Branch]:
        """Return the branches that are still to be trained, some of them half way."""
        return [branch for branch in self.all if not self.is_done(branch)]

    def samples_done(self, branch: Branch) -> int:
        """Return how many of its samples a branch was trained on."""
        if self.is_done(branch):
            return branch.samples
        records = read_metrics(self.folder(branch))
        return records[-1]["samples_seen"] - branch.fork.samples_seen if records else 0

    def chunks(self, branch: Branch) -> list[Chunk] | None:
        """Return the losses at the end of a branch that is done; None where it diverged.

        Raises:
          TrainingError: its metrics do not cover its end.
        """
        outcome = json.loads((self.folder(branch) / "outcome.json").read_text())
        return None if outcome["status"] == "diverged" else self._last_chunks(branch)

    def _last_chunks(self, branch: Branch) -> list[Chunk] | None:
        records = [r for r in read_metrics(self.folder(branch)) if r["step"] > branch.fork.step]
        first = branch.end - self._plan.compared
        updates = branch.samples // branch.batch_size
        try:
            if [r["step"] - branch.fork.step for r in records] != list(range(1, updates + 1)):
                raise ValueError(f"there are {len(records)} updates instead of {updates}")
            return last_chunks(records, first, branch.end, self._plan.chunk)
        except ValueError as error:
            folder = self.folder(branch)
            raise TrainingError(f"{folder}: {error}; remove this folder and run the command again") from None

    def fork(self) -> None:
        """Give every branch that has not begun its config and its checkpoint.

        All at once and before the first one trains: a run that goes on removes its old checkpoints.

        Raises:
          ConfigError: a checkpoint is gone, or the config of a branch is refused.
        """
        for branch in self.all:
            self._check_origin(branch)
        for branch in self.left():
            folder = self.folder(branch)
            if not any(path.name.isdecimal() for path in folder.glob("checkpoints/*")):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                config = load_config(self._run.path / "config.yml", self.overrides(branch))
                write_atomically(folder / "config.yml", dump_config(config))
                write_atomically(folder / "branch.json", json.dumps(dataclasses.asdict(branch)) + "\n")
                self._link_checkpoint(branch.fork.step, folder)

    def _check_origin(self, branch: Branch) -> None:
        path = self.folder(branch) / "branch.json"
        if path.exists() and json.loads(path.read_text()) != dataclasses.asdict(branch):
            raise ConfigError(
                f"{path.parent}: was forked from another run of this name; remove {self._folder} to measure anew"
            )

    def _link_checkpoint(self, step: int, folder: Path) -> None:
        source, linking = self._run.path / "checkpoints" / str(step), folder / ".linking"
        try:
            shutil.copytree(source, linking, copy_function=_link_or_copy)
        except (OSError, shutil.Error) as error:
            raise ConfigError(
                f"{source}: cannot be forked ({error}); name others with --checkpoints"
            ) from None
        (folder / "checkpoints").mkdir()
        linking.rename(folder / "checkpoints" / str(step))

    def overrides(self, branch: Branch) -> list[str]:
        """Return what the config of a branch states over the run's."""
        fork, rule = branch.fork, self._plan.scaling
        updates = branch.samples // branch.batch_size
        return [
            f"run_dir={self.folder(branch)}",
            f"global_batch_size={branch.batch_size}",
            f"train_samples={branch.end}",
            # the rate at the fork is that of the fork's batch, whatever the reference
            f"learning_rate={fork.learning_rate / self._run.scale(fork.batch_size, rule)!r}",
            f"learning_rate_scaling={rule}",
            f"reference_batch_size={self._run.reference_batch_size}",
            "learning_rate_schedule=constant",
            "warmup_steps_fraction=0",
            "enable_checkpointing=true",
            f"checkpoint_period={-(-updates // 3)}",
            "max_num_checkpoints_to_keep=1",
            "eval_interval=-1",
            "generate_prompt=",
            "profile_steps=",
            "load_parameters_path=",
            "expansion_factor_real_data=-1",
        ]

    def train(self, stop: Stopping, progress: Callable[[Branch, int], None]) -> bool:
        """Train what is left, one after the other.

        Args:
          stop: says whether to stop.
          progress: told of a branch and its samples, some times a second and when it ends.

        Returns:
          Whether all are done; False where somebody asked to stop.

        Raises:
          ConfigError, TrainingError: a branch failed; one that diverged has not.
        """
        left = self.left()
        while left and not stop.is_asked and self._train(left[0], stop, progress):
            left.pop(0)
        return not left

    def _train(self, branch: Branch, stop: Stopping, progress: Callable[[Branch, int], None]) -> bool:
        folder = self.folder(branch)
        arguments = ["train", str(folder / "config.yml"), *self.overrides(branch), *self._flags]
        with open(folder / "log.txt", "ab") as log:
            process = start_child(arguments, log, keep_open=[self._lock.fileno()])
        try:
            self._watch(process, branch, stop, progress)
        finally:
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
        return self._ended(branch, process.returncode)

    def _watch(
        self, process: subprocess.Popen[bytes], branch: Branch, stop: Stopping,
        progress: Callable[[Branch, int], None],
    ) -> None:  # fmt: skip
        told, seen = False, -1
        metrics = self.folder(branch) / "metrics.jsonl"
        while process.poll() is None:
            if stop.is_asked and not told:
                told = True
                process.terminate()
            size = metrics.stat().st_size if metrics.exists() else 0
            if size != seen:
                seen = size
                progress(branch, self.samples_done(branch))
            time.sleep(_POLL_S)

    def _ended(self, branch: Branch, code: int) -> bool:
        folder = self.folder(branch)
        if code == EXIT_STOPPED:
            return False
        with open(folder / "log.txt", "rb") as log:
            line = last_line(log)
        if code == EXIT_DONE:
            status = "diverged" if self._last_chunks(branch) is None else "done"
        elif code > 0 and code != EXIT_INPUT and _DIVERGED in line:
            status = "diverged"
        elif code < 0:
            name = signal.Signals(-code).name
            raise TrainingError(f"{folder}: its process was killed by {name}; the same command goes on")
        else:
            error = ConfigError if code == EXIT_INPUT else TrainingError
            raise error(f"{folder}: {line or f'exit code {code}'}")
        outcome: dict[str, Any] = {"status": status, "reason": line if status == "diverged" else ""}
        write_atomically(folder / "outcome.json", json.dumps(outcome) + "\n")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return True


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
