"""What a kind of sample knows of training: its objective and what is recorded of it. Imports no JAX by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from maxbatch.data.stream.recipe import StreamRecipe

if TYPE_CHECKING:
    from maxbatch.training.update.gradients import Objective


class TrainedRecipe(StreamRecipe):
    """A kind of sample as training knows it; by default each token is predicted from those before it.

    Attributes:
      means: sums of its objective that a record of an update holds as means over the loss weight, by their metrics.
      counted: what its batch counts in a line of progress; "": rows.
      takes_parts: whether a user may bring a model, a loss or a stream of their own.
      answers_evals: whether each eval writes answers to held-out questions.
    """

    means: ClassVar[tuple[str, ...]] = ()
    counted: ClassVar[str] = ""
    takes_parts: ClassVar[bool] = True
    answers_evals: ClassVar[bool] = False

    def objective(self, config: Mapping[str, Any]) -> Objective:
        """Returns the loss that a whole config states."""
        from maxbatch.training.update.gradients import NEXT_TOKEN

        return NEXT_TOKEN
