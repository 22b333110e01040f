"""`deduplicate`: of equal records the first is kept, and none is trained on that is held out."""

from __future__ import annotations

import filecmp
import json
import os
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.around.formats import jsonl
from maxbatch.cli import main
from maxbatch.data.store import documents, formats
from maxbatch.data.store.builder import Build, build_store
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.duplicates import HashTable
from maxbatch.data.store.lookup import open_store
from maxbatch.data.store.token_store import TokenStore, load_folder
from maxbatch.data.stream.sources import samples_per_epoch_if_cached
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer
from maxbatch.kinds.prompt.prompts import PromptSource
from tests.data.store.test_formats import WRITERS
from tests.helpers.chats import chat_config, talk
from tests.helpers.corpus import jsonl_config, some_texts, write_jsonl

TEXTS = ["one", "two", "one", "", "three", "two", "one"]
ALONE = ("packing=false", "add_bos=false", "add_eos=false")  # a row is the text of a document


def opened(
    path: Path | str, *overrides: str, split: Any = "train", texts: list[str] | None = None
) -> Stream:
    stream: Stream = open_stream(
        jsonl_config(Path(path), texts, "deduplicate=true", *ALONE, *overrides).stream, split
    )
    return stream


def texts_of(stream: Stream) -> list[str]:
    """The texts of an epoch of rows of one document each, in the order of the data."""
    rows = [(stream.row(index).row, stream[index]) for index in range(len(stream))]
    return [
        stream.tokenizer.decode(row["tokens"][row["segments"] > 0])
        for _, row in sorted(rows, key=lambda r: r[0])
    ]


@pytest.mark.parametrize("count", [1, 7, 3000, 40_000])
def test_the_table_finds_the_first_of_equal_hashes_as_a_dictionary_does(
    tmp_path: Path, count: int
) -> None:
    rng = np.random.default_rng(count)
    # A word of a hash is shared by some others, and a hash may be all zeros.
    words = rng.integers(0, 1 << 63, 2 + count // 3).astype(np.uint64)
    hashes = np.stack(
        [words[rng.integers(0, 2, count)], words[rng.integers(0, len(words), count)]], axis=1
    )
    hashes[::7] = 0
    numbers = np.arange(count, dtype=np.uint64)
    table, first = HashTable(tmp_path, slots=16), dict[tuple[int, ...], int]()
    for begin in range(0, count, 501):
        some = slice(begin, begin + 501)
        as_kept = np.where(hashes[some].any(axis=1, keepdims=True), hashes[some], 1)
        wanted = [
            first.setdefault(tuple(map(int, h)), int(n))
            for h, n in zip(as_kept, numbers[some], strict=True)
        ]
        assert table.first(hashes[some].copy(), numbers[some]).tolist() == wanted
    assert os.listdir(tmp_path) == [], "its file has no name"


@pytest.mark.parametrize("name", [*WRITERS, "text"])
def test_the_first_of_equal_records_is_kept_in_every_format(tmp_path: Path, name: str) -> None:
    if name == "text":
        (tmp_path / "d").mkdir()
        for number, text in enumerate(TEXTS):
            (tmp_path / "d" / f"{number}.txt").write_text(text)
        kind, path = "text", tmp_path / "d"
    else:
        kind, file_name, write = WRITERS[name]
        path = write(tmp_path / file_name, TEXTS)
    stream = opened(path, f"dataset_type={kind}")
    assert texts_of(stream) == ["one", "two", "three"]
    assert any("3 x equal to an earlier record" in note for note in stream.notes), stream.notes


def test_conversations_pairs_and_prompts_are_equal_by_what_is_trained(tmp_path: Path) -> None:
    talks = [{**talk("a", "b"), "id": 1}, talk("a", "c"), {**talk("a", "b"), "id": 2}]
    assert open_stream(chat_config(tmp_path, talks, "deduplicate=true")).stats()["documents"] == 2

    answers = [("x", "y"), ("x", "z"), ("y", "x"), ("x", "y")]
    pairs = [
        {"prompt": "ab", "chosen": chosen, "rejected": rejected} for chosen, rejected in answers
    ]
    path = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    keys = [
        "dataset_type=jsonl",
        f"dataset_path={path}",
        "use_dpo=true",
        "max_target_length=16",
        "deduplicate=true",
    ]
    assert len(open_stream(load_config(overrides=keys).stream)) == 3

    records = [{"question": text, "id": number} for number, text in enumerate(["a", "b", "a", "c"])]
    asked = write_jsonl(tmp_path / "asked.jsonl", records)
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [records[3], records[3]])
    keys = [
        "dataset_type=jsonl",
        f"dataset_path={asked}",
        f"eval_dataset_path={held_out}",
        "batch_size=8",
        "prompt_template={question}",
        "enable_data_shuffling=false",
        "deduplicate=true",
    ]
    prompts = PromptSource(load_config(overrides=keys).prompting)
    assert [prompt.record["id"] for prompt in prompts.train().read(0, 2)] == [0, 1]
    assert (prompts.train().skipped_records, prompts.train().num_prompts) == (2, 2)
    assert prompts.held_out is not None and prompts.held_out.num_prompts == 1


