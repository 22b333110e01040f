"""The interface of a kind of sample to training: its objective. Imports no JAX by itself."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from maxbatch.data.stream.recipe import StreamRecipe

if TYPE_CHECKING:
    from maxbatch.config.combined import ProgramsConfig
    from maxbatch.update.gradients import Objective


class TrainedRecipe(StreamRecipe):
    """A kind of sample in training."""

    @abstractmethod
    def objective(self, config: ProgramsConfig) -> Objective:
        """Returns the loss."""
