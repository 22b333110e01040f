"""The tasks that need no download, by their `dataset_type`, and the documents of their warm starts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from maxbatch.data.store.heldout import HeldOutFraction
from maxbatch.rl import arithmetic, sorting
from maxbatch.rl.policy_config import PromptConfig
from maxbatch.rl.templates import Template


class ReadyTask(NamedTuple):
    """A task that needs no download."""

    records: Callable[[], list[dict[str, object]]]  # all prompts, in a fixed order that mixes them well
    worked_answer: Callable[[Mapping[str, object], random.Random], str]  # one of several, by a draw; one is right


READY_TASKS = {
    "arithmetic": ReadyTask(arithmetic.records, arithmetic.worked_answer),
    "sorting": ReadyTask(sorting.records, sorting.worked_answer),
}


def worked_examples(config: PromptConfig, count: int) -> Iterator[str]:
    """Yields `count` documents, fixed by `data_shuffle_seed`, of a prompt to train on and a worked answer."""
    task, template = READY_TASKS[config.dataset_type], Template(config.prompt_template)
    everything = task.records()
    split = HeldOutFraction.of(config.eval_fraction)
    training = split.records(split.count(len(everything), held_out=False), held_out=False).tolist()
    draw = random.Random(f"worked examples {config.data_shuffle_seed}")
    for _ in range(count):
        record = everything[draw.choice(training)]
        yield f"{template.fill(record, 'a worked example')}{task.worked_answer(record, draw)}"
