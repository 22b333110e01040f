"""The task that needs no download: sums with a verifiable answer, and a pupil who imitates without knowing.

A prompt is the sum of four digits, "7+8+5+2=", each of the 10^4 there are; its answer is "22". A small model learns
it within a minute or two: a sum does not depend on the order, so that paying the digits equal attention is a start,
and the size of the answer is learned before its digits.

The worked examples are those of a careless pupil: the answer is the sum plus d, d drawn from `SLIPS`, every one as
likely. A model that imitates them learns to add and to slip, and is right in at most one answer of five; its likeliest
answer is rarely right, since the right one is at the edge of what it has seen. Which of the five is right, only the
reward says.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from maxbatch.data.store.heldout import HeldOutFraction
from maxbatch.rl.templates import Template

NUM_TERMS = 4
SLIPS = (0, 1, 2, 3, 4)


def records() -> list[dict[str, Any]]:
    """Returns all prompts, {"prompt": "7+8+5+2=", "answer": "22"}, in an order that is the same everywhere and in
    which every part of them is as good as a sample."""
    prompts = ["+".join(terms) + "=" for terms in itertools.product("0123456789", repeat=NUM_TERMS)]
    prompts.sort(key=lambda prompt: hashlib.blake2b(prompt.encode(), digest_size=8).digest())
    return [{"prompt": prompt, "answer": str(_sum(prompt))} for prompt in prompts]


def is_right(prompt: str, response: str, record: dict[str, Any]) -> float:
    """The task's reward: 1.0 for exactly the answer, spaces around it aside, else 0.0."""
    return float(response.strip() == record["answer"])


def worked_examples(config: ConfigDict, count: int) -> Iterator[str]:
    """Yields `count` documents, prompt and answer, of a pupil who is right in one answer of five.

    Prompts are those that train (`eval_fraction`), as `prompt_template` writes them; `data_shuffle_seed` fixes all.
    """
    template = Template(config.prompt_template)
    everything = records()
    split = HeldOutFraction.from_config(config)
    training = split.records(split.count(len(everything), held_out=False), held_out=False).tolist()
    draw = random.Random(f"worked examples {config.data_shuffle_seed}")
    for _ in range(count):
        record = everything[draw.choice(training)]
        answer = int(record["answer"]) + draw.choice(SLIPS)
        yield f"{template.fill(record, 'a worked example')}{answer}"


def _sum(prompt: str) -> int:
    return sum(map(int, prompt.removesuffix("=").split("+")))
