"""The branches of a measurement on disk, each an ordinary run folder.

RUN/critical-batch/sqrt-4096/step-400-batch-64/     (sqrt-4096-decay with --decay)
    config.yml, metrics.jsonl   as of every fork: lines 1 to 400 are the run's, 401 is the branch's
    checkpoints/                starts with links to the run's; removed once the branch is done
    branch.json                 the checkpoint and the batch
    log.txt                     the output of the training
    outcome.json                how the branch ended
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console

from maxbatch.around.child_runs.supervisor import ChildEnd, ChildRun
from maxbatch.around.critical_batch.critical_size import Chunk, last_chunks
from maxbatch.around.critical_batch.measured_run import MeasuredRun
from maxbatch.around.critical_batch.plan import Branch, MeasurementPlan
from maxbatch.config.loading import dump_config, load_config
from maxbatch.run.folder.fork import Fork
from maxbatch.run.folder.json_file import read_json
from maxbatch.run.folder.metrics import METRICS_FILE, read_metrics, scan_metrics
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.outcome import RecordedOutcome, Status, read_outcome, write_outcome
from maxbatch.run.folder.position import committed_steps
from maxbatch.system.errors import EXIT_INPUT, ConfigError, PassingFault, TrainingError
from maxbatch.system.storage.storage import AnyPath, remove_tree
from maxbatch.system.terminal.bars import LinesAboveBar

BRANCH_FILE = "branch.json"


class Branches:
    """The branches of a plan, which fork from a run, in `folder`: RUN/critical-batch."""

    def __init__(self, run: MeasuredRun, plan: MeasurementPlan, folder: AnyPath) -> None:
        self._run, self._plan = run, plan
        self._folder = folder / f"{plan.scaling}-{plan.samples}{'-decay' if plan.decays else ''}"
        self.all = [branch for fork in plan.forks for branch in plan.branches(fork)]

    def folder(self, branch: Branch) -> AnyPath:
        return self._folder / branch.name

    def is_done(self, branch: Branch) -> bool:
        return read_outcome(self.folder(branch)) is not None

    def left(self) -> list[Branch]:
        return [branch for branch in self.all if not self.is_done(branch)]

    def samples_done(self, branch: Branch) -> int:
        if self.is_done(branch):
            return branch.samples
        records = scan_metrics(self.folder(branch)).records
        return records[-1][Metric.SAMPLES_SEEN] - branch.fork.samples_seen if records else 0

    def finish(self, branch: Branch, status: Status, reason: str) -> None:
        """Records the end of a branch and removes its checkpoints; without finite last losses it
        diverged.
        """
        if status == Status.DONE and self._last_chunks(branch) is None:
            status, reason = Status.DIVERGED, "its last losses are not finite"
        write_outcome(self.folder(branch), RecordedOutcome(status, reason))
        remove_tree(self.folder(branch) / "checkpoints")

    def chunks(self, branch: Branch) -> list[Chunk] | None:
        """Returns the losses at the end of a branch that is done; None for one that diverged."""
        outcome = read_outcome(self.folder(branch))
        return None if outcome and outcome.status == Status.DIVERGED else self._last_chunks(branch)

    def _last_chunks(self, branch: Branch) -> list[Chunk] | None:
        folder, first = self.folder(branch), branch.fork.step + 1
        records = [record for record in read_metrics(folder) if record[Metric.STEP] >= first]
        try:
            in_order = all(
                record[Metric.STEP] == number for number, record in enumerate(records, first)
            )
            if len(records) != branch.updates or not in_order:
                raise ValueError(f"there are {len(records)} updates instead of {branch.updates}")
            return last_chunks(
                records, branch.end - self._plan.compared, branch.end, self._plan.chunk
            )
        except ValueError as error:
            raise TrainingError(
                f"{folder}: {error}; remove this folder and run the command again"
            ) from None

    def fork(self) -> None:
        """Writes the config and the checkpoint of every branch that has not begun.

        All are written before the first one trains, because a run that still trains removes its old
        checkpoints.
        """
        for branch in self.all:
            origin = self.folder(branch) / BRANCH_FILE
            if read_json(origin, "remove its folder", dict) not in (
                None,
                dataclasses.asdict(branch),
            ):
                rule = (
                    f"was forked from another run of this name; remove {self._folder} to measure "
                    "anew"
                )
                raise ConfigError(f"{origin.parent}: {rule}")
        for branch in self.left():
            folder = self.folder(branch)
            if not committed_steps(folder):
                remove_tree(folder)
                config = load_config(str(self._run.path / "config.yml"), self.overrides(branch))
                fork = Fork.at(self._run.path, branch.fork.step, _other_checkpoints)
                facts = json.dumps(dataclasses.asdict(branch), indent=1) + "\n"
                fork.write(folder, dump_config(config), {BRANCH_FILE: facts.encode()})

    def overrides(self, branch: Branch) -> list[str]:
        """Returns the keys in which the config of a branch differs from the run's."""
        fork, rule = branch.fork, self._plan.scaling
        return [
            f"run_dir={self.folder(branch)}",
            f"global_batch_size={branch.batch_size}",
            f"train_samples={branch.end}",
            # the rate at the fork belongs to the fork's batch, whatever the reference
            f"learning_rate={fork.learning_rate / self._run.scale(fork.batch_size, rule)!r}",
            f"learning_rate_scaling={rule}",
            f"reference_batch_size={self._run.reference_batch_size}",
            *self._schedule(branch),
            "warmup_steps_fraction=0",
            "enable_checkpointing=true",
            f"checkpoint_period={-(-branch.updates // 3)}",
            "max_num_checkpoints_to_keep=1",
            "keep_best_checkpoint=false",
            "eval_interval=-1",
            "eval_tasks=",
            "eval_tasks_limit=null",
            "early_stopping_patience=null",
            "generate_prompt=",
            "profile_steps=",
            "load_parameters_path=",
            "load_full_state_path=",
            "expansion_factor_real_data=-1",
        ]

    def _schedule(self, branch: Branch) -> list[str]:
        """Returns the keys of a rate that is constant, or falls to 0 from the fork to the end of
        the branch.
        """
        if not self._plan.decays:
            return ["learning_rate_schedule=constant"]
        share = f"wsd_decay_steps_fraction={branch.samples / branch.end!r}"
        return ["learning_rate_schedule=wsd", share, "learning_rate_final_fraction=0"]


