"""The task that needs no download: sums with a verifiable answer, and a pupil who imitates without knowing.

A prompt is "37+48=", for every pair of numbers below `OPERANDS`. The answer is the sum with its lowest digit first,
as one writes when adding by hand, padded to three digits: "580" for 85. So each digit follows from the two above it
and a carry, and a small model learns to add from examples within minutes.

The worked examples are those of a careless pupil: the answer is a + b + d with d drawn from `SLIPS`, every one as
likely. A model that imitates them learns to add and to slip, and is right in one answer of five; which of the five
is right, only the reward says.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from maxbatch.data.heldout import HeldOutFraction
from maxbatch.rl.templates import Template

OPERANDS = 100
SLIPS = (0, 1, 2, 3, 4)
_DIGITS = 3


def records() -> list[dict[str, Any]]:
    """Returns all prompts, {"prompt": "37+48=", "answer": "580", "a": 37, "b": 48}, in an order that is the same
    everywhere and in which every part of them is as good as a sample."""
    pairs = [(a, b) for a in range(OPERANDS) for b in range(OPERANDS)]
    pairs.sort(key=lambda pair: hashlib.blake2b(repr(pair).encode(), digest_size=8).digest())
    return [{"prompt": f"{a}+{b}=", "answer": written(a + b), "a": a, "b": b} for a, b in pairs]


def written(number: int) -> str:
    """Returns a number as the task writes it: lowest digit first, padded with zeros."""
    return f"{number:0{_DIGITS}}"[::-1]


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
        answer = written(record["a"] + record["b"] + draw.choice(SLIPS))
        yield template.fill(record, "a worked example") + answer
