"""Tokens in an object store: the same stream as a local store, and each host reads only its
rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.cli import main
from maxbatch.data.store import document_table
from maxbatch.data.store.ranged_tokens import RangedTokens
from maxbatch.data.store.token_store import TokenStore, open_folder
from maxbatch.data.stream.stream import open_stream
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import as_path
from tests.helpers.stores import Store


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    lines = [f'{{"text": "{"word " * (i % 97 + 1)}"}}' for i in range(2000)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    return ["dataset_type=jsonl", f"dataset_path={tmp_path}/words.jsonl"]


def test_a_prepared_store_in_a_bucket_is_that_of_a_disk(
    store: Store, words: list[str], tmp_path: Path
) -> None:
    bucket = store.bucket()
    for output in (str(tmp_path / "tokens"), f"{bucket}/tokens"):
        assert main(["prepare", *words, "--output", output]) == 0
    there = as_path(f"{bucket}/tokens")
    names = ["blocks.bin", "manifest.json", "offsets.npy", "records.jsonl", "tokens.bin"]
    assert sorted(p.name for p in there.iterdir()) == names
    for name in names:
        assert (there / name).read_bytes() == (tmp_path / "tokens" / name).read_bytes()
    assert main(["prepare", "--verify", f"{bucket}/tokens"]) == 0
    store.forget()
    assert main(["prepare", *words, "--output", f"{bucket}/tokens"]) == 0
    assert not any(method in ("PUT", "POST") for _, method, *_ in store.requests()), (
        "it was there already"
    )


def test_rows_are_read_by_range_and_no_host_copies_the_store(
    store: Store, words: list[str], tmp_path: Path
) -> None:
    bucket = store.bucket()
    main(["prepare", *words, "--output", f"{bucket}/tokens"])
    main(["prepare", *words, "--output", str(tmp_path / "tokens")])
    here, there = (
        open_stream(
            load_config(
                overrides=["dataset_type=tokens", f"dataset_path={path}", "max_target_length=128"]
            )
        )
        for path in (tmp_path / "tokens", f"{bucket}/tokens")
    )
    assert here.identity == there.identity
    rows = [5, 900, 901, 17]
    there.batch([0])
    store.forget()
    for name, array in there.batch(rows).items():
        np.testing.assert_array_equal(array, here.batch(rows)[name])
    read = [size for _, method, _, size, _ in store.requests() if method == "GET"]
    assert len(read) <= len(rows)
    assert sum(read) < (tmp_path / "tokens" / "tokens.bin").stat().st_size / 10, (
        "little more than the rows"
    )


@pytest.mark.parametrize("settings", [(), ("packing=false",), ("eval_fraction=0.1",)])
def test_a_large_table_of_documents_is_read_by_range_and_never_whole(
    store: Store,
    words: list[str],
    settings: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = store.bucket()
    for output in (f"{bucket}/tokens", f"{tmp_path}/tokens"):
        assert main(["prepare", *words, "--output", output]) == 0
    keys = ["dataset_type=tokens", "max_target_length=128", *settings]
    splits = ("train", "eval") if "eval_fraction=0.1" in settings else ("train",)
    here = [
        open_stream(load_config(overrides=[*keys, f"dataset_path={tmp_path}/tokens"]), split)
        for split in splits
    ]
    last = min(stream.samples_per_epoch or 0 for stream in here) - 1
    batches = [[5, last // 2, last // 2 + 1, 17], range(40), [last, 0]]
    expected = [[stream.batch(rows) for rows in batches] for stream in here]

    def read_whole(store: TokenStore) -> np.ndarray:
        raise AssertionError(f"the table of {store.folder} was read whole")

    monkeypatch.setattr(TokenStore, "offsets", property(read_whole))
    monkeypatch.setattr(document_table, "WHOLE_BYTES", 0)
    monkeypatch.setattr(document_table, "BLOCK_DOCUMENTS", 32)
    monkeypatch.setattr(document_table, "KEPT_BYTES", 10 * 32 * 8)
    for split, local, expected_of_split in zip(splits, here, expected, strict=True):
        store.forget()
        there = open_stream(load_config(overrides=[*keys, f"dataset_path={bucket}/tokens"]), split)
        assert len(store.requests()) <= 20 and there.identity == local.identity
        assert there.samples_per_epoch == local.samples_per_epoch
        for rows, batch in zip(batches, expected_of_split, strict=True):
            for name, array in there.batch(rows).items():
                np.testing.assert_array_equal(array, batch[name])


def test_ranges_that_lie_side_by_side_are_one_request(store: Store) -> None:
    path = as_path(store.bucket() + "/tokens.bin")
    assert isinstance(path, RemotePath)
    whole = np.arange(100_000, dtype=np.uint16) * 7
    path.write_bytes(whole.tobytes())
    tokens = RangedTokens([path], "uint16", [len(whole)])
    store.forget()
    places = np.concatenate(
        [np.arange(5000, 5100), np.arange(60_000, 60_050), np.arange(5100, 5300)]
    )
    np.testing.assert_array_equal(tokens[places], whole[places])
    assert len(store.requests()) == 2
    np.testing.assert_array_equal(tokens[10:20], whole[10:20])
    np.testing.assert_array_equal(tokens[np.array([-1, 3, 3])], whole[[-1, 3, 3]])
    assert len(tokens[np.zeros(0, np.int64)]) == 0 and len(tokens) == len(whole)


def test_documents_that_lie_apart_are_read_together_while_little_is_read_in_vain(
    store: Store,
) -> None:
    path = as_path(store.bucket() + "/tokens.bin")
    whole = (np.arange(900_000) % 65_521).astype(np.uint16)
    path.write_bytes(whole.tobytes())
    tokens = RangedTokens([path], "uint16", [len(whole)])
    # Documents in pairs: a document of a pair begins 9,000 tokens after the other, the next pair
    # 40,000.
    starts = [pair * 89_000 + within for pair in range(10) for within in (0, 29_000)]
    places = np.concatenate([np.arange(start, start + 20_000) for start in starts])
    store.forget()
    np.testing.assert_array_equal(tokens[places], whole[places])
    sizes = [size for *_, size, _ in store.requests()]
    assert len(sizes) == 10 and sum(sizes) <= 1.5 * 2 * len(places)


def test_a_store_that_is_not_there_or_half_written_is_one_line(store: Store) -> None:
    bucket = store.bucket()
    (as_path(bucket) / "half" / "tokens.bin").write_bytes(b"1234")
    for name in ("none", "half"):
        with pytest.raises(ConfigError, match="needs a folder that `maxbatch prepare` wrote"):
            open_stream(
                load_config(overrides=["dataset_type=tokens", f"dataset_path={bucket}/{name}"])
            )
    assert open_folder(as_path(bucket) / "half") is None
