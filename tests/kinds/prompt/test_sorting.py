"""The task of sorting, which needs no download."""

from __future__ import annotations

from collections import Counter

from maxbatch import load_config
from maxbatch.kinds.prompt.prompts import PromptSource
from maxbatch.kinds.prompt.reward_terms import parse_rewards
from maxbatch.kinds.prompt.warm_start import worked_examples
from maxbatch.rl import sorting


def test_the_ready_config_sorts_lists_that_its_warm_start_sorts_in_one_of_four() -> None:
    config = load_config("sort")
    assert [term.name for term in parse_rewards(config.reward)] == ["is_sorted", "digits_kept"]
    source = PromptSource(config)
    held_out = source.held_out
    assert held_out is not None and (source.train().num_prompts, held_out.num_prompts) == (
        9000,
        1000,
    )
    unseen = {prompt.text for prompt in held_out.read(0, 1000)}
    right: Counter[bool] = Counter()
    for text in worked_examples(config.prompting, 5000):
        digits, answer = text.split(">")
        assert f"{digits}>" not in unseen
        assert sorting.digits_kept(digits, answer, {"answer": "".join(sorted(digits))}) == 1.0
        right[answer == "".join(sorted(digits))] += 1
    assert 0.2 < right[True] / 5000 < 0.3


def test_every_list_is_a_record_once_and_only_its_sorted_form_is_right() -> None:
    records = sorting.records()
    assert len({record["prompt"] for record in records}) == len(records) == 10**4
    record = next(record for record in records if record["prompt"] == "7352>")
    assert record["answer"] == "2357"
    scores = [
        sorting.is_sorted("7352>", text, record)
        for text in ("2357", " 2357\n", "7532", "235", "22357", "")
    ]
    assert scores == [1, 1, 0, 0, 0, 0]
    kept = [sorting.digits_kept("7352>", text, record) for text in ("7532", "2357", "2353", "")]
    assert kept == [1, 1, 0, 0]
