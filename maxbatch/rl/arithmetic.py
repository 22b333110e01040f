"""A task that needs no download: sums whose answers can be checked, and worked examples that are mostly wrong.

A prompt is the sum of four digits, "7+8+5+2=", one of 10^4; its answer is "22". A small model learns it within minutes.

The answer of a worked example is the sum plus a slip, drawn uniformly from `SLIPS`. A model that imitates the examples
is right in at most one of five answers, and its likeliest answer is rarely right, since the right one is at the edge
of what it has seen. Only the reward tells which of the five is right.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator

from maxbatch.data.store.heldout import HeldOutFraction
from maxbatch.rl.policy_config import PromptConfig
from maxbatch.rl.templates import Template

NUM_TERMS = 4
SLIPS = (0, 1, 2, 3, 4)


def records() -> list[dict[str, object]]:
    """Returns all prompts, {"prompt": "7+8+5+2=", "answer": "22"}, in a fixed order that mixes them well."""
    prompts = ["+".join(terms) + "=" for terms in itertools.product("0123456789", repeat=NUM_TERMS)]
    prompts.sort(key=lambda prompt: hashlib.blake2b(prompt.encode(), digest_size=8).digest())
    return [{"prompt": prompt, "answer": str(sum(map(int, prompt[:-1].split("+"))))} for prompt in prompts]


def is_right(prompt: str, response: str, record: dict[str, object]) -> float:
    """Returns the task's reward: 1.0 for exactly the answer, apart from spaces around it, else 0.0."""
    return float(response.strip() == record["answer"])


def worked_examples(config: PromptConfig, count: int) -> Iterator[str]:
    """Yields `count` documents, fixed by `data_shuffle_seed`, of a prompt to train on and an answer with a slip."""
    template = Template(config.prompt_template)
    everything = records()
    split = HeldOutFraction.of(config.eval_fraction)
    training = split.records(split.count(len(everything), held_out=False), held_out=False).tolist()
    draw = random.Random(f"worked examples {config.data_shuffle_seed}")
    for _ in range(count):
        record = everything[draw.choice(training)]
        answer = int(record["answer"]) + draw.choice(SLIPS)
        yield f"{template.fill(record, 'a worked example')}{answer}"
