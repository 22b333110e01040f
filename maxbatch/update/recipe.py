"""A kind of sample in training: its objective, and its metrics. Imports no JAX by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from maxbatch.data.stream.recipe import StreamRecipe

if TYPE_CHECKING:
    from maxbatch.config.combined import ProgramsConfig
    from maxbatch.update.gradients import Objective


class TrainedRecipe(StreamRecipe):
    """A kind of sample in training; the default predicts each token from the previous ones.

    Attributes:
      means: sums of its objective that are recorded as means over the loss weight, by metric.
      counted: the unit of a batch in lines of progress; "": rows.
      takes_parts: whether a user's own model, loss or stream is possible.
      answers_evals: whether each eval writes answers to held-out questions.
    """

    means: ClassVar[tuple[str, ...]] = ()
    counted: ClassVar[str] = ""
    takes_parts: ClassVar[bool] = True
    answers_evals: ClassVar[bool] = False

    def objective(self, config: ProgramsConfig) -> Objective:
        """Returns the loss."""
        from maxbatch.update.gradients import NEXT_TOKEN

        return NEXT_TOKEN
