"""Tasks of lm-evaluation-harness on a model: names, patterns, files and folders of tasks, and their scores."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from maxbatch.config.values import nearest_name, shown
from maxbatch.loaded_model import LoadedModel
from maxbatch.system.errors import ConfigError

# The harness's own, so that few-shot examples and shuffled documents are those of its command.
_RANDOM_SEED, _OTHER_SEED = 0, 1234
_BOOTSTRAPS = 1000  # samples for a standard error without a formula; the harness's 100,000 take minutes
_LONGEST_PROBLEM = 400
_TABLES = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples")


def check_installed() -> None:
    """Raises ConfigError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("evaluation needs lm-eval, which is not installed; works: pip install 'maxbatch[eval]'")


def evaluate(
    model: LoadedModel | str | os.PathLike[str],
    tasks: str | Sequence[str],
    *,
    include_path: str | os.PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Returns the scores of a model on tasks of lm-evaluation-harness (the extra `eval`).

    They do not depend on the batch size or on the devices. The model computes in float32 unless it was loaded with a
    `dtype`.

    Args:
      model: a loaded model, or the path of one.
      tasks: names of tasks, groups or tags, patterns of names, files of tasks, or folders of them.
      include_path: a folder of task files whose names `tasks` may use, besides the harness's own.
      num_fewshot: worked examples before each question; None: as each task states.
      limit: most documents of a task; None: all. For a first look, since the scores of a part differ.
      batch_size: rows in one pass; None: by their length.

    Returns:
      The tables of the harness's results: `results` maps a task to its metrics, such as `acc,none` and
      `acc_stderr,none`; besides it `groups`, `group_subtasks`, `versions`, `n-shot`, `higher_is_better`, `n-samples`.

    Raises:
      ConfigError: lm-eval is not installed, a task is unknown or cannot be loaded, or asks for more than the model has.
      TrainingError: the model gives no finite log-probability.
    """
    check_installed()
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not names:
        raise ConfigError("--tasks: must name at least one task; works: --tasks hellaswag")
    model = model if isinstance(model, LoadedModel) else LoadedModel(os.fspath(model))
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # the harness forks for standard errors, and threads run here
    with contextlib.redirect_stdout(sys.stderr):  # what the harness prints is no part of the output
        loaded = _load(names, include_path, num_fewshot)
        from lm_eval import evaluator

        from maxbatch.harness_model import HarnessModel

        answering = HarnessModel(model, batch_size)
        for name, task in loaded["tasks"].items():  # refused before anything is computed
            if task.OUTPUT_TYPE == "generate_until":
                answering.rules(task.config.generation_kwargs or {}, name)
        found = evaluator.evaluate(answering, loaded, limit=limit, bootstrap_iters=_BOOTSTRAPS, log_samples=False)
    assert found is not None, "there is one process"
    return {name: _plain(found[name]) for name in _TABLES if name in found}


def _load(names: Sequence[str], include_path: str | os.PathLike[str] | None, num_fewshot: int | None) -> dict[str, Any]:
    """Returns the loaded tasks and groups.

    Raises:
      ConfigError: one is unknown, or cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    random.seed(_RANDOM_SEED)
    np.random.seed(_OTHER_SEED)
    folders = [os.fspath(path) for path in (include_path, *filter(os.path.isdir, names)) if path is not None]
    for folder in folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"--include-path {shown(folder)}: must be a folder of task files")
    own = TaskManager(include_path=folders, include_defaults=False)
    manager = own
    if any(not _is_place(name) and name not in own.all_tasks for name in names):
        manager = TaskManager(include_path=folders)
    wanted = list(dict.fromkeys(task for name in names for task in _expanded(name, manager)))
    try:
        loaded: dict[str, Any] = manager.load(wanted)
    except Exception as error:  # of a dataset, its network, a file of a task or its code
        problem = " ".join(str(error).split())[:_LONGEST_PROBLEM] or type(error).__name__
        raise ConfigError(f"--tasks {shown(','.join(names))}: cannot be loaded: {problem}") from error
    for name, task in loaded["tasks"].items():
        for is_so, reason in (
            (getattr(task, "UNSAFE_CODE", False), "runs code that the model writes"),
            (getattr(task, "MULTIMODAL", False), "shows images"),
        ):
            if is_so:
                raise ConfigError(f"--tasks {shown(name)}: {reason}, which maxbatch evaluate does not support")
        stated = task.get_config("num_fewshot")
        # A task that states 0 has no examples to give, as in the harness.
        if stated is None or (num_fewshot is not None and stated != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=_OTHER_SEED)
    return loaded


def _is_place(name: str) -> bool:
    return os.path.isdir(name) or os.path.isfile(name)


def _expanded(name: str, manager: Any) -> list[str]:
    """Returns the tasks that a name, a pattern, a file or a folder stands for."""
    if name in manager.all_tasks:
        return [name]
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        return _of_folder(name)
    if found := [task for task in manager.all_tasks if fnmatchcase(task, name)]:
        return found
    nearest = nearest_name(name, manager.all_tasks)
    works = f"; nearest: {nearest}" if nearest else "; works: --tasks FOLDER, a folder of task files"
    raise ConfigError(f"--tasks {shown(name)}: no task, group or tag of lm-evaluation-harness, file or folder{works}")


def _of_folder(folder: str) -> list[str]:
    from lm_eval.tasks import TaskManager

    found: list[str] = TaskManager(include_path=folder, include_defaults=False).all_subtasks
    if not found:
        raise ConfigError(f"--tasks {shown(folder)}: has no task; works: a folder of YAML files that state task:")
    return found


def _plain(value: Any) -> Any:
    """Returns a table of the results in JSON's types."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        return value.item()
    return value