@pytest.mark.parametrize("share", ["0.1", "0.5"])
def test_no_held_out_record_of_eval_fraction_is_trained_on(tmp_path: Path, share: str) -> None:
    texts = [str(number % 37) for number in range(200)]
    parts = [
        texts_of(opened(tmp_path / "a.jsonl", f"eval_fraction={share}", split=split, texts=texts))
        for split in ("train", "eval")
    ]
    assert sorted(parts[0] + parts[1], key=int) == [str(number) for number in range(37)]
    assert len(parts[1]) == int(37 * Fraction(share))


def test_training_leaves_out_the_records_of_eval_dataset_path(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "held_out.jsonl", [{"text": text} for text in ["two", "two", "nine"]])
    held_out = f"eval_dataset_path={tmp_path}/held_out.jsonl"
    stream = opened(tmp_path / "a.jsonl", held_out, texts=TEXTS)
    assert texts_of(stream) == ["one", "three"]
    assert any(
        "2 x equal to a held-out record, 2 x equal to an earlier record" in note
        for note in stream.notes
    )
    assert texts_of(opened(tmp_path / "a.jsonl", held_out, split="eval")) == ["two", "nine"], (
        "kept whole"
    )
    config = jsonl_config(tmp_path / "a.jsonl", None, "deduplicate=true", *ALONE, held_out)
    assert samples_per_epoch_if_cached(config.stream) == 2, "found again without reading"
    write_jsonl(tmp_path / "held_out.jsonl", [{"text": "one"}])
    assert texts_of(opened(tmp_path / "a.jsonl", held_out)) == ["two", "three"], (
        "other held-out data, other training"
    )
    write_jsonl(tmp_path / "held_out.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(
        ConfigError, match=r"holds no document \(7 .* 6 x equal to a held-out record"
    ):
        opened(tmp_path / "a.jsonl", held_out)


