"""Models and training states of other programs as sources of parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from maxbatch.config.model_forms import model_forms
from maxbatch.config.sections import ModelConfig
from maxbatch.parallel.trees import State
from maxbatch.run.weights.origin import Source
from maxbatch.system.registry import Table, load, names

if TYPE_CHECKING:
    import optax


class ForeignState(Source):
    """A training state of another program, which a run goes on with."""

    @property
    @abstractmethod
    def stated(self) -> str:
        """The key and the path that name it, for messages."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """The updates that the state holds.

        Raises:
          ConfigError: it holds parameters alone, or is damaged.
        """

    @abstractmethod
    def read_state(
        self, config: ModelConfig, abstract_params: State, abstract_opt_state: optax.OptState
    ) -> tuple[State, optax.OptState]:
        """Reads parameters and optimizer state onto the shardings of the abstract ones.

        Raises:
          ConfigError: the state is damaged, or of another model or optimizer.
        """


def open_foreign(path: str | Path) -> tuple[Source, str] | None:
    """Opens the model of another program at a path, and names its form, such as "a Hugging Face
    folder"; None if the path holds none.

    Raises:
      ConfigError: the model is damaged.
    """
    for name, form in model_forms().items():
        if form.holds(path):
            open_at = cast(Callable[[str | Path], Source], load(Table.SOURCES, name))
            return open_at(path), form.phrase
    return None


def open_foreign_state(path: str | Path, key: str) -> ForeignState | None:
    """Opens the training state of another program at a path, which a config key names; None if
    the path holds none.

    Raises:
      ConfigError: the state is damaged.
    """
    forms = model_forms()
    for name in names(Table.STATES):
        if forms[name].holds(path):
            open_at = cast(Callable[[str | Path, str], ForeignState], load(Table.STATES, name))
            return open_at(path, key)
    return None
