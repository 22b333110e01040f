"""Stores of several shards: the same tokens as of one file, opened by few requests, built on after
a kill.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxbatch import load_config
from maxbatch.cli import main
from maxbatch.data.store import documents, shards
from maxbatch.data.store.ranged_tokens import RangedTokens
from maxbatch.data.store.shards import RemoteShards, Shard
from maxbatch.data.store.token_store import TokenStore, open_folder, shard_names
from maxbatch.data.store.tokenise import Tokenised
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.system.storage.leases import LEASE_FILE
from maxbatch.system.storage.storage import AnyPath, as_path
from tests.helpers.stores import Store

NUM_SHARDS = 1000


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A dataset with one job per file, so that shards of a token end after each."""
    monkeypatch.setattr(documents, "PIECE_BYTES", 1)
    (tmp_path / "texts").mkdir()
    for number in range(NUM_SHARDS):
        (tmp_path / "texts" / f"{number:04d}.txt").write_text(
            f"{number} " + "word " * (number % 23)
        )
    return ["dataset_type=text", f"dataset_path={tmp_path}/texts"]


def opened(folder: AnyPath | str) -> TokenStore:
    store = open_folder(as_path(str(folder)))
    assert store is not None
    return store


def stream_of(folder: AnyPath | str) -> Stream:
    keys = ["dataset_type=tokens", f"dataset_path={folder}", "max_target_length=128"]
    return open_stream(load_config(overrides=keys))


@pytest.mark.runs
def test_a_store_of_a_thousand_shards_has_the_stream_of_one_file(
    texts: list[str], tmp_path: Path
) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    assert main(["prepare", *texts, "--output", str(one)]) == 0
    assert main(["prepare", *texts, "--shard-tokens", "1", "--output", str(many)]) == 0
    assert main(["prepare", "--verify", str(many)]) == 0
    assert {path.name for path in many.iterdir()} == {
        "blocks.bin",
        "manifest.json",
        "offsets.npy",
        "records.jsonl",
        *shard_names(NUM_SHARDS),
    }
    started = time.process_time()  # what others do meanwhile does not count
    there = stream_of(many)
    assert time.process_time() - started < 2
    here = stream_of(one)
    assert here.identity == there.identity
    rows = [*range(40), 7]
    for name, array in there.batch(rows).items():
        np.testing.assert_array_equal(array, here.batch(rows)[name])
    tokens = opened(many).tokens
    assert isinstance(tokens, RangedTokens)
    np.testing.assert_array_equal(tokens[:], opened(one).tokens[:])


def test_a_missing_shard_is_a_damaged_store(texts: list[str], tmp_path: Path) -> None:
    assert (
        main(["prepare", *texts, "--shard-tokens", "5000", "--output", str(tmp_path / "store")])
        == 0
    )
    names = sorted(path.name for path in (tmp_path / "store").glob("tokens-*"))
    assert 5 < len(names) < 50
    (tmp_path / "store" / names[3]).unlink()
    assert open_folder(tmp_path / "store") is None


def test_a_thousand_shards_in_a_bucket_open_by_few_requests_and_a_row_is_one(
    store: Store, texts: list[str], tmp_path: Path
) -> None:
    many, folder = tmp_path / "many", as_path(store.bucket()) / "many"
    assert main(["prepare", *texts, "--shard-tokens", "1", "--output", str(many)]) == 0
    with ThreadPoolExecutor(16) as pool:
        list(
            pool.map(
                lambda path: (folder / path.name).write_bytes(path.read_bytes()), many.iterdir()
            )
        )
    store.forget()
    there = stream_of(folder)
    assert len(store.requests()) <= 20
    there.batch([0])
    store.forget()
    row = there.batch([5])
    assert len(store.requests()) <= 1 + 128 // 10, "a row of several shards is read from each"
    np.testing.assert_array_equal(row["tokens"], stream_of(many).batch([5])["tokens"])


def test_a_build_in_a_bucket_that_is_killed_goes_on_with_the_next_shard(
    store: Store, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = store.bucket()
    command = ["prepare", *texts, "--shard-tokens", "8000", "--output"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    keep, kept = RemoteShards.keep, list[int]()

    def killed(self: RemoteShards, number: int, file: Path, shard: Shard) -> None:
        if number == 3 and kept == [0, 1, 2]:
            raise KeyboardInterrupt
        kept.append(number)
        keep(self, number, file, shard)

    monkeypatch.setattr(shards.RemoteShards, "keep", killed)
    main([*command, f"{bucket}/tokens"])
    there = as_path(f"{bucket}/tokens")
    assert open_folder(there) is None
    (there / LEASE_FILE).write_text("{}")  # what a kill leaves; nobody renews it
    monkeypatch.setattr("maxbatch.system.storage.leases.LAPSE_S", 0.2)
    kept.clear()
    assert main([*command, f"{bucket}/tokens"]) == 0
    assert kept[0] == 3
    whole = opened(tmp_path / "whole")
    assert opened(there).manifest == whole.manifest and len(whole.manifest["sizes"]) > 6
    names = {path.name for path in there.iterdir()}
    assert names == {path.name for path in (tmp_path / "whole").iterdir()}
    for name in names:
        assert (there / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_facts_of_a_shard_of_another_build_or_half_written_are_not_used() -> None:
    shard = Shard()
    shard.add(
        Tokenised(
            9,
            digests=bytearray(b"0123456789abcdef"),
            held_out=[0],
            reasons={"an empty text": 2},
            text_bytes=7,
        )
    )
    content = shard.to_bytes("mine")
    found = Shard.from_bytes(content, "mine")
    assert found and found.jobs == 1 and found.facts == shard.facts
    assert Shard.from_bytes(content, "another") is None
    assert Shard.from_bytes(content[:-30], "mine") is None


def test_facts_of_a_shard_that_no_build_wrote_are_not_used() -> None:
    shard = Shard()
    shard.add(
        Tokenised(
            9,
            digests=bytearray(b"0123456789abcdef"),
            held_out=[0],
            reasons={"an empty text": 2},
            text_bytes=7,
        )
    )
    sound = dict(np.load(io.BytesIO(shard.to_bytes("mine"))))
    counts = json.loads(sound["counts"].tobytes())

    def read(save: Callable[..., None] = np.savez, **changed: Any) -> Shard | None:
        file = io.BytesIO()
        save(file, **(sound | changed))
        return Shard.from_bytes(file.getvalue(), "mine")

    def of_counts(**changed: Any) -> np.ndarray:
        return np.frombuffer(json.dumps(counts | changed).encode(), np.uint8)

    assert read() is not None
    assert read(np.savez_compressed, lengths=np.zeros(1 << 20, np.int64)) is None, (
        "a little file of any size"
    )
    for name, value in (
        ("jobs", -1),
        ("jobs", "1"),
        ("text_bytes", 1.5),
        ("reasons", None),
        ("reasons", {"x": -1}),
        ("tokens", []),
    ):
        assert read(counts=of_counts(**{name: value})) is None, (name, value)
    assert read(counts=np.frombuffer(b"[" * 5000, np.uint8)) is None
    assert read(counts=np.frombuffer(b"[]", np.uint8)) is None
    assert read(lengths=np.array([-1])) is None
    assert read(lengths=np.array([1.5])) is None
    assert read(hashes=np.zeros((2, 2), np.uint32)) is None
