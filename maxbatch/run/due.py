"""The actions that are due after an update, as a value; no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from maxbatch.plan.rampup import PlannedStep
from maxbatch.run.folder.position import BestEval


class Due(NamedTuple):
    """The actions that are due after an update, in the order in which they are taken."""

    compiles: bool = False  # the programs that training needs after its first update
    evaluates: bool = False
    saves: bool = False  # a checkpoint
    saves_extra: bool = False  # a checkpoint for its eval loss alone
    saves_locally: bool = False
    ends_early: bool = False  # the run, since its eval loss no longer falls

    @property
    def pauses(self) -> bool:
        """Whether the update must be done and recorded before the next one is dispatched."""
        return any(self)


@dataclass(frozen=True)
class Schedule:
    """The periods of a run's actions, in updates.

    Attributes:
      first_step: the first update of this start.
      total_steps: of the whole run, whose last update saves and evaluates.
      checkpoint_period: updates between checkpoints.
      eval_interval: updates between evals; None if there is nothing to evaluate.
      local_checkpoint_period: updates between local checkpoints; None: there are none.
      patience: evals in a row without a lower loss that end the run; None: none do.
      keeps_best: whether the state with the lowest eval loss is saved too.
    """

    first_step: int
    total_steps: int
    checkpoint_period: int
    eval_interval: int | None = None
    local_checkpoint_period: int | None = None
    patience: int | None = None
    keeps_best: bool = False

    def after(self, update: PlannedStep, last_end: int) -> Due:
        """Returns the work that is due after an update, before its eval.

        A run is saved and evaluated only where a batch ends: several updates may share one.

        Args:
          last_end: the last update before it that ended its batch; 0 at the start of the run.
        """
        step = update.step
        compiles, is_last = step == self.first_step, step == self.total_steps
        if not update.ends_batch:
            return Due(compiles=compiles)
        return Due(
            compiles=compiles,
            evaluates=self.eval_interval is not None
            and (is_last or is_due(self.eval_interval, last_end, step)),
            saves=is_last or is_due(self.checkpoint_period, last_end, step),
            # The last state is in `run_dir`, and a local one beside it would be of no use.
            saves_locally=self.local_checkpoint_period is not None
            and not is_last
            and is_due(self.local_checkpoint_period, last_end, step),
        )

    def after_eval(self, due: Due, step: int, best: BestEval) -> Due:
        """Returns the work that is due after an update whose eval has ended.

        Args:
          due: the work that was due before the eval.
          step: the number of the update.
          best: the lowest eval loss, this eval included.
        """
        ends_early = has_stalled(best, self.patience)
        saves = due.saves or ends_early
        return due._replace(
            saves=saves,
            saves_extra=not saves and self.keeps_best and best.step == step,
            saves_locally=due.saves_locally and not ends_early,
            ends_early=ends_early,
        )


def has_stalled(best: BestEval, patience: int | None) -> bool:
    """Returns whether the eval loss has not fallen for `early_stopping_patience` evals in a row."""
    return patience is not None and best.evals_since >= patience


def is_due(period: int, last_end: int, step: int) -> bool:
    """Returns whether an action of every `period` updates is due after `step` updates.

    A run pauses only where a batch ends, the last time after `last_end` updates. A multiple of the
    period since then makes it due.
    """
    return step // period > last_end // period
