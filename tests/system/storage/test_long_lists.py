from __future__ import annotations

import gc
import glob
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.system.storage import long_lists
from maxbatch.system.storage.long_lists import (
    LongList,
    Mapped,
    in_order,
    json_parts,
    read_json_list,
)
from maxbatch.system.storage.source_files import files_below, files_matching

WORDS = st.lists(st.text(st.characters(exclude_categories=()), max_size=4), max_size=40)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_BLOCK", 3), ("_RUN", 7), ("_MOST_RUNS", 3)):
        monkeypatch.setattr(long_lists, name, value)


@given(WORDS)
def test_a_long_list_has_its_values_in_order_as_often_as_it_is_read(words: list[str]) -> None:
    values = LongList(words)
    readers = [iter(values), iter(values)]
    assert list(zip(*readers, strict=True)) == [(word, word) for word in words]
    assert len(values) == len(words) and bool(values) == bool(words)


@given(WORDS)
def test_values_are_sorted_as_in_memory(words: list[str]) -> None:
    assert list(in_order(words)) == sorted(words)
    assert list(in_order((word, "path") for word in words)) == sorted(
        (word, "path") for word in words
    )


@given(WORDS, st.integers(1, 9))
def test_json_of_a_long_list_is_that_of_a_list_and_is_read_back(
    words: list[str], size: int
) -> None:
    value = {"words": LongList(words), "b": [Mapped(len, words)], "a": {"z": 1, "y": 2}}
    plain = {"words": words, "b": [[len(word) for word in words]], "a": {"z": 1, "y": 2}}
    for sort_keys in (False, True):
        assert b"".join(json_parts(value, sort_keys)).decode() == json.dumps(
            plain, sort_keys=sort_keys
        )
    text = json.dumps(plain)
    parts = [text[begin : begin + size] for begin in range(0, len(text), size)]
    values, rest = read_json_list(parts, '{"words": [')
    assert list(values) == words and f'{{"words": {json.dumps(words)}{rest}' == text
    for broken in (text[:5], text[1:], '{"words": ["a", "b'):
        with pytest.raises(ValueError, match="the text"):
            read_json_list([broken], '{"words": [')


def test_a_list_that_spills_leaves_no_file_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_lists.tempfile, "tempdir", str(tmp_path))
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))
    values = LongList(range(10))
    assert len(os.listdir("/proc/self/fd")) == before + 1 and not any(tmp_path.iterdir())
    del values
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


NAMES = (
    "b.txt",
    "a/x.txt",
    "a-b.txt",
    "a/.hidden.txt",
    ".c.txt",
    "a/d/z.txt",
    "é.txt",
    "a/b[1].txt",
    "note.md",
)


def test_files_are_listed_as_sorted_and_glob_list_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    below = files_below(tmp_path, lambda name: not name.startswith("."), lambda _: True)
    assert [file.name for file in below] == sorted(
        name for name in NAMES if not Path(name).name.startswith(".")
    )
    monkeypatch.chdir(tmp_path)
    for pattern in (
        "*.txt",
        "*/*.txt",
        "**/*.txt",
        "**",
        ".*",
        "a/b[[]1].txt",
        "*/x.txt",
        "?",
        "no/*.txt",
        "b.txt/*",
    ):
        for start in ("", f"{glob.escape(str(tmp_path))}/"):
            found = [file.name for file in files_matching(Path(start + pattern))]
            paths = sorted(
                path for path in glob.glob(start + pattern, recursive=True) if os.path.isfile(path)
            )
            assert found == paths, start + pattern
