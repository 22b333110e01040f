"""Stores of any size: memory does not grow with their documents, when they are written and when
they are read.
"""

from __future__ import annotations

import io
import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.around.formats import jsonl
from maxbatch.data.store import document_table, documents
from maxbatch.data.store.blocks import block_hashes
from maxbatch.data.store.builder import Build, build_store
from maxbatch.data.store.document_table import MappedTable
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.growing import GrowingHashes, GrowingTable
from maxbatch.data.store.token_store import TokenStore, load_folder
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer
from maxbatch.system.storage.storage import as_path
from tests.data.store.test_blocks import without_hashes
from tests.helpers.corpus import same, some_texts, write_jsonl


def built(folder: Path, texts: list[str]) -> TokenStore:
    path = write_jsonl(folder / f"{len(texts)}.jsonl", [{"text": text} for text in texts])
    keys = ["dataset_type=jsonl", f"dataset_path={path}", f"data_cache_dir={folder}/cache"]
    config = load_config(overrides=keys).store
    return build_store(
        folder / f"store-{len(texts)}",
        Build(DocumentSource.from_config(config), ByteTokenizer(), config),
    )


def stream_of(store: TokenStore, *overrides: str) -> Stream:
    stated = ["dataset_type=tokens", f"dataset_path={store.folder}", "max_target_length=32"]
    return open_stream(load_config(overrides=[*stated, *overrides]))


@pytest.mark.parametrize("count", [0, 1, 9, 10, 100_000])
def test_a_table_that_grew_has_the_bytes_that_numpy_writes(tmp_path: Path, count: int) -> None:
    lengths = np.arange(count) % 7
    with (
        closing(GrowingTable(tmp_path / "offsets.npy")) as table,
        closing(GrowingHashes(tmp_path)) as hashes,
    ):
        for begin in range(0, count, 1000):
            table.append(lengths[begin : begin + 1000])
        table.finish()
        hashes.append_table(table)
        assert (table.documents, table.tokens) == (count, lengths.sum())
    whole = io.BytesIO()
    np.save(whole, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    assert (tmp_path / "offsets.npy").read_bytes() == whole.getvalue()
    assert hashes.num_blocks == len(block_hashes(whole.getvalue()))


def test_memory_of_a_build_does_not_grow_with_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (jsonl, documents):
        monkeypatch.setattr(module, "PIECE_BYTES", 5000)
    peaks = []
    for count in (300, 800, 3200):  # the first loads what is loaded once
        tracemalloc.start()
        built(tmp_path, some_texts(count)).verify()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1], peaks


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenStore:
    """A store whose table counts as too large to be read."""
    store = built(tmp_path, some_texts(3000))
    monkeypatch.setattr(document_table, "WHOLE_BYTES", 1000)
    return store


@pytest.mark.parametrize(
    "overrides", [[], ["packing=false"], ["eval_fraction=0.1"], ["packing_strategy=best_fit"]]
)
@pytest.mark.parametrize("has_hashes", [True, False])
def test_a_table_that_is_searched_on_the_disk_gives_the_same_rows(
    large: TokenStore, monkeypatch: pytest.MonkeyPatch, overrides: list[str], has_hashes: bool
) -> None:
    if not has_hashes:
        without_hashes(Path(str(large.folder)))
    reopened = load_folder(large.folder)
    assert isinstance(reopened.table, MappedTable)
    there = stream_of(reopened, *overrides)
    rows = there.read(0, 50)
    monkeypatch.setattr(document_table, "WHOLE_BYTES", 1 << 30)
    assert not isinstance(load_folder(large.folder).table, MappedTable)
    here = stream_of(reopened, *overrides)
    assert same(here.read(0, 50), rows) and here.identity == there.identity


def test_damage_to_a_table_on_the_disk_is_one_line(large: TokenStore) -> None:
    path = Path(str(large.folder)) / "offsets.npy"
    whole = path.read_bytes()
    data = bytearray(whole)
    data[8000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"offsets\.npy: .* block 62 .* differs from its hash"):
        stream_of(large).read(0, 2000)
    without_hashes(Path(str(large.folder)))
    data[8007] ^= 255
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="are not in order"):
        stream_of(large).read(0, 2000)
    path.write_bytes(whole[:-8] + b"\xff" * 8)
    with pytest.raises(ConfigError, match="goes from token 0 to -1"):
        load_folder(as_path(str(large.folder)))
