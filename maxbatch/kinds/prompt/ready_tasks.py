"""The tasks without a download, by `dataset_type`. No JAX."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from maxbatch.config.sections import READY_TASKS
from maxbatch.rl import arithmetic, sorting


class ReadyTask(NamedTuple):
    """A task without a download."""

    records: Callable[[], list[dict[str, object]]]  # all prompts, in a fixed, well-mixed order
    # draws one of several answers; one is right
    worked_answer: Callable[[Mapping[str, object], random.Random], str]


TASKS = {
    name: ReadyTask(task.records, task.worked_answer)
    for name, task in zip(READY_TASKS, (arithmetic, sorting), strict=True)
}
