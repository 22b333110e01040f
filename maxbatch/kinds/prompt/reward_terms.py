"""The key `reward`: functions and their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maxbatch.config.user_function import source_hash
from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError


class RewardTerm(NamedTuple):
    """One function of the key `reward`."""

    spec: str  # its name in the key
    name: str  # its name in metrics
    weight: float  # factor of its score


def parse_rewards(text: str) -> list[RewardTerm]:
    """Parses the key `reward`: "module:function", "FILE.py:function", or several,
    "a:f,0.7;b:g,0.3".

    The default weight is 1; weights are not normalised. Metrics use a function's name, or the whole
    term if two share a name.

    Raises:
      ConfigError: the text is malformed, or names a function twice.
    """
    weights: dict[str, float] = {}
    for item in text.split(";"):
        spec, weight = _parse_term(text, item)
        if spec in weights:
            raise reward_error(text, f"{shown(spec)} occurs twice; give it once, with one weight")
        weights[spec] = weight
    names = [spec.rpartition(":")[2] for spec in weights]
    return [
        RewardTerm(spec, name if names.count(name) == 1 else spec, weight)
        for (spec, weight), name in zip(weights.items(), names, strict=True)
    ]


def sources_of(terms: Sequence[RewardTerm]) -> dict[str, str]:
    """Returns a hash of the source of each function, by its name in the key."""
    return {term.spec: source_hash(term.spec) for term in terms}


def identity_of(terms: Sequence[RewardTerm], sources: Mapping[str, str]) -> dict[str, str]:
    """Returns the identity of `reward`, independent of paths: names, weights and hashes of
    sources.
    """
    return {
        f"reward {number}": f"{term.name} x {term.weight:g}, source {sources[term.spec]}"
        for number, term in enumerate(terms, 1)
    }


def _parse_term(text: str, item: str) -> tuple[str, float]:
    spec, comma, weight = (part.strip() for part in item.rpartition(","))
    if not comma:
        spec, weight = weight, "1"
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        works = "works: reward=maxbatch.rl.arithmetic:is_right"
        raise reward_error(
            text, f"{shown(item)!r} is not module:function or FILE.py:function; {works}"
        )
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise reward_error(
            text, f"the weight {shown(weight)!r} is no finite number; works: {spec},1"
        )
    return spec, number


def reward_error(reward: str, problem: object) -> ConfigError:
    return ConfigError(f"reward={shown(repr(reward))}: {problem}")
