"""Preference pairs as samples: two rows of tokens, trained on their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from maxbatch import load_config, open_stream
from maxbatch.data.stream.stream import Stream
from maxbatch.system.errors import ConfigError
from tests.helpers.chats import write_jsonl, write_tokenizer

EOS = 257
PAIR = {"prompt": "ab", "chosen": "cde", "rejected": "f"}


def stream_of(
    folder: Path, records: Sequence[Mapping[str, Any]], *overrides: str, length: int = 8
) -> Stream:
    write_jsonl(folder / "pairs.jsonl", records)
    return open_stream(
        load_config(
            overrides=[
                "use_dpo=true",
                "dataset_type=jsonl",
                f"dataset_path={folder}/pairs.jsonl",
                f"data_cache_dir={folder}/cache",
                f"max_target_length={length}",
                "enable_data_shuffling=false",
                "vocab_size=320",
                *overrides,
            ]
        )
    )


def texts(stream: Stream, index: int) -> list[str]:
    """Both answers of a sample, with trained parts in brackets."""
    sample, length = stream[index], stream.samples.row_length // 2
    found = []
    for half in (slice(0, length), slice(length, None)):
        tokens, weights = sample["tokens"][half], sample["weights"][half]
        read = [
            (stream.tokenizer.decode([token]), weight)
            for token, weight in zip(tokens, weights, strict=True)
        ]
        ids = read[: int((sample["segments"][half] > 0).sum())]
        found.append(
            "".join(f"[{text}]" if weight else text for text, weight in ids).replace("][", "")
        )
    return found


def test_a_sample_is_the_chosen_and_the_rejected_answer_each_after_the_prompt(
    tmp_path: Path,
) -> None:
    stream = stream_of(
        tmp_path, [PAIR, {"chosen": "Say: no", "rejected": "Say: nothing"}], length=16
    )
    sample = stream[0]
    prompt = list(b"ab")
    assert sample["tokens"].tolist()[:6] == [*prompt, *b"cde", EOS]
    assert sample["tokens"].tolist()[16:20] == [*prompt, *b"f", EOS]
    assert sample["segments"].tolist() == [1] * 6 + [0] * 10 + [2] * 4 + [0] * 12
    assert sample["weights"].tolist() == [0, 0, 1, 1, 1, 1] + [0] * 10 + [0, 0, 1, 1] + [0] * 12
    assert texts(stream, 1) == ["Say: [no]", "Say: [nothing]"]  # the end of a text is no text
    figures = stream.stats()
    assert (figures["samples"], figures["documents"], figures["slots"]) == (2, 2, 64)


def test_two_lists_of_messages_are_a_pair_with_and_without_a_prompt(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    asked = {"role": "user", "content": "hi"}
    answers = [{"role": "assistant", "content": text} for text in ("yes", "no")]
    whole = {"chosen": [asked, answers[0]], "rejected": [asked, answers[1]]}
    apart = {"prompt": [asked], "chosen": answers[:1], "rejected": answers[1:]}
    overrides = ("tokenizer_type=huggingface", f"tokenizer_path={tmp_path}/tokenizer")
    stream = stream_of(tmp_path, [whole, apart], *overrides, length=64)
    first, second = ({name: array.tolist() for name, array in stream[i].items()} for i in (0, 1))
    assert first == second
    chosen, rejected = texts(stream, 0)
    assert "yes" in chosen and "no" in rejected and "hi" in chosen.partition("[")[0]
    assert "yes" in chosen.partition("[")[2] and sum(first["weights"]) > 2


def test_a_pair_that_is_too_long_is_cut_left_out_or_refused(tmp_path: Path) -> None:
    records = [PAIR, {"prompt": "abcdefg", "chosen": "hij", "rejected": "k"}]
    assert stream_of(tmp_path, records).stats()["overlong_records"] == 1
    assert stream_of(tmp_path, records, "overlong=drop").samples_per_epoch == 1
    with pytest.raises(
        ConfigError,
        match=r"the pair of .*pairs\.jsonl line 2 has 11 tokens.*works: max_target_length=11",
    ):
        stream_of(tmp_path, records, "overlong=error")
    with pytest.raises(ConfigError, match="all 2 pairs are longer"):
        stream_of(tmp_path, records, "overlong=drop", length=2)


def test_a_held_out_share_counts_pairs_and_keeps_their_answers_together(tmp_path: Path) -> None:
    records = [{"prompt": str(i), "chosen": "a", "rejected": "b"} for i in range(9)]
    stream = stream_of(tmp_path, records, "eval_fraction=0.34")
    assert stream.samples_per_epoch == 6
    assert all(one[:1] == other[:1] for one, other in (texts(stream, i) for i in range(6)))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "line 2: use_dpo=true needs chosen and rejected; its fields: '",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "c"}]},
            "line 2: .*all texts, or",
        ),
        (
            {
                "chosen": [{"role": "user", "content": "c"}],
                "rejected": [{"role": "user", "content": "c"}],
            },
            "line 2: .*only the beginning of the other",
        ),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "line 2: field chosen is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "line 2: field rejected is empty"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "line 2: .*all texts, or"),
    ],
)
def test_a_record_that_is_no_pair_is_named_or_left_out(
    tmp_path: Path, record: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        stream_of(tmp_path, [PAIR, record])
    stream = stream_of(tmp_path, [PAIR, record, PAIR], "skip_bad_records=true")
    assert stream.samples_per_epoch == 2 and stream.stats()["skipped_records"] == 1


def test_a_prepared_store_of_pairs_is_read_as_pairs_alone(tmp_path: Path) -> None:
    store = str(stream_of(tmp_path, [PAIR]).samples.rows._store.folder)
    of_store = ("dataset_type=tokens", f"dataset_path={store}")
    assert stream_of(tmp_path, [PAIR], *of_store)[0]["tokens"].tolist()[2:5] == list(b"cde")
    with pytest.raises(ConfigError, match=r"use_dpo=false.*works: use_dpo=true"):
        stream_of(tmp_path, [PAIR], *of_store, "use_dpo=false")
