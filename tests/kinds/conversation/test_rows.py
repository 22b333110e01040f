"""The stream of conversations: trained tokens, packed and unpacked, and the settings of its
identity.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.cli import main
from maxbatch.data.stream.sources import trained_tokens_if_cached
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.data.stream.trained_tokens import trained_tokens_of_update
from tests.helpers.chats import (
    CHATML,
    chat_config,
    chat_overrides,
    some_talks,
    talk,
    write_tokenizer,
)
from tests.helpers.corpus import write_jsonl

TALKS = some_talks(40)
ASKED = {"role": "user", "content": "a"}
ANSWER = [{"role": "assistant", "content": "b"}]


def trained(stream: Stream, index: int = 0) -> str:
    sample = stream[index]
    return stream.tokenizer.decode_markup(sample["tokens"][sample["weights"] > 0])


def conversations_of(stream: Stream) -> dict[str, str]:
    """The text of every conversation of an epoch, and its trained parts."""
    found = {}
    rows = stream.read(0, stream.samples_per_epoch)
    for tokens, segments, weights in zip(
        rows["tokens"], rows["segments"], rows["weights"], strict=True
    ):
        for segment in range(1, segments.max() + 1):
            ids, weight = tokens[segments == segment], weights[segments == segment]
            assert weight[0] == 0
            found[stream.tokenizer.decode_markup(ids)] = stream.tokenizer.decode_markup(
                ids[weight > 0]
            )
    return found


def rendered(record: dict[str, Any]) -> str:
    return "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in record["messages"]
    )


@pytest.mark.parametrize("packing", ["packing=true", "packing=false"])
def test_only_the_assistants_tokens_have_weight(tmp_path: Path, packing: str) -> None:
    found = conversations_of(
        open_stream(chat_config(tmp_path, TALKS, packing, "max_target_length=256"))
    )
    assert found == {
        rendered(talked): "".join(
            m["content"] + "<|im_end|>" for m in talked["messages"] if m["role"] == "assistant"
        )
        for talked in TALKS
    }


def test_conversations_are_packed_whole(tmp_path: Path) -> None:
    packed = open_stream(chat_config(tmp_path, TALKS, "max_target_length=256"))
    apart = open_stream(chat_config(tmp_path, None, "max_target_length=256", "packing=false"))
    assert apart.samples_per_epoch == len(TALKS)
    assert packed.samples_per_epoch < len(TALKS) / 2
    assert packed.stats()["trained_tokens"] == apart.stats()["trained_tokens"]


def test_all_tokens_have_weight_if_asked(tmp_path: Path) -> None:
    stream = open_stream(chat_config(tmp_path, TALKS, "sft_train_on_completion_only=false"))
    sample = stream[0]
    starts = np.diff(sample["segments"], prepend=0) != 0
    assert np.array_equal(sample["weights"], (sample["segments"] > 0) & ~starts)


def test_a_prompt_and_its_completion_need_no_template(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    config = load_config(
        overrides=[
            "use_sft=true",
            "dataset_type=jsonl",
            f"dataset_path={tmp_path / 'a.jsonl'}",
            "max_target_length=8",
        ]
    )
    sample = open_stream(config)[0]
    assert sample["tokens"].tolist() == [*b"2+2=4", 257, 258, 258]
    assert sample["weights"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert sample["segments"].tolist() == [1] * 6 + [0] * 2


def test_prompts_and_completions_are_texts_with_markup_or_messages(tmp_path: Path) -> None:
    messages = talk("hi", "hello", "more", "yes")["messages"]
    records = [
        {"prompt": "<|im_start|>the fox", "completion": " jumps<|im_end|>"},
        {"prompt": messages[:3], "completion": messages[3:]},
    ]
    stream = open_stream(chat_config(tmp_path, records, "packing=false"))
    assert [trained(stream, i) for i in (0, 1)] == [" jumps<|im_end|>", "yes<|im_end|>"]
    assert stream[0]["tokens"][0] == 0, "<|im_start|> is its token"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"body": "a"},
            r"needs messages, or conversations, or prompt and completion, or .*its fields: 'body'",
        ),
        (
            talk("a", "b", "c"),
            "ends with a message of the user, and no message of the assistant answers it",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "train": True}, *ANSWER]},
            "message 1 states that it is trai",
        ),
        (
            {"messages": [{**ANSWER[0], "weight": 0.5}]},
            "message 1: weight is 0.5, and it must be 0 or 1",
        ),
        (
            {"messages": [{**ANSWER[0], "weight": 0, "train": True}]},
            "message 1: weight and train contradict",
        ),
        ({"messages": [{**ANSWER[0], "weight": 0}]}, "no message of the assistant to train on"),
        ({"conversations": [{"from": 3, "value": "a"}]}, "message 1 of field conversations"),
        ({"instruction": "a", "output": 3}, "field output is a int"),
        ({"messages": []}, "field messages is empty"),
        ({"messages": [{"content": "a"}]}, "message 1 of field messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the assistant"),
        ({"prompt": "a", "completion": 3}, "field completion is a int"),
        ({"prompt": "a", "completion": ""}, "field completion is empty"),
        ({"instruction": "a", "output": " "}, "field output is empty"),
        ({"instruction": "", "output": "b"}, "field instruction is empty"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None}]},
            "message 2 .*content is null, not a text",
        ),
        ({"messages": [ASKED, {"role": "assistant"}]}, "message 2 .*content is null, not a text"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": 5}]},
            "message 2 .*content is a int, not a text",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": ""}]},
            "message 2 .*content is empty",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": []}]},
            "message 2 .*content is empty",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": ["a"]}]},
            "message 2 .*a part of content is a str",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
                    *ANSWER,
                ]
            },
            "message 1 .*a part of type 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}, *ANSWER]},
            "message 1 .*the text of a part of content is null",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": None}]},
            "message 2 .*content is null, not a text",
        ),
        (
            {"messages": [{"role": "agent", "content": "a"}, *ANSWER]},
            "message 1 has the role 'agent', which",
        ),
        (
            {"prompt": [ASKED], "completion": [{"role": "agent", "content": "a"}]},
            "message 2 has the role 'agent'",
        ),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_by_its_number(
    tmp_path: Path, record: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"line 4: .*{problem}"):
        open_stream(chat_config(tmp_path, [*TALKS[:3], record]))
    stats = open_stream(chat_config(tmp_path, None, "skip_bad_records=true")).stats()
    assert (stats["skipped_records"], stats["documents"]) == (1, 3)


def test_records_of_other_programs_are_the_conversations_that_they_state(tmp_path: Path) -> None:
    asked, answered = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}
    records = [
        talk("hi", "hello", system="s"),
        {"system": "s", "conversations": [asked, answered]},
        {"conversations": talk("hi", "hello", system="s")["messages"]},
        {"system": "s", "instruction": "hi", "output": "hello"},
        {"instruction": "say", "input": "hi", "output": "hello"},
        {"text": "<|im_start|>user", "other": 1},
    ]
    stream = open_stream(chat_config(tmp_path, records, "packing=false"))
    rows = stream.read(0, 6)["tokens"]
    assert all(np.array_equal(rows[0], row) for row in rows[1:4])
    assert "user\nsay\n\nhi<|im_end|>" in stream.tokenizer.decode_markup(rows[4])
    assert [trained(stream, i) for i in (3, 4, 5)] == ["hello<|im_end|>"] * 2 + ["user<|im_end|>"]


def test_parts_of_text_are_one_text(tmp_path: Path) -> None:
    def in_parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    whole = talk("hi there", "hello")
    messages = [
        {**message, "content": in_parts(*message["content"].partition(" "))}
        for message in whole["messages"]
    ]
    turns = [
        {"from": "human", "value": in_parts("hi", " there")},
        {"from": "gpt", "value": in_parts("hello")},
    ]
    stream = open_stream(
        chat_config(
            tmp_path, [whole, {"messages": messages}, {"conversations": turns}], "packing=false"
        )
    )
    rows = stream.read(0, 3)["tokens"]
    assert all(np.array_equal(rows[0], row) for row in rows[1:])


def test_a_call_of_a_tool_needs_no_content_and_never_writes_none(tmp_path: Path) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    record = {"messages": [ASKED, calls, {"role": "tool", "content": ""}, *ANSWER]}
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ '' ~ m.content }}{% "
        "if m.content is none %}calls {{ m.tool_calls[0].function.name }}{% endif "
        "%}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif "
        "%}"
    )
    write_tokenizer(tmp_path / "tokenizer", template)
    stream = open_stream(chat_config(tmp_path, [record], "packing=false"))
    assert trained(stream) == "calls f<|im_end|>bb<|im_end|>"


def test_a_role_that_the_template_names_is_known(tmp_path: Path) -> None:
    named = (
        "{% for m in messages %}{% if m.role == 'critic' %}[critic]{% endif %}"
        + CHATML.removeprefix("{% for m in messages %}")
    )
    write_tokenizer(tmp_path / "tokenizer", named)
    record = {"messages": [{"role": "critic", "content": "a"}, *ANSWER]}
    assert open_stream(chat_config(tmp_path, [record])).stats()["documents"] == 1


def test_a_stated_form_is_the_one_that_is_read_and_part_of_the_identity(tmp_path: Path) -> None:
    records = [
        {**talk("hi", "hello"), "instruction": "do", "output": "done", "text": "all of it"}
    ] * 2
    found = open_stream(chat_config(tmp_path, records, "packing=false"))
    alpaca = open_stream(chat_config(tmp_path, None, "packing=false", "sft_format=alpaca"))
    assert (trained(found), trained(alpaca)) == ("hello<|im_end|>", "done<|im_end|>")
    assert "sft_format" not in found.identity and alpaca.identity["sft_format"] == "alpaca"
    assert trained(open_stream(chat_config(tmp_path, None, "sft_format=text"))).startswith(
        "ll of it"
    )
    with pytest.raises(
        ConfigError, match="line 1: sft_format=sharegpt needs conversations; its fields: 'instr"
    ):
        open_stream(chat_config(tmp_path, None, "sft_format=sharegpt"))


def test_a_message_of_weight_zero_is_read_and_not_trained_on(tmp_path: Path) -> None:
    marked = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content "
        "}}<|im_end|>"
    )
    marked += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    for number, template in enumerate((CHATML, marked)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_tokenizer(folder / "tokenizer", template)
        for field, off, on in (("weight", 0, 1), ("train", False, True)):
            messages = talk("a", "b", "c", "d", "e", "f")["messages"]
            messages[1][field], messages[3][field] = off, on
            stream = open_stream(
                chat_config(
                    folder, [{"messages": messages}], "packing=false", "max_target_length=128"
                )
            )
            assert trained(stream) == "d<|im_end|>f<|im_end|>"
    with pytest.raises(
        ConfigError, match="message 2 states that it is not trained on, and sft_train_on_completion"
    ):
        open_stream(chat_config(folder, None, "sft_train_on_completion_only=false"))


def test_a_token_that_is_partly_the_prompts_is_refused_by_the_number_of_its_record(
    tmp_path: Path,
) -> None:
    says = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    folder = write_tokenizer(
        tmp_path / "tokenizer", says + "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["::"] = max(content["model"]["vocab"].values()) + 1
    content["model"]["merges"].append([":", ":"])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="line 2: a token crosses the border"):
        open_stream(chat_config(tmp_path, [talk("a", "b"), talk("a", ":b")]))


def test_a_conversation_longer_than_a_row_is_truncated_dropped_or_refused(tmp_path: Path) -> None:
    records = [talk("a", "b"), talk("a " * 30, "b " * 200), talk("c", "d " * 90)]
    stream = open_stream(chat_config(tmp_path, records, "packing=false"))
    stats = stream.stats()
    assert (stats["samples"], stats["documents"], stats["overlong_records"]) == (3, 3, 2)
    assert trained(stream, 1).startswith("b b") and (stream[1]["segments"] == 1).all()
    dropped = open_stream(chat_config(tmp_path, None, "overlong=drop")).stats()
    assert (dropped["documents"], dropped["overlong_records"]) == (1, 2)
    with pytest.raises(
        ConfigError,
        match=r"conversation of .* line 2 has \d+ tokens, and 1 more are too long, and over",
    ):
        open_stream(chat_config(tmp_path, None, "overlong=error"))


def test_bos_and_eos_do_not_apply_and_change_no_stream(tmp_path: Path) -> None:
    plain = open_stream(chat_config(tmp_path, TALKS))
    other = open_stream(
        chat_config(tmp_path, None, "add_eos=false", "add_bos=true", "text_field=body")
    )
    assert plain.identity == other.identity


@pytest.mark.parametrize(
    "key", ["sft_train_on_completion_only=false", "overlong=drop", "packing=false"]
)
def test_keys_that_make_another_stream_are_its_identity(tmp_path: Path, key: str) -> None:
    identities = [open_stream(chat_config(tmp_path, TALKS, *o)).identity for o in ((), (key,))]
    assert identities[0] != identities[1]


def test_another_template_is_another_stream(tmp_path: Path) -> None:
    before = open_stream(chat_config(tmp_path, TALKS)).identity
    write_tokenizer(tmp_path / "tokenizer", CHATML.replace("im_end|>\n", "im_end|>"))
    assert open_stream(chat_config(tmp_path, None)).identity["content"] != before["content"]


def test_documents_have_the_identity_of_before(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    config = load_config(overrides=["dataset_type=jsonl", f"dataset_path={tmp_path / 'a.jsonl'}"])
    assert not [key for key in open_stream(config).identity if "sft" in key or key == "overlong"]


def test_prepared_conversations_are_the_same_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = chat_config(tmp_path, TALKS)
    typed = [
        f"{key}={config[key]}"
        for key in (
            "use_sft",
            "dataset_type",
            "dataset_path",
            "tokenizer_type",
            "tokenizer_path",
            "vocab_size",
        )
    ]
    assert main(["prepare", *typed, "--output", "tokens", "--workers", "2"]) == 0
    assert main(["prepare", "--verify", "tokens"]) == 0
    capsys.readouterr()
    stored = ("dataset_type=tokens", f"dataset_path={Path('tokens').absolute()}")
    prepared = open_stream(chat_config(tmp_path, None, *stored))
    direct = open_stream(config)
    assert prepared.identity == direct.identity
    assert np.array_equal(prepared[3]["weights"], direct[3]["weights"])
    with pytest.raises(ConfigError, match="works: use_sft=true"):
        open_stream(chat_config(tmp_path, None, *stored, "use_sft=false"))
    with pytest.raises(ConfigError, match="works: sft_train_on_completion_only=true"):
        open_stream(chat_config(tmp_path, None, *stored, "sft_train_on_completion_only=false"))


@pytest.mark.runs
def test_the_plan_knows_the_trained_tokens_of_an_update_once_the_data_are_indexed(
    tmp_path: Path,
) -> None:
    config = chat_config(tmp_path, TALKS, "enable_data_shuffling=true")
    assert trained_tokens_if_cached(config.stream) is None
    stream = open_stream(config)
    shares = trained_tokens_if_cached(config.stream)
    n = stream.samples_per_epoch
    whole = trained_tokens_of_update(shares, n)
    assert whole == {
        "mean": pytest.approx(stream.stats()["trained_tokens"]),
        "std": pytest.approx(0),
    }
    weights = stream.read(0, 200 * n)["weights"].sum(axis=1).reshape(200, n)[:, :4].sum(axis=1)
    drawn = trained_tokens_of_update(shares, 4)
    assert drawn == {
        "mean": pytest.approx(weights.mean(), rel=0.05),
        "std": pytest.approx(weights.std(), rel=0.2),
    }


def test_samples_are_printed_as_json_with_the_weight_of_each_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "cd"}])
    args = [
        "use_sft=true",
        "dataset_type=jsonl",
        f"dataset_path={tmp_path / 'a.jsonl'}",
        "max_target_length=6",
    ]
    assert main(["data", *args, "--json", "--count", "1"]) == 0
    sample = json.loads(capsys.readouterr().out)
    assert (sample["tokens"], sample["weights"], sample["segments"]) == (
        [*b"abcd", 257, 258],
        [0, 0, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 0],
    )
    assert main(["data", *args, "--stats", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["trained_tokens"] == 3 and stats["trained_tokens_per_sample"] == {
        "mean": 3,
        "std": 0,
    }
    assert main(["plan", *args, "--json", "per_device_batch_size=2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["trained_tokens_per_step"] == {"mean": 6, "std": 0}


def test_bad_and_long_records_are_listed_by_file_and_number_and_counted_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    null = {"messages": [ASKED, {"role": "assistant", "content": None}]}
    chat_config(tmp_path, [talk("a", "b"), null, talk("a", "b " * 100), talk("c", "d"), null])
    path = tmp_path / "chats.jsonl"
    path.write_text("\n" + path.read_text() + "no JSON\n")
    stated = [*chat_overrides(tmp_path), "skip_bad_records=true"]
    assert main(["data", "--bad", "--json", *stated]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["record"], one["effect"]) for one in listed] == [
        (3, "left out"),
        (4, "cut"),
        (6, "left out"),
        (7, "left out"),
    ]
    assert {one["file"] for one in listed} == {str(path)} and "content is null" in listed[0][
        "reason"
    ]
    assert main(["data", "--bad", *chat_overrides(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}:3: refused: message 2 of field messages: content is null")
    assert lines[-1] == "4 records left out, cut, split or refused"
    notes = open_stream(chat_config(tmp_path, None, "skip_bad_records=true")).notes
    assert notes[0] == (
        "3 records left out: 2 x message N of field messages: content is null, not a text, 1 x "
        "not JSON; maxbatch data --bad lists them"
    )
    assert notes[1].startswith(
        "1 record of more than 64 tokens cut to max_target_length=64 (overlong=truncate)"
    )
    dropped = open_stream(
        chat_config(tmp_path, None, "skip_bad_records=true", "overlong=drop")
    ).notes
    assert dropped[1].startswith("1 record of more than 64 tokens left out (overlong=drop)")


def test_named_fields_decide_the_form_of_a_record(tmp_path: Path) -> None:
    record = {**talk("hi", "hello"), "question": "2+2=", "answer": "4"}
    named = "record_fields={prompt: question, completion: answer}"
    stream = open_stream(chat_config(tmp_path, [record], named))
    assert trained(stream) == "4<|im_end|>"
    (tmp_path / "named.yml").write_text("record_fields: {prompt: question, completion: answer}\n")
    config = load_config(
        tmp_path / "named.yml", [*chat_overrides(tmp_path), "data_cache_dir=" + str(tmp_path / "c")]
    )
    assert config.record_fields == "{prompt: question, completion: answer}"
    assert open_stream(config).identity == stream.identity
