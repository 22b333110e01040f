"""`maxbatch.evaluate`: the scores of a model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from maxbatch.around.harness.tasks import Tasks, check_installed
from maxbatch.around.loaded_model import LoadedModel, refuse_module
from maxbatch.data.tokenizers.chat_prompts import ChatPrompts
from maxbatch.system.errors import ConfigError


def evaluate(
    model: LoadedModel | str | os.PathLike[str],
    tasks: str | Sequence[str],
    *,
    include_path: str | os.PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    apply_chat_template: bool = False,
) -> dict[str, Any]:
    """Returns the scores of a model on tasks of lm-evaluation-harness (the extra `eval`).

    They do not depend on the batch size or on the devices. The model computes in float32 unless it
    was loaded with a `dtype`.

    Args:
      model: a loaded model, or the path of one.
      tasks: names of tasks, groups or tags, patterns of names, files of tasks, or folders of them.
      include_path: a folder of task files whose names `tasks` may use, besides the harness's own.
      num_fewshot: worked examples before each question; None: as each task states.
      limit: most documents of a task; None: all. For a first look, since the scores of a part
        differ.
      batch_size: rows in one pass; None: by their length.
      apply_chat_template: whether requests are written in the chat template of the model's
        tokenizer, each few-shot example as two messages.

    Returns:
      The tables of the harness's results: `results` maps a task to its metrics, such as `acc,none`
      and `acc_stderr,none`; besides it `groups`, `group_subtasks`, `versions`, `n-shot`,
      `higher_is_better`, `n-samples`.

    Raises:
      ConfigError: lm-eval is not installed, a task is unknown, cannot be loaded or asks for more
        than the model has, or the tokenizer has no chat template.
      TrainingError: the model gives no finite log-probability.
    """
    refuse_module(model)  # before a module's user is asked to install what it cannot use
    check_installed()
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not names:
        raise ConfigError("--tasks: must name at least one task; works: --tasks hellaswag")
    model = model if isinstance(model, LoadedModel) else LoadedModel(os.fspath(model))
    loaded = Tasks(names, "--tasks ", include_path, num_fewshot, limit)
    loaded.check(model)  # before anything is computed
    return loaded.scores(
        model, batch_size, chat=ChatPrompts(model.tokenizer) if apply_chat_template else None
    )
