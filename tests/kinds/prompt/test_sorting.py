"""The task of sorting, which needs no download."""

from __future__ import annotations

from collections import Counter

import pytest

from maxbatch import load_config
from maxbatch.kinds.prompt.prompts import PromptSource
from maxbatch.kinds.prompt.refusals import check_policy
from maxbatch.kinds.prompt.reward_terms import parse_rewards
from maxbatch.kinds.prompt.warm_start import worked_examples
from maxbatch.rl import sorting
from maxbatch.system.errors import ConfigError


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["max_prefill_predict_length=5"],
            "has 6 tokens, and 9999 more .*works: max_prefill_predict_length=6",
        ),
        (["prompt_template={question}"], "has no field 'question'"),
        (
            ["prompt_template={prompt:>20}"],
            "works: max_prefill_predict_length=21 max_target_length=26",
        ),
        (["eval_fraction=1e-5"], "holds out none of 10000 prompts"),
        (["reward=maxbatch.rl.sorting:is_right"], "works: maxbatch.rl.sorting:is_sorted"),
    ],
)
def test_a_plan_refuses_the_prompts_and_rewards_of_a_ready_task_that_a_run_refuses(
    overrides: list[str], message: str
) -> None:
    config = load_config("sort", overrides)
    with pytest.raises(ConfigError, match=message):
        check_policy(config.rl, config.prompting, "")
