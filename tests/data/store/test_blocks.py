"""Hashes of blocks: damaged data are refused by file and block, and no other data are trained on in
their place.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.cli import main
from maxbatch.config.config import Config
from maxbatch.data.store import blocks, document_table, documents, token_store
from maxbatch.data.store.blocks import BLOCK_BYTES, BLOCKS, BlockHasher, Blocks, block_hashes
from maxbatch.data.store.token_store import TokenStore, load_folder
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.system.storage.storage import as_path
from maxbatch.system.storage.watched_files import check_watched, watching
from tests.helpers.corpus import some_texts, write_jsonl
from tests.helpers.stores import Store

Damage = Callable[[bytes], bytes]


def flipped(content: bytes, place: int) -> bytes:
    """Returns bytes with another lowest bit in one of them."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES: dict[str, Damage] = {
    "a flipped bit": lambda content: flipped(content, 300),
    "a flipped bit of the first byte": lambda content: flipped(content, 0),
    "a flipped bit of the last byte": lambda content: flipped(content, len(content) - 1),
    "swapped halves": lambda content: content[len(content) // 2 :] + content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "cut short": lambda content: content[:-200],
    "longer": lambda content: content + b"12",
    "empty": lambda _: b"",
}
OTHER_SIZE = ("cut short", "longer", "empty")
FILES = ("tokens.bin", "offsets.npy", "manifest.json", "blocks.bin")
STRATEGIES = ((), ("packing=false",), ("packing_strategy=best_fit",), ("eval_fraction=0.1",))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a file of texts and a store of their tokens."""
    made = tmp_path_factory.mktemp("made")
    texts = write_jsonl(made / "a.jsonl", [{"text": text} for text in some_texts(400)])
    words = ["dataset_type=jsonl", f"dataset_path={texts}", "--output", str(made / "tokens")]
    assert main(["prepare", *words, "--workers", "1"]) == 0
    return made


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "tokens"


def config_on(folder: object, *overrides: str) -> Config:
    keys = ["dataset_type=tokens", f"dataset_path={folder}", "max_target_length=64"]
    return load_config(overrides=[*keys, "grain_worker_count=0", *overrides])


def epoch(stream: Stream) -> None:
    stream.read(0, stream.samples_per_epoch or 0)


def without_hashes(folder: Path) -> None:
    (folder / "blocks.bin").unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"], manifest["sizes"]["blocks.bin"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


# The last hash is that of the table's last block, and a table is compared with its hashes only
# where it is damaged: the hash says in which block.
UNREAD = ("blocks.bin", "a flipped bit of the last byte")


@pytest.mark.parametrize(
    ("name", "damage"),
    [cell for cell in itertools.product(FILES, DAMAGES) if cell != UNREAD],
)
def test_a_damaged_file_is_named_and_nothing_is_read_in_its_place(
    folder: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(DAMAGES[damage](content))
    with pytest.raises(ConfigError) as refused:
        epoch(open_stream(config_on(folder)))
    assert main(["prepare", "--verify", str(folder)]) == 2
    # A hash and its block differ from each other: which of them is damaged cannot be known.
    named = "tokens.bin" if name == "blocks.bin" and damage not in OTHER_SIZE else name
    for message in (str(refused.value), capsys.readouterr().err.rstrip("\n")):
        assert f"{folder / named}: " in message and "\n" not in message
        if damage not in OTHER_SIZE and name != "manifest.json":
            assert re.search(
                r"block \d+ \(bytes \d+ on\) differs from its hash in blocks\.bin", message
            )


@pytest.mark.parametrize("settings", STRATEGIES)
@pytest.mark.parametrize("damage", ("swapped halves", "cut short"))
def test_tokens_damaged_in_mid_run_are_refused(
    folder: Path, damage: str, settings: tuple[str, ...]
) -> None:
    stream = open_stream(config_on(folder, *settings))
    with open(folder / "tokens.bin", "rb") as file:
        content = file.read()
    with open(folder / "tokens.bin", "r+b") as file:  # in place: it may be mapped
        file.write(DAMAGES[damage](content))
        file.truncate(len(DAMAGES[damage](content)))
    with pytest.raises(ConfigError, match=r"tokens\.bin: the tokenised data cannot be used"):
        epoch(stream)


def test_tokens_cut_short_after_they_were_read_do_not_end_the_process(folder: Path) -> None:
    stream = open_stream(config_on(folder))
    epoch(stream)
    os.truncate(folder / "tokens.bin", 1000)
    with pytest.raises(ConfigError, match="cut short in block 7"):
        epoch(stream)


LAYOUTS = {"small": (), "mapped": ("_MAPPED_BYTES",), "searched": ("_MAPPED_BYTES", "WHOLE_BYTES")}


def flip(path: Path, place: int) -> None:
    """Changes a bit of a file in place: it may be mapped."""
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("layout", [*LAYOUTS, "without hashes"])
def test_a_store_that_changes_after_a_run_read_it_is_named_before_a_save(
    folder: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LAYOUTS.get(layout, ()):  # of the table of documents
        monkeypatch.setattr(token_store if name == "_MAPPED_BYTES" else document_table, name, 0)
    if layout == "without hashes":
        without_hashes(folder)
    watched = ["tokens.bin", *(["offsets.npy"] if layout in ("mapped", "searched") else [])]
    watched += ["blocks.bin"] if layout != "without hashes" else []
    with watching():
        epoch(open_stream(config_on(folder)))
        for name in watched:
            (folder / name).touch()
        check_watched()  # the same content
        for name in watched:
            named = rf"{name}: has changed since this start hashed it"
            flip(folder / name, 300)
            with pytest.raises(ConfigError, match=named):
                check_watched()
            flip(folder / name, 300)
            check_watched()  # the former content
        os.truncate(folder / "tokens.bin", 1000)
        with pytest.raises(
            ConfigError, match=r"tokens\.bin: has changed since this start hashed it"
        ):
            check_watched()


@pytest.mark.parametrize("strategy", ["concatenate", "best_fit"])
def test_what_the_cache_holds_of_a_dataset_is_watched_and_may_be_removed(
    tmp_path: Path, strategy: str
) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in some_texts(200)])
    keys = [
        "dataset_type=jsonl",
        f"dataset_path={texts}",
        f"packing_strategy={strategy}",
        "max_target_length=64",
    ]
    for _ in ("tokenised now", "found"):
        with watching():
            stream = open_stream(load_config(overrides=[*keys, f"data_cache_dir={tmp_path}/cache"]))
            epoch(stream)
            kinds = ["tokens", *(["packing"] if strategy == "best_fit" else [])]
            for kind in kinds:
                (file,) = (tmp_path / "cache" / kind).glob(
                    "*/tokens.bin" if kind == "tokens" else "*"
                )
                flip(file, file.stat().st_size - 300)
                with pytest.raises(
                    ConfigError, match=rf"{file.name}: has changed since this start hashed it"
                ):
                    check_watched()
                flip(file, file.stat().st_size - 300)
            check_watched()
            shutil.rmtree(tmp_path / "cache")
            check_watched()
            epoch(stream)  # its maps have the content


def test_a_damaged_shard_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 1)  # a job for each file
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    halves = {"a0.jsonl": lines[:200], "a1.jsonl": lines[200:]}
    for name, some in halves.items():
        (tmp_path / name).write_text("".join(some))
    path = ";".join(str(tmp_path / name) for name in halves)
    keys = ["dataset_type=jsonl", f"dataset_path={path}", "--shard-tokens", "4000"]
    main(["prepare", *keys, "--output", str(tmp_path / "many")])
    shard = tmp_path / "many" / "tokens-00000.bin"
    assert (
        open_stream(config_on(tmp_path / "many")).identity
        == open_stream(config_on(folder)).identity
    )
    shard.write_bytes(DAMAGES["a flipped bit"](shard.read_bytes()))
    with pytest.raises(
        ConfigError, match=r"tokens-00000\.bin: .* block 2 \(bytes 256 on\) differs from its hash"
    ):
        epoch(open_stream(config_on(tmp_path / "many")))
    flip(shard, 300)
    with watching():
        epoch(open_stream(config_on(tmp_path / "many")))
        flip(shard, 300)
        with pytest.raises(ConfigError, match=r"tokens-00000\.bin: has changed since"):
            check_watched()


def test_files_of_another_store_are_refused_with_their_hashes(folder: Path, tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "b.jsonl", [{"text": text[::-1]} for text in some_texts(400)])
    main(
        [
            "prepare",
            "dataset_type=jsonl",
            f"dataset_path={texts}",
            "--output",
            str(tmp_path / "other"),
        ]
    )
    for name in ("tokens.bin", "offsets.npy", "blocks.bin"):
        shutil.copy(tmp_path / "other" / name, folder / name)
    with pytest.raises(ConfigError, match=r"tokens\.bin: .* differs from its hash"):
        epoch(open_stream(config_on(folder)))


def test_the_cache_takes_neither_the_store_nor_the_packing_of_other_data(tmp_path: Path) -> None:
    def stream(name: str, texts: list[str]) -> Stream:
        path = tmp_path / name
        if not path.exists():
            write_jsonl(path, [{"text": text} for text in texts])
        keys = [
            "dataset_type=jsonl",
            f"dataset_path={path}",
            "packing_strategy=best_fit",
            "max_target_length=64",
        ]
        return open_stream(load_config(overrides=[*keys, f"data_cache_dir={tmp_path}/cache"]))

    texts = some_texts(200)
    expected = stream("a", texts).read(0, 20)["tokens"]
    stream("b", texts[::-1])
    for kind in ("tokens", "packing"):
        one, other = sorted((tmp_path / "cache" / kind).iterdir())
        one.rename(tmp_path / "third")
        other.rename(one)
        (tmp_path / "third").rename(other)
        np.testing.assert_array_equal(stream("a", texts).read(0, 20)["tokens"], expected)


def test_a_store_without_hashes_is_the_same_stream_with_one_warning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = open_stream(config_on(folder))
    expected = new.read(0, 20)
    without_hashes(folder)
    capsys.readouterr()
    old, _ = (open_stream(config_on(folder)) for _ in range(2))
    assert capsys.readouterr().err.count("made without hashes") == 1
    assert old.identity == new.identity
    np.testing.assert_array_equal(old.read(0, 20)["tokens"], expected["tokens"])
    main(
        [
            "prepare",
            "dataset_type=jsonl",
            f"dataset_path={folder.parent}/a.jsonl",
            "--output",
            str(folder),
        ]
    )
    assert load_folder(folder).blocks is not None, "prepared again, it has them"


def test_hashes_do_not_depend_on_the_parts_that_are_written() -> None:
    content = np.random.default_rng(0).integers(0, 256, 70_001, np.uint8).tobytes()
    found: list[np.ndarray] = []
    hasher, begin = BlockHasher(found.append), 0
    for size in (0, 1, 127, 128, 300, 5, 69_440):
        hasher.update(content[begin : begin + size])
        begin += size
    hasher.finish()
    np.testing.assert_array_equal(np.concatenate(found), block_hashes(content))
    assert len(block_hashes(content)) == -(-len(content) // BLOCK_BYTES)
    assert len({*block_hashes(content).tolist()}) == len(block_hashes(content))


@pytest.fixture
def bucket_folder(store: Store, tmp_path: Path) -> str:
    texts = write_jsonl(tmp_path / "a.jsonl", [{"text": text * 40} for text in some_texts(2000)])
    output = f"{store.bucket()}/tokens"
    main(["prepare", "dataset_type=jsonl", f"dataset_path={texts}", "--output", output])
    return output


@pytest.mark.parametrize(
    ("name", "is_ranged"),
    [
        ("tokens.bin", False),
        ("tokens.bin", True),
        ("offsets.npy", False),
        ("offsets.npy", True),
        ("blocks.bin", False),
    ],
)
def test_a_block_damaged_in_a_bucket_in_mid_run_is_named(
    bucket_folder: str, name: str, is_ranged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_ranged:
        monkeypatch.setattr(document_table, "WHOLE_BYTES", 0)
        monkeypatch.setattr(blocks, "WHOLE_BYTES", 0)
    path = as_path(bucket_folder) / name
    content = path.read_bytes()
    stream = open_stream(config_on(bucket_folder))
    path.write_bytes(DAMAGES["swapped halves"](content))
    if name == "offsets.npy" and not is_ranged:
        stream.read(0, 20)  # it was read whole when the stream was opened
        stream = None
    with pytest.raises(
        ConfigError, match=r"(tokens\.bin|offsets\.npy): .*block \d+ .*differs from its hash"
    ):
        epoch(stream or open_stream(config_on(bucket_folder)))


def test_hashes_let_the_bytes_that_are_read_from_a_bucket_grow_by_a_tenth_at_most(
    store: Store, bucket_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(0).permutation(200)[:40]

    def bytes_read(settings: tuple[str, ...]) -> int:
        keys = ("max_target_length=1024", "enable_data_shuffling=false", *settings)
        stream = open_stream(config_on(bucket_folder, *keys))
        stream.batch([0])  # reads the hashes
        store.forget()
        for row in rows.tolist():
            stream.batch([row])
        return sum(size for _, method, _, size, _ in store.requests() if method == "GET")

    for settings in ((), ("eval_fraction=0.1",)):
        checked = bytes_read(settings)
        with monkeypatch.context() as patch:
            patch.setattr(TokenStore, "blocks", None)
            plain = bytes_read(settings)
        assert plain <= checked <= 1.1 * plain, settings


def test_hashes_on_a_disk_are_mapped_however_large_the_tokens_are(tmp_path: Path) -> None:
    hashes = Blocks(tmp_path, "content", {"tokens.bin": 1 << 30})
    with open(tmp_path / BLOCKS, "wb") as file:
        file.truncate(hashes.num_bytes)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"block 0 .* differs from its hash"):
        hashes.check("tokens.bin", 0, bytes(BLOCK_BYTES))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20 < hashes.num_bytes