def _other_checkpoints(nearest: list[int]) -> str:
    return "; name others with --checkpoints"


class BranchRuns:
    """The branches of a plan for the supervisor; each is trained with `train_flags`."""

    def __init__(
        self, branches: Branches, train_flags: Sequence[str], progress: BranchProgress
    ) -> None:
        self._branches, self._flags, self._progress = branches, train_flags, progress
        self._left = branches.left()
        self._num_bytes = -1  # of the metrics that were shown last

    def next(self) -> ChildRun[Branch] | None:
        if not self._left:
            return None
        branch = self._left[0]
        folder = self._branches.folder(branch)
        arguments = [str(folder / "config.yml"), *self._branches.overrides(branch), *self._flags]
        return ChildRun(branch, folder, arguments)

    def is_exhausted(self) -> bool:
        return not self._left

    def watch(self, run: ChildRun[Branch]) -> None:
        metrics = run.run_dir / METRICS_FILE
        num_bytes = metrics.stat().st_size if metrics.exists() else 0
        if num_bytes != self._num_bytes:
            self._num_bytes = num_bytes
            self._progress.train(run.subject, self._branches.samples_done(run.subject))

    def ended(self, run: ChildRun[Branch], end: ChildEnd) -> None:
        """Records a branch that is done or diverged."""
        if end.status is None and end.reason:
            raise PassingFault(f"{run.run_dir}: {end.reason}")
        elif end.status is None:  # only this branch was stopped
            self._left = []
        elif end.exit_code < 0:
            raise TrainingError(
                f"{run.run_dir}: its process was {end.reason}; the same command continues"
            )
        elif end.status == Status.FAILED:
            error = ConfigError if end.exit_code == EXIT_INPUT else TrainingError
            raise error(f"{run.run_dir}: {end.reason}")
        else:
            self._branches.finish(run.subject, end.status, end.reason)
            self._left.pop(0)


class BranchProgress(LinesAboveBar):
    """The progress of all branches: a bar on a terminal, elsewhere a line per branch."""

    def __init__(self, console: Console, branches: Branches) -> None:
        self._branches = branches
        self._current: Branch | None = None
        super().__init__(
            console, sum(branch.samples for branch in branches.all), self._samples_done()
        )

    def _samples_done(self) -> int:
        return sum(
            branch.samples for branch in self._branches.all if self._branches.is_done(branch)
        )

    def train(self, branch: Branch, samples: int) -> None:
        """Shows the branch that trains and how many of its samples it was trained on."""
        index = self._branches.all.index(branch) + 1
        name = (
            f"branch {index}/{len(self._branches.all)}: step {branch.fork.step:,}, batch "
            f"{branch.batch_size:,}"
        )
        if self._bar.disable and branch != self._current:
            self.say(name + (f", from sample {samples:,} on" if samples else ""))
        self.show(self._samples_done() + samples, name)
        self._current = branch
