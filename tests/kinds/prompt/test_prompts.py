"""Prompts: one endless stream, the same for the same data, template and seed."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.cli import main
from maxbatch.config.config import Config
from maxbatch.kinds.prompt.bad_prompts import bad_prompts
from maxbatch.kinds.prompt.prompts import Prompts, PromptSource
from maxbatch.run.folder.position import CheckpointRecord, Position
from maxbatch.run.weights.checkpoints import Checkpoints
from tests.helpers.chats import CHATML, write_tokenizer
from tests.helpers.corpus import write_jsonl

RECORDS: list[dict[str, Any]] = [
    {"question": f"what is {number}?", "answer": number, "hints": [{"text": f"h{number}"}]}
    for number in range(10)
]


def config(path: Path | str, *overrides: str, kind: str = "jsonl") -> Config:
    return load_config(
        overrides=[
            f"dataset_type={kind}",
            f"dataset_path={path}",
            "prompt_template=Q: {question}\nA:",
            *overrides,
        ]
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "prompts.jsonl", RECORDS)


def texts(prompts: Prompts | None, first: int, count: int) -> list[str]:
    assert prompts is not None
    return [prompt.text for prompt in prompts.read(first, count)]


def test_prompts_of_holes_are_left_out_and_the_others_keep_their_own_numbers(path: Path) -> None:
    stated = config(path, "eval_fraction=0.2")
    whole, left = PromptSource(stated), PromptSource(stated.replaced({"skip_samples": "2:4 7:20"}))
    own = [0, 1, 4, 5, 6, *range(20, 25)]
    every = whole.train().read(0, 25)
    assert [(one.index, one.text) for one in left.train().read(0, 10)] == [
        (number, every[number].text) for number in own
    ]
    assert [one.index for one in left.train().read(3, 4)] == own[3:7]
    assert texts(left.held_out, 0, 2) == texts(whole.held_out, 0, 2)
    assert left.train().identity != whole.train().identity


def test_a_prompt_is_its_text_its_tokens_and_all_fields_of_its_record(path: Path) -> None:
    prompt = PromptSource(config(path, "enable_data_shuffling=false")).train().read(3, 1)[0]
    assert (prompt.index, prompt.text) == (3, "Q: what is 3?\nA:")
    assert prompt.tokens.dtype == np.int32
    assert prompt.tokens.tolist() == [256, *b"Q: what is 3?\nA:"]
    assert prompt.record == RECORDS[3]


def test_without_add_bos_no_token_is_added(path: Path) -> None:
    prompt = PromptSource(config(path, "add_bos=false")).train().read(0, 1)[0]
    assert prompt.tokens.tolist() == list(prompt.text.encode())


def test_parquet_and_jsonl_of_the_same_records_are_the_same_prompts(
    path: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "prompts.parquet", row_group_size=3)
    left = PromptSource(config(path)).train()
    right = PromptSource(config(tmp_path / "prompts.parquet", kind="parquet")).train()
    assert left.identity == right.identity
    for one, other in zip(left.read(5, 20), right.read(5, 20), strict=True):
        assert (one.text, one.record) == (other.text, other.record)


def test_parquet_values_without_a_json_form_are_text(tmp_path: Path) -> None:
    table = pa.table(
        {"question": ["a"], "when": pa.array([0], pa.timestamp("s")), "raw": [b"bytes"]}
    )
    pq.write_table(table, tmp_path / "prompts.parquet")
    prompt = (
        PromptSource(config(tmp_path / "prompts.parquet", kind="parquet")).train().read(0, 1)[0]
    )
    assert prompt.record == {"question": "a", "when": "1970-01-01 00:00:00", "raw": "bytes"}


def test_epochs_follow_one_another_without_a_gap_each_permuted_anew(path: Path) -> None:
    prompts = PromptSource(config(path)).train()
    assert prompts.num_prompts == 10
    epochs = [texts(prompts, 10 * epoch, 10) for epoch in range(4)]
    assert all(Counter(epoch) == Counter(epochs[0]) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert texts(prompts, 7, 26) == [text for epoch in epochs for text in epoch][7:33]
    other_seed = PromptSource(config(path, "data_shuffle_seed=1")).train()
    assert texts(other_seed, 0, 10) != epochs[0] and texts(other_seed, 0, 10) != epochs[1]


def test_without_shuffling_epochs_are_in_order(path: Path) -> None:
    prompts = PromptSource(config(path, "enable_data_shuffling=false")).train()
    assert [prompt.record for prompt in prompts.read(8, 4)] == [RECORDS[i] for i in (8, 9, 0, 1)]


def test_reading_far_ahead_costs_what_reading_at_the_start_does(path: Path) -> None:
    prompts = PromptSource(config(path)).train()
    begin = time.process_time()
    found = prompts.read(10**12, 100)
    assert time.process_time() - begin < 20  # an import included
    assert [prompt.index for prompt in found] == list(range(10**12, 10**12 + 100))
    assert Counter(prompt.text for prompt in found) == Counter(texts(prompts, 0, 10) * 10)


def test_a_fraction_is_held_out_by_the_rule_of_pre_training(path: Path) -> None:
    held_out = PromptSource(config(path, "eval_fraction=0.2")).held_out
    train = PromptSource(config(path, "eval_fraction=0.2")).train()
    assert held_out is not None
    assert [prompt.record for prompt in held_out.read(0, 2)] == [RECORDS[4], RECORDS[9]]
    assert train.num_prompts == 8
    assert not set(texts(train, 0, 8)) & set(texts(held_out, 0, 2))
    with pytest.raises(IndexError, match="from 0 to 1"):
        held_out.read(1, 2)


def test_both_parts_come_from_one_reading(path: Path) -> None:
    source = PromptSource(config(path, "eval_fraction=0.2"))
    path.unlink()
    held_out = source.held_out
    assert held_out is not None and source.train().num_prompts + held_out.num_prompts == 10


def test_held_out_prompts_of_their_own_path(path: Path, tmp_path: Path) -> None:
    own = write_jsonl(tmp_path / "eval.jsonl", [{"question": "b"}, {"question": "a"}])
    both = config(path, f"eval_dataset_path={own}")
    assert texts(PromptSource(both).held_out, 0, 2) == ["Q: b\nA:", "Q: a\nA:"]
    assert PromptSource(both).train().num_prompts == 10
    # A file that both paths name is held out.
    folder = config(tmp_path, f"eval_dataset_path={own}")
    assert PromptSource(folder).train().num_prompts == 10


def test_where_nothing_is_held_out_there_are_no_held_out_prompts(path: Path) -> None:
    assert PromptSource(config(path)).held_out is None


def test_the_identity_changes_with_whatever_changes_the_prompts(path: Path, tmp_path: Path) -> None:
    base = PromptSource(config(path)).train().identity
    assert all(isinstance(value, str | int | bool) for value in base.values())
    other = write_jsonl(tmp_path / "other.jsonl", [*RECORDS[:9], {**RECORDS[9], "answer": 0}])
    swapped = write_jsonl(tmp_path / "swapped.jsonl", RECORDS[::-1])
    changed = [
        config(other),
        config(swapped),
        config(path, "prompt_template={question}"),
        config(path, "add_bos=false"),
        config(path, "eval_fraction=0.1"),
        config(path, "data_shuffle_seed=1"),
        config(path, "enable_data_shuffling=false"),
    ]
    identities = [base, *(PromptSource(each).train().identity for each in changed)]
    assert len({json.dumps(identity, sort_keys=True) for identity in identities}) == len(identities)
    # Where the records lie and how their lines are written is no part of it.
    moved = tmp_path / "moved.jsonl"
    moved.write_text(
        "\n".join(json.dumps(record, indent=None, sort_keys=True) for record in RECORDS)
    )
    assert PromptSource(config(moved)).train().identity == base


def test_a_resume_without_the_end_tokens_of_the_model_that_it_imported_is_refused(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"eos_token_id": 7}')

    def checkpoints(folder: str) -> Checkpoints:
        stated = config(path).replaced({"load_parameters_path": folder})
        return Checkpoints(
            tmp_path, 3, {"data": dict(PromptSource(stated).train().identity), "model": {}}, print
        )

    def record(folder: str) -> CheckpointRecord:
        return CheckpointRecord(Position(), checkpoints(folder)._identity, 0, (1, 1))

    imported = str(tmp_path / "model")
    checkpoints(imported).check_identity(record(imported), "it")
    with pytest.raises(
        ConfigError, match=r"end tokens of load_parameters_path: '\(7,\)' there, None here"
    ):
        checkpoints("").check_identity(record(imported), "it")


def test_bad_records_are_an_error_or_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"question": "a"}\n[1]\n{"question": "b"}\n{"other": 1}\n{"question": "\\ud800"}\n'
    )
    with pytest.raises(
        ConfigError, match=r"line 2: a list, not an object; skip_bad_records=true leaves"
    ):
        PromptSource(config(path)).train()
    prompts = PromptSource(config(path, "skip_bad_records=true")).train()
    assert (prompts.num_prompts, prompts.skipped_records) == (2, 3)
    assert sorted(texts(prompts, 0, 2)) == ["Q: a\nA:", "Q: b\nA:"]


def test_bad_prompts_are_the_records_that_training_leaves_out_or_refuses(tmp_path: Path) -> None:
    path, held_out = tmp_path / "prompts.jsonl", tmp_path / "held-out.jsonl"
    path.write_text(
        '{"question": "a"}\n[1]\n{"question": "a", "id": 2}\n{"other": 1}\n{"question": "held"}\n'
        f'{{"question": "{"b" * 99}"}}\n'
    )
    held_out.write_text('{"question": "held"}\n{"question": null}\n')
    overrides = [f"eval_dataset_path={held_out}", "deduplicate=true"]
    found = list(bad_prompts(config(path, *overrides, "skip_bad_records=true").prompting))
    assert [(Path(bad.file).name, bad.record, bad.effect) for bad in found] == [
        ("prompts.jsonl", 2, "left out"),
        ("prompts.jsonl", 3, "left out"),
        ("prompts.jsonl", 4, "left out"),
        ("prompts.jsonl", 5, "left out"),
        ("prompts.jsonl", 6, "refused"),
        ("held-out.jsonl", 2, "left out"),
    ]
    assert found[1].reason == f"equal to record 1 of {path}"
    assert found[2].reason == "has no field 'question'; its fields: 'other'"
    assert found[3].reason == f"equal to record 1 of {held_out}"
    assert "max_prefill_predict_length=" in found[4].reason
    longer = ["max_prefill_predict_length=200", "max_target_length=256", "skip_bad_records=true"]
    kept = PromptSource(config(path, *overrides, *longer)).train()
    assert kept.num_prompts == 6 - len([bad for bad in found[:5] if bad.effect == "left out"])
    without = list(bad_prompts(config(path, "max_prefill_predict_length=200").prompting))
    assert [(bad.record, bad.effect) for bad in without] == [(2, "refused"), (4, "refused")]


def test_the_line_about_left_out_prompts_has_every_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"question": "a"}, {"other": 1}])
    PromptSource(config(path, "skip_bad_records=true")).train()
    assert "1 x has no field" in capsys.readouterr().err


def test_the_command_lists_bad_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"question": "a"}, {"question": ""}])
    stated = [f"dataset_path={path}", "dataset_type=jsonl", "prompt_template={question}"]
    assert main(["data", "rl", "--bad", "--json", *stated]) == 0
    bad = json.loads(capsys.readouterr().out)
    assert (bad["record"], bad["effect"], bad["reason"]) == (
        2,
        "refused",
        "field 'question' is empty",
    )


def test_templates_reach_into_fields_and_write_braces(path: Path) -> None:
    prompts = PromptSource(
        config(path, "prompt_template={{{hints[0][text]}}}", "enable_data_shuffling=false")
    ).train()
    assert texts(prompts, 2, 1) == ["{h2}"]


def test_a_prompt_that_is_too_long_names_the_length_that_works(tmp_path: Path) -> None:
    lengths = [3, 5, 9, 7, 9, 1]
    path = write_jsonl(
        tmp_path / "prompts.jsonl", [{"question": "x" * length} for length in lengths]
    )
    overrides = ("prompt_template={question}", "eval_fraction=0.5")
    with pytest.raises(ConfigError) as error:
        PromptSource(config(path, *overrides, "max_prefill_predict_length=6"))
    assert str(error.value) == (
        f"max_prefill_predict_length=6: the prompt of {path} line 3 has 10 tokens, and 2 "
        "more are too long; works: max_prefill_predict_length=10"
    )
    assert (
        PromptSource(config(path, *overrides, "max_prefill_predict_length=10")).train().num_prompts
        == 3
    )


@pytest.mark.parametrize(
    ("template", "value", "problem"),
    [
        ("{question}", "", "field 'question' is empty"),
        ("{question}", None, "field 'question' is null"),
        ("{question}", 5, "field 'question' is a int, not a text"),
        ("{question}", ["a"], "field 'question' is a list, not a text"),
        ("{question}", {"a": "b"}, "field 'question' is a dict, not a text"),
        ("Q: {question}", ["a"], r"field 'question' is a list, not a text"),
        ("Q: {question[0]}", [None], r"field 'question\[0\]' is null"),
        ("Q: {question}", True, "field 'question' is a bool, not a text"),
        ("Q: {question}", "", "field 'question' is empty"),
        (
            "{question}",
            [{"role": "user", "content": None}],
            "message 1 of field question: content is null",
        ),
    ],
)
def test_what_is_no_text_is_no_prompt_and_can_be_left_out(
    tmp_path: Path, template: str, value: object, problem: str
) -> None:
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"question": value}, {"question": "ab"}])
    overrides = [f"prompt_template={template}", "max_prefill_predict_length=9"]
    if "[0]" in template:
        write_jsonl(path, [{"question": value}, {"question": ["ab"]}])
    with pytest.raises(ConfigError, match=f"line 1: {problem}"):
        PromptSource(config(path, *overrides)).train()
    kept = PromptSource(config(path, *overrides, "skip_bad_records=true")).train()
    assert (kept.num_prompts, kept.skipped_records) == (1, 1)
    assert kept.read(0, 1)[0].text.endswith("ab")


def test_numbers_may_stand_beside_text_in_a_prompt(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"a": 2, "b": 0.5}])
    prompts = PromptSource(
        config(path, "prompt_template={a} + {b:.2f} =", "max_prefill_predict_length=20")
    ).train()
    assert prompts.read(0, 1)[0].text == "2 + 0.50 ="


def test_messages_are_a_prompt_by_the_chat_template_and_answers_end_with_its_turn(
    tmp_path: Path,
) -> None:
    user, assistant = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": [user], "answer": 2}] * 3)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", CHATML, eos_token="<|endoftext|>")
    keys = (
        "tokenizer_type=huggingface",
        f"tokenizer_path={tokenizer}",
        "vocab_size=320",
        "eval_fraction=0",
    )
    keys = (*keys, "prompt_template={messages}")
    prompts = PromptSource(config(path, *keys)).train()
    [prompt] = prompts.read(0, 1)
    assert prompt.text == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert (
        prompt.tokens.tolist() == prompts.tokenizer.encode_markup_batch([prompt.text])[0].tolist()
    )
    assert prompt.record["answer"] == 2
    assert prompts.end_ids == tuple(
        prompts.tokenizer.encode_markup_batch(["<|im_end|>"])[0].tolist()
    )

    write_jsonl(path, [{"messages": [user, assistant]}])
    with pytest.raises(ConfigError, match="line 1: the last message is the assistant's"):
        PromptSource(config(path, *keys))
    write_jsonl(path, [{"messages": [user]}])
    with pytest.raises(ConfigError, match="has no chat template"):
        PromptSource(config(path, "prompt_template={messages}"))
    write_jsonl(
        path,
        [{"messages": "text"}] * 2 + [{"messages": [{"from": "human", "value": "What is 1 + 1?"}]}],
    )
    mixed = PromptSource(
        config(path, *keys, "eval_fraction=0", "enable_data_shuffling=false")
    ).train()
    assert mixed.end_ids and mixed.read(2, 1)[0].text.startswith("<|im_start|>user\nWhat")
    write_jsonl(path, [{"messages": [user, {"role": 5}]}])
    with pytest.raises(
        ConfigError, match="message 2 of field messages is not an object with a role"
    ):
        PromptSource(config(path, *keys))
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"messages": "text"}])
    plain_prompts = PromptSource(
        config(plain, "prompt_template={messages}", "eval_fraction=0")
    ).train()
    assert texts(plain_prompts, 0, 1) == ["text"] and plain_prompts.end_ids == ()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "dataset_path='': the dataset needs a file"),
        ("a.jsonl,0.5;b.jsonl,0.5", "prompts are no mixture"),
    ],
)
def test_a_path_that_holds_no_prompts_is_one_line(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PromptSource(load_config(overrides=["dataset_type=jsonl", f"dataset_path={path}"])).train()
