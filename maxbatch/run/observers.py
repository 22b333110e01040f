"""Observers of a run's model: tasks that its evals score, answers to records, and a text at its
end.

None of them changes the run. They stand around the core, which loads one when the config asks for
it (`Table.OBSERVERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from jax.sharding import Mesh

from maxbatch.config.combined import DecoderConfig, TextConfig
from maxbatch.config.sections import EvaluationConfig
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.parallel.trees import State
from maxbatch.run.record.questions import Answers, Question
from maxbatch.system.registry import Table, load


class ScoreTasks(Protocol):
    """Scores a model on tasks."""

    def __call__(self, params: State) -> Mapping[str, float]:
        """Returns the scores by metric.

        Raises:
          ConfigError: a task cannot score the model.
          TrainingError: the parameters give no finite log-probability.
        """


class EvalTasks(Protocol):
    """The tasks that `eval_tasks` states, loaded."""

    def on_model(
        self,
        config: TextConfig,
        mesh: Mesh,
        tokenizer: Tokenizer,
        context: int,
        end_ids: tuple[int, ...],
        params: State,
    ) -> ScoreTasks:
        """Returns the function that scores a run's model; its programs are kept between evals.

        Args:
          context: the most tokens of a text.
          end_ids: tokens that end a text.
          params: the shapes of the model's parameters.

        Raises:
          ConfigError: a task cannot score such a model.
        """


def open_tasks(config: EvaluationConfig) -> EvalTasks:
    """Loads the tasks of `eval_tasks`.

    Raises:
      ConfigError: lm-eval is not installed, or a task is unknown or cannot be loaded.
    """
    opened = cast(Callable[[EvaluationConfig], EvalTasks], load(Table.OBSERVERS, "tasks"))
    return opened(config)


def open_answers(
    config: DecoderConfig,
    tokenizer: Tokenizer,
    mesh: Mesh,
    end_ids: tuple[int, ...],
    questions: Sequence[Question],
) -> Answers:
    """Returns the model's answers to questions.

    Args:
      end_ids: tokens that end an answer, besides the tokenizer's and its chat template's.
    """
    opened = cast(Callable[..., Answers], load(Table.OBSERVERS, "answers"))
    return opened(config, tokenizer, mesh, end_ids, questions)


def continued_text(
    params: State,
    tokenizer: Tokenizer,
    prompt: str,
    config: TextConfig,
    end_ids: tuple[int, ...],
    mesh: Mesh,
) -> str:
    """Returns a prompt and its continuation by the model.

    Args:
      end_ids: tokens that end a text, besides the tokenizer's.

    Raises:
      TrainingError: the parameters are not finite.
    """
    continued = cast(Callable[..., str], load(Table.OBSERVERS, "text"))
    return continued(params, tokenizer, prompt, config, end_ids, mesh)