def test_every_source_of_a_mixture_leaves_out_what_is_held_out_whatever_its_fields(
    tmp_path: Path,
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ["one", "two", "one"]])
    (tmp_path / "b.csv").write_text("body\nthree\ntwo\none\nthree\n")
    write_jsonl(tmp_path / "held_out.jsonl", [{"text": "two"}])
    (tmp_path / "mix.yml").write_text(
        "a: {path: a.jsonl, weight: 1}\nb: {path: b.csv, weight: 1, dataset_type: csv, "
        "text_field: body}\n"
    )
    stated = f"eval_dataset_path={tmp_path}/held_out.jsonl"
    sources = opened(tmp_path / "mix.yml", stated).stats()["sources"]
    assert {name: figures["documents"] for name, figures in sources.items()} == {"a": 1, "b": 2}
    with pytest.raises(
        ConfigError, match=r"eval_fraction=0.1 of a mixture may hold out .* works: eval_fraction=0$"
    ):
        opened(tmp_path / "mix.yml", "eval_fraction=0.1")


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of which a third are duplicates, in many pieces and jobs."""
    for module in (jsonl, formats, documents):
        monkeypatch.setattr(module, "PIECE_BYTES", 500)
    texts = some_texts(200)
    records = [{"text": text} for text in [*texts, "", *texts[50:150]]]
    write_jsonl(tmp_path / "held_out.jsonl", [{"text": text} for text in texts[:5]])
    return write_jsonl(tmp_path / "a.jsonl", records)


def test_any_number_of_workers_and_shards_keeps_the_same_records(many: Path) -> None:
    command = [
        "prepare",
        "dataset_type=jsonl",
        f"dataset_path={many}",
        "deduplicate=true",
        f"eval_dataset_path={many.parent}/held_out.jsonl",
    ]
    for workers in ("1", "3"):
        assert main([*command, "--output", f"out{workers}", "--workers", workers]) == 0
    names = ["blocks.bin", "manifest.json", "offsets.npy", "records.jsonl", "tokens.bin"]
    assert filecmp.cmpfiles("out1", "out3", names, shallow=False)[0] == names
    manifest = load_folder(Path("out1")).manifest
    assert (manifest["documents"], manifest["skipped_records"]) == (195, 106)
    assert (
        manifest["deduplicated"] and manifest["skipped_reasons"]["equal to a held-out record"] == 5
    )
    assert main([*command, "--output", "cut", "--shard-tokens", "1000"]) == 0
    assert load_folder(Path("cut")).manifest["content"] == manifest["content"]
    assert filecmp.cmp("out1/records.jsonl", "cut/records.jsonl", shallow=False)


def test_a_prepared_store_is_the_stream_that_its_records_are(
    many: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["dataset_type=jsonl", f"dataset_path={many}", "deduplicate=true"]
    assert main(["prepare", *typed, "--output", "out"]) == 0
    then = capsys.readouterr().out.splitlines()[-1].removeprefix("next: maxbatch train ").split()
    streams = [
        open_stream(load_config(overrides=[*keys, "max_target_length=64"]))
        for keys in (typed, then)
    ]
    assert streams[0].identity == streams[1].identity and streams[0].identity["deduplicate"]


def test_what_is_without_the_key_stays_as_it_is(many: Path) -> None:
    before = open_stream(jsonl_config(many, None))
    without = open_stream(jsonl_config(many, None, "deduplicate=false"))
    assert "deduplicate" not in before.identity and without.identity == before.identity
    store = open_store(jsonl_config(many, None).store, ByteTokenizer())
    assert (
        isinstance(store, TokenStore)
        and "deduplicated" not in store.manifest
        and store.manifest["documents"] == 300
    )


def test_memory_does_not_grow_with_the_records_that_are_compared(
    tmp_path: Path, many: Path
) -> None:
    peaks = []
    for count in (200, 500, 2000):  # the first loads what is loaded once
        texts = some_texts(count)
        path = write_jsonl(
            tmp_path / f"{count}.jsonl", [{"text": text} for text in [*texts, *texts]]
        )
        keys = ["dataset_type=jsonl", f"dataset_path={path}", "deduplicate=true"]
        config = load_config(overrides=keys).store
        source = DocumentSource.from_config(config)
        tracemalloc.start()
        store = build_store(tmp_path / f"store-{count}", Build(source, ByteTokenizer(), config))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert store.manifest["documents"] == count
    assert peaks[2] < 1.2 * peaks[1], peaks


def test_bad_lists_each_duplicate_with_the_record_that_it_is_equal_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ["one", "", "two", "one"]])
    write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in ["two", "nine"]])
    write_jsonl(
        tmp_path / "held_out.jsonl", [{"text": text} for text in ["eight", "nine", "eight"]]
    )
    keys = [
        "dataset_type=jsonl",
        "dataset_path=a.jsonl;b.jsonl;a.jsonl",
        "eval_dataset_path=held_out.jsonl",
    ]
    assert main(["data", "--bad", *keys, "deduplicate=true", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(os.path.basename(one["file"]), one["record"], one["reason"]) for one in found] == [
        ("a.jsonl", 2, "an empty text"),
        ("a.jsonl", 4, f"equal to record 1 of {tmp_path}/a.jsonl"),
        ("b.jsonl", 1, f"equal to record 3 of {tmp_path}/a.jsonl"),
        ("b.jsonl", 2, f"equal to record 2 of {tmp_path}/held_out.jsonl"),
        ("a.jsonl", 1, f"equal to record 1 of {tmp_path}/a.jsonl"),
        ("a.jsonl", 2, "an empty text"),
        ("a.jsonl", 3, f"equal to record 3 of {tmp_path}/a.jsonl"),
        ("a.jsonl", 4, f"equal to record 1 of {tmp_path}/a.jsonl"),
        ("held_out.jsonl", 3, f"equal to record 1 of {tmp_path}/held_out.jsonl"),
    ]
    assert {one["effect"] for one in found} == {"left out"}


def test_an_overlong_record_behind_duplicates_is_named_by_its_own_number(tmp_path: Path) -> None:
    talks = [talk("a", "b"), talk("a", "b"), talk("a", "word " * 50)]
    with pytest.raises(ConfigError, match=r"line 3"):
        open_stream(chat_config(tmp_path, talks, "deduplicate=true", "overlong=error"))


@pytest.mark.parametrize("kind", ["tokens", "megatron", "synthetic", "arithmetic"])
def test_data_without_records_to_compare_are_refused_by_name(kind: str) -> None:
    stated = [
        f"dataset_type={kind}",
        "deduplicate=true",
        *(["dataset_path=d"] if kind in ("tokens", "megatron") else []),
    ]
    with pytest.raises(
        ConfigError, match=rf"^deduplicate=true: dataset_type={kind} .*; works: deduplicate=false$"
    ):
        open_stream(load_config(overrides=stated).stream)
