"""Tasks of lm-evaluation-harness: names, patterns, files and folders of tasks, and the scores of a
model on them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.errors import JaxRuntimeError

from maxbatch.around.harness.task_files import check_task_files
from maxbatch.config.values import nearest_name, shown
from maxbatch.data.tokenizers.chat_prompts import ChatPrompts
from maxbatch.system.errors import ConfigError, TrainingError, one_line

if TYPE_CHECKING:
    from maxbatch.around.harness.model import AskedModel

# The harness's own seeds, for the same few-shot examples and shuffled documents as its command.
_RANDOM_SEED, _OTHER_SEED = 0, 1234
# samples for a standard error without a formula; the harness's 100,000 take minutes
_BOOTSTRAPS = 1000
_LONGEST_PROBLEM = 400
_TABLES = (
    "results",
    "groups",
    "group_subtasks",
    "versions",
    "n-shot",
    "higher_is_better",
    "n-samples",
)


def check_installed() -> None:
    """Raises ConfigError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "evaluation needs lm-eval, which is not installed; works: pip install 'maxbatch[eval]'"
        )


class Tasks:
    """Loaded tasks; scores do not depend on previous scoring.

    Args:
      names: names or patterns of tasks, groups or tags, task files, or folders of them.
      option: the flag or key that states them, for messages.
      include_path: a folder of further task files that `names` may use.
      num_fewshot: worked examples before each question; None: as each task states.
      limit: most documents of a task; None: all.

    Raises:
      ConfigError: lm-eval is not installed, or a task is unknown or cannot be loaded.
    """

    def __init__(
        self,
        names: Sequence[str],
        option: str,
        include_path: str | os.PathLike[str] | None = None,
        num_fewshot: int | None = None,
        limit: int | None = None,
    ) -> None:
        check_installed()
        # the harness forks for standard errors, and threads run here
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        self._limit, self._stated = limit, f"{option}{shown(','.join(names))}"
        with _apart(), _without_remarks():
            self._loaded = load_tasks(names, option, include_path, num_fewshot)

    def check(self, model: AskedModel) -> None:
        """Raises ConfigError for a task with completions beyond the model's context."""
        from maxbatch.around.harness.model import HarnessModel

        answering = HarnessModel(model)
        for name, task in self._loaded["tasks"].items():
            if task.OUTPUT_TYPE == "generate_until":
                answering.rules(task.config.generation_kwargs or {}, name)

    def scores(
        self,
        model: AskedModel,
        batch_size: int | None = None,
        has_errors: bool = True,
        chat: ChatPrompts | None = None,
    ) -> dict[str, Any]:
        """Returns the tables of the harness's results.

        Args:
          batch_size: rows in one pass; None: by their length.
          chat: the chat template for requests, each few-shot example as two messages; None: none.

        Raises:
          ConfigError: a task's files or code do not fit its documents.
          TrainingError: the model gives no finite log-probability.
        """
        with _apart():
            from lm_eval import evaluator

            from maxbatch.around.harness.model import HarnessModel

            for task in self._loaded["tasks"].values():
                task.set_fewshot_seed(seed=_OTHER_SEED)  # the same examples as the first time
            try:
                results = evaluator.evaluate(
                    HarnessModel(model, batch_size, chat),
                    self._loaded,
                    apply_chat_template=chat is not None,
                    fewshot_as_multiturn=chat is not None,
                    limit=self._limit,
                    bootstrap_iters=_BOOTSTRAPS if has_errors else 0,
                    log_samples=False,
                )
            except (ConfigError, TrainingError, JaxRuntimeError):
                raise
            except Exception as error:  # in a task's templates or code
                raise ConfigError(
                    f"{self._stated}: cannot be scored: {one_line(error, _LONGEST_PROBLEM)}"
                ) from error
        assert results is not None, "there is one process"
        return {name: _plain(results[name]) for name in _TABLES if name in results}


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Suppresses the harness's output, and isolates its random numbers."""
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Suppresses the harness's logs about metrics that a task only names."""
    logger = logging.getLogger("lm_eval.api.task")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def load_tasks(
    names: Sequence[str],
    option: str,
    include_path: str | os.PathLike[str] | None,
    num_fewshot: int | None,
) -> dict[str, Any]:
    """Returns the loaded tasks and groups.

    Raises:
      ConfigError: one is unknown, or cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    random.seed(_RANDOM_SEED)
    np.random.seed(_OTHER_SEED)
    folders = [
        os.fspath(path)
        for path in (include_path, *filter(os.path.isdir, names))
        if path is not None
    ]
    for folder in folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"--include-path {shown(folder)}: must be a folder of task files")
    check_task_files([*folders, *filter(os.path.isfile, names)])
    of_folders = TaskManager(include_path=folders, include_defaults=False)
    manager = of_folders
    if any(not _is_place(name) and name not in of_folders.all_tasks for name in names):
        manager = TaskManager(include_path=folders)
    wanted = list(
        dict.fromkeys(task for name in names for task in _expanded(name, option, manager))
    )
    try:
        loaded: dict[str, Any] = manager.load(wanted)
    except Exception as error:  # in a dataset, its network, a task's file or its code
        raise ConfigError(
            f"{option}{shown(','.join(names))}: cannot be loaded: "
            f"{one_line(error, _LONGEST_PROBLEM)}"
        ) from error
    for name, task in loaded["tasks"].items():
        for is_so, reason in (
            (getattr(task, "UNSAFE_CODE", False), "runs code that the model writes"),
            (getattr(task, "MULTIMODAL", False), "shows images"),
        ):
            if is_so:
                raise ConfigError(f"{option}{shown(name)}: {reason}, which is not supported")
        shots = task.get_config("num_fewshot")
        # A task with 0 has no examples to give, as in the harness.
        if shots is None or (num_fewshot is not None and shots != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=_OTHER_SEED)
    return loaded


def _is_place(name: str) -> bool:
    return os.path.isdir(name) or os.path.isfile(name)


def _expanded(name: str, option: str, manager: Any) -> list[str]:
    """Expands a name, a pattern, a file or a folder to tasks."""
    if name in manager.all_tasks:
        return [name]
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        return _of_folder(name, option)
    if tasks := [task for task in manager.all_tasks if fnmatchcase(task, name)]:
        return tasks
    nearest = nearest_name(name, manager.all_tasks)
    works = (
        f"; nearest: {nearest}" if nearest else f"; works: {option}FOLDER, a folder of task files"
    )
    raise ConfigError(
        f"{option}{shown(name)}: no task, group or tag of lm-evaluation-harness, file or "
        f"folder{works}"
    )


def _of_folder(folder: str, option: str) -> list[str]:
    from lm_eval.tasks import TaskManager

    tasks: list[str] = TaskManager(include_path=folder, include_defaults=False).all_subtasks
    if not tasks:
        raise ConfigError(
            f"{option}{shown(folder)}: has no task; works: a folder of YAML files that state task:"
        )
    return tasks


def _plain(value: object) -> object:
    """Converts a table of results to JSON's types."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value
