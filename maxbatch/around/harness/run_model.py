"""The model of a run between two of its updates, scored on tasks of lm-evaluation-harness."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial

from jax.sharding import Mesh

from maxbatch.around.harness.tasks import Tasks
from maxbatch.around.sampling.completions import Completer
from maxbatch.around.scoring import Scorer
from maxbatch.config.combined import TextConfig
from maxbatch.config.sections import EvaluationConfig
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.parallel.trees import State
from maxbatch.run.folder.metrics_schema import Metric

_STDERR = "_stderr"


class RunTasks:
    """The tasks of `eval_tasks` (`maxbatch.run.observers.EvalTasks`)."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def on_model(
        self,
        config: TextConfig,
        mesh: Mesh,
        tokenizer: Tokenizer,
        context: int,
        end_ids: tuple[int, ...],
        params: State,
    ) -> Callable[[State], dict[str, float]]:
        """Returns the function that scores a run's model, once the tasks can.

        Raises:
          ConfigError: a task cannot score such a model.
        """
        model = RunModel(config, mesh, tokenizer, context, end_ids, params)
        self._tasks.check(model)
        return partial(model.ask, self._tasks)


def open_tasks(config: EvaluationConfig) -> RunTasks:
    """Loads the tasks of `eval_tasks`.

    Raises:
      ConfigError: lm-eval is not installed, or a task is unknown or cannot be loaded.
    """
    names = [name for name in config.eval_tasks.split(",") if name]
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's bars, beside the run's own lines
    return RunTasks(Tasks(names, "eval_tasks=", limit=config.eval_tasks_limit))


class RunModel:
    """The model of a run for the harness, in float32 like `maxbatch evaluate`.

    Its programs are kept between evals.

    Args:
      tokenizer, context, end_ids: as in `maxbatch.around.harness.model.AskedModel`.
      params: of the model, or their shapes; `ask` gives others.
    """

    def __init__(
        self,
        config: TextConfig,
        mesh: Mesh,
        tokenizer: Tokenizer,
        context: int,
        end_ids: tuple[int, ...],
        params: State,
    ) -> None:
        self._config = config.replaced({"dtype": "float32", "attention": "auto"})
        self._mesh, self._params = mesh, params
        self.tokenizer, self.context, self.end_ids = tokenizer, context, end_ids

    def first_ids(self) -> list[int]:
        """Returns the token that a text begins with, if one is put before it."""
        has_answers = self._config.recipe.has_answers
        begins = self.tokenizer.begins_with_bos() if has_answers else self._config.add_bos
        return [self.tokenizer.bos_id] if begins and self.tokenizer.bos_id is not None else []

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self._config, self._config.mesh, self._mesh, self._params)

    @cached_property
    def _completer(self) -> Completer:
        return Completer(self._params, self.tokenizer, self._config, self._mesh, self.context)

    def scorer(self, most_rows: int | None = None) -> Scorer:
        """Returns the function that assigns log-probabilities to tokens, in rows by their
        length.
        """
        return self._scorer

    def completer(self, most_rows: int | None = None) -> Completer:
        """Returns the function that completes prompts, in rows by their length."""
        return self._completer

    def ask(self, tasks: Tasks, params: State) -> dict[str, float]:
        """Scores parameters on tasks; returns figures by metric.

        Raises:
          TrainingError: the parameters give no finite log-probability.
        """
        self._scorer.params = self._completer.params = params
        try:
            return figures(tasks.scores(self, has_errors=False)["results"])
        finally:
            # the run's own may be donated
            self._scorer.params = self._completer.params = self._params


def figures(results: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    """Returns the scores in the harness's `results`, by metric, without standard errors."""
    by_metric = {}
    for task, scores in results.items():
        for name, value in scores.items():
            score, comma, of_filter = name.partition(",")
            if comma and isinstance(value, int | float) and not score.endswith(_STDERR):
                shown = score if of_filter == "none" else name
                by_metric[Metric.EVAL_TASK.of(f"{task}/{shown}")] = (
                    float(value) if math.isfinite(value) else math.nan
                )
    return by_metric
