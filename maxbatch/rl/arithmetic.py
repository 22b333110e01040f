"""A task without a download: sums with checkable answers, and mostly wrong worked examples.

A prompt is the sum of four digits, "7+8+5+2=", one of 10^4; its answer is "22". A small model
learns it within minutes.

A worked example's answer is the sum plus a slip, drawn uniformly from `SLIPS`. A model that
imitates the examples is right at most one time in five, and its likeliest answer is rarely right,
since the right one is at the edge of the seen range. Only the reward tells which of the five is
right.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping

NUM_TERMS = 4
SLIPS = (0, 1, 2, 3, 4)


def records() -> list[dict[str, object]]:
    """Returns all prompts, {"prompt": "7+8+5+2=", "answer": "22"}, in a fixed, well-mixed order."""
    prompts = ["+".join(terms) + "=" for terms in itertools.product("0123456789", repeat=NUM_TERMS)]
    prompts.sort(key=lambda prompt: hashlib.blake2b(prompt.encode(), digest_size=8).digest())
    return [
        {"prompt": prompt, "answer": str(sum(map(int, prompt[:-1].split("+"))))}
        for prompt in prompts
    ]


def is_right(prompt: str, response: str, record: dict[str, object]) -> float:
    """Returns the task's reward: 1.0 for exactly the answer, apart from spaces around it,
    else 0.0.
    """
    return float(response.strip() == record["answer"])


def worked_answer(record: Mapping[str, object], draw: random.Random) -> str:
    """Returns a record's sum plus a drawn slip."""
    return str(int(str(record["answer"])) + draw.choice(SLIPS))
