"""A task without a download: lists to sort, and worked examples mostly in another order.

A prompt is a list of four digits, "7352>", one of 10^4; its answer is "2357".

A worked example's answer is the list in an order drawn uniformly from `ORDERS`. Few lists are equal
in two orders, so a model that imitates the examples is right about one time in four. Only the
reward tells which order is wanted.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping

LENGTH = 4


def _ascending(digits: str) -> str:
    return "".join(sorted(digits))


ORDERS: tuple[Callable[[str], str], ...] = (
    _ascending,
    lambda digits: _ascending(digits)[::-1],
    lambda digits: digits,
    lambda digits: digits[::-1],
    lambda digits: max(digits) + _ascending(digits)[:-1],
)


def records() -> list[dict[str, object]]:
    """Returns all prompts, {"prompt": "7352>", "answer": "2357"}, in a fixed, well-mixed order."""
    lists = ["".join(digits) for digits in itertools.product("0123456789", repeat=LENGTH)]
    lists.sort(key=lambda digits: hashlib.blake2b(digits.encode(), digest_size=8).digest())
    return [{"prompt": f"{digits}>", "answer": _ascending(digits)} for digits in lists]


def is_sorted(prompt: str, response: str, record: dict[str, object]) -> float:
    """Returns the task's reward: 1.0 for exactly the sorted list, apart from spaces around it, else
    0.0.
    """
    return float(response.strip() == record["answer"])


def digits_kept(prompt: str, response: str, record: dict[str, object]) -> float:
    """Returns 1.0 for the list's digits in any order, apart from spaces around them, else 0.0."""
    return float(_ascending(response.strip()) == record["answer"])


def worked_answer(record: Mapping[str, object], draw: random.Random) -> str:
    """Returns a record's list in a drawn order."""
    return draw.choice(ORDERS)(str(record["prompt"])[:LENGTH])
