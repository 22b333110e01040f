"""A refusal names all that must change, in texts that the config reads again."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest

from maxbatch.config.keys import Section
from maxbatch.plan.refusal import Refusal, accepted, in_words, stated


@dataclasses.dataclass(frozen=True)
class Numbers(Section):
    a: int
    b: int = 0


def even_and_small(config: Numbers) -> int:
    if config.a % 2:
        raise Refusal(config, "a", "must be even", {"a": config.a + 1})
    if config.b <= config.a:
        raise Refusal(config, "b", f"must be above a={config.a}", {"b": config.a + 1})
    return config.b


def test_what_is_named_keeps_every_rule() -> None:
    assert accepted(Numbers(2, 3), even_and_small) == 3
    with pytest.raises(Refusal, match=r"^a=3: must be even; works: a=4 b=5$"):
        accepted(Numbers(3, 3), even_and_small)


def test_a_rule_that_nothing_keeps_names_what_was_tried_first() -> None:
    def never(config: Numbers) -> int:
        raise Refusal(config, "a", "must not be", {"a": config.a + 1})

    with pytest.raises(Refusal, match=r"works: a=2$"):
        accepted(Numbers(1), never)


def test_values_are_texts_of_overrides_and_short() -> None:
    works = {
        "a": None,
        "b": True,
        "c": "0:8 10:16",
        "d": Fraction(1, 3),
        "e": Fraction(1, 4),
        "f": Fraction(8),
    }
    refusal = Refusal({"x": "y " * 100}, "x", "must be short", works)
    assert str(refusal).endswith('works: a=null b=true c="0:8 10:16" d=1/3 e=0.25 f=8')
    assert len(stated({"x": "y " * 100}, "x")) == 82
    assert len(in_words(Fraction(10**3000, 3))) == 80
    assert in_words(Fraction(10**6000, 7**4000)).startswith("about 2^")
