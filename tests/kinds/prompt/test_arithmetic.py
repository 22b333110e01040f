"""The task that needs no download."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from maxbatch import load_config
from maxbatch.config.config import Config
from maxbatch.config.paths import configs_dir
from maxbatch.kinds.prompt.prompts import PromptSource
from maxbatch.kinds.prompt.warm_start import pretraining, worked_examples
from maxbatch.plan.batch import BatchPlan
from maxbatch.rl import arithmetic


def config(*overrides: str) -> Config:
    return load_config(configs_dir() / "post_train" / "rl.yml", overrides)


def test_every_sum_is_a_record_once_and_its_answer_is_right() -> None:
    records = arithmetic.records()
    terms = [tuple(map(int, record["prompt"].removesuffix("=").split("+"))) for record in records]
    assert sorted(terms) == list(itertools.product(range(10), repeat=arithmetic.NUM_TERMS))
    for record, numbers in zip(records, terms, strict=True):
        assert int(record["answer"]) == sum(numbers)
        assert arithmetic.is_right(record["prompt"], record["answer"], record) == 1.0


def test_only_the_answer_is_right_whatever_spaces_are_around_it() -> None:
    record = next(record for record in arithmetic.records() if record["prompt"] == "7+8+5+2=")
    right = ("22", " 22\n")
    wrong = ("23", "022", "2", "222", "", "2 2", "22 1")
    scores = [
        arithmetic.is_right(record["prompt"], response, record) for response in (*right, *wrong)
    ]
    assert scores == [1.0] * len(right) + [0.0] * len(wrong)


def test_every_part_of_the_records_is_as_good_as_a_sample() -> None:
    held_out = PromptSource(config()).held_out
    assert held_out is not None and held_out.num_prompts == 1000
    for place in range(0, 2 * arithmetic.NUM_TERMS, 2):
        counts = Counter(prompt.text[place] for prompt in held_out.read(0, 1000))
        assert len(counts) == 10 and min(counts.values()) > 60


def test_worked_examples_are_prompts_that_train_with_one_answer_in_five_right() -> None:
    held_out = PromptSource(config()).held_out
    assert held_out is not None
    unseen = {prompt.text for prompt in held_out.read(0, held_out.num_prompts)}
    slips: Counter[int] = Counter()
    prompts = set()
    for text in worked_examples(config().prompting, 20_000):
        question, answer = text.split("=")
        prompts.add(f"{question}=")
        slips[int(answer) - sum(map(int, question.split("+")))] += 1
    assert not prompts & unseen
    assert len(prompts) > 7500
    assert set(slips) == set(arithmetic.SLIPS)
    assert slips[0] / 20_000 == pytest.approx(0.2, abs=0.01)


def test_worked_examples_are_the_same_for_one_seed_and_others_for_another() -> None:
    def some(count: int, *overrides: str) -> list[str]:
        return list(worked_examples(config(*overrides).prompting, count))

    assert some(50) == some(100)[:50]
    assert some(50) != some(50, "data_shuffle_seed=1")
    assert some(50, "eval_fraction=0") != some(50)


def test_worked_examples_are_written_as_the_template_says() -> None:
    text = next(worked_examples(config("prompt_template=Sum: {prompt}\n").prompting, 1))
    assert re.fullmatch(r"Sum: [0-9+]+=\n\d+", text)


def test_the_warm_start_trains_on_all_devices_also_where_these_do_not_divide_the_batch(
    tmp_path: Path,
) -> None:
    shares = ("trainer_devices_fraction=0.75", "sampler_devices_fraction=0.25")
    keys = config("batch_size=3", "num_generations=2", *shares)
    batch = BatchPlan.from_config(keys, 4).rl
    assert batch is not None and batch.num_trainer_devices == 3
    changed = keys.replaced(pretraining(keys.rl, batch, tmp_path, "examples.jsonl"))
    warm = BatchPlan.from_config(changed, 4)
    assert (warm.global_batch_size_to_train_on, warm.padded_slots_per_step) == (6, 2)
