from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxbatch.data.store.cache_folder import cache_file, json_hash, keep, recall, recall_list
from maxbatch.data.store.file_contents import contents_of, known_contents
from maxbatch.system.storage import long_lists
from maxbatch.system.storage.long_lists import LongList, Mapped, in_order
from maxbatch.system.storage.source_files import SourceFile, files_below


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_BLOCK", 16), ("_RUN", 64), ("_MOST_RUNS", 8)):
        monkeypatch.setattr(long_lists, name, value)


def some_files(count: int) -> Iterator[SourceFile]:
    for name, path in in_order(
        (f"doc-{number * 7919 % count}.txt", f"/data/{number}") for number in range(count)
    ):
        yield SourceFile(path, name, 5, 1, (), f"5 {name}")


def peak(count: int, cache: Path) -> int:
    tracemalloc.start()
    files = LongList(some_files(count))
    contents = contents_of(files, str(cache))
    lines = Mapped(str, zip(files, contents, strict=True))
    json_hash(lines)
    keep(cache / f"lines-{count}", {"lines": Mapped(str, contents)})
    found = recall_list(cache / f"lines-{count}", "lines")
    assert found is not None and len(found[0]) == count
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def test_memory_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    # What else the process allocates meanwhile only adds to a peak.
    few, many = (min(peak(count, tmp_path) for _ in range(3)) for count in (400, 1600))
    assert many - few < 20 * 1200  # bytes; a file takes a thousand in memory


def test_the_cache_holds_the_same_bytes_of_a_long_list_as_of_a_list(tmp_path: Path) -> None:
    lines = ["1 2 3 4 abc", 'quote "', "back\\", "żółw", ""] * 20
    assert cache_file(str(tmp_path), "contents", LongList(lines)) == cache_file(
        str(tmp_path), "contents", lines
    )
    file = cache_file(str(tmp_path), "contents", lines)
    keep(file, {"files": lines, "others": True})
    expected = file.read_bytes()
    keep(file, {"files": LongList(lines), "others": True})
    assert file.read_bytes() == expected
    found = recall_list(file, "files")
    assert found is not None and list(found[0]) == lines and found[1] == {"others": True}
    assert recall(file) == {"files": lines, "others": True}
    damaged = (
        expected[:-1],
        expected[:20],
        b"",
        expected.replace(b"abc", b"abd", 1),
        b'[{"other": []}, 1]',
    )
    for content in damaged:
        file.write_bytes(content)
        assert recall_list(file, "files") is None
    file.unlink()
    assert recall_list(file, "files") is None


def test_a_file_is_hashed_again_only_if_it_changed(tmp_path: Path) -> None:
    folder, cache = tmp_path / "data", str(tmp_path / "cache")
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}").write_text("text" * number)

    def listed() -> LongList[SourceFile]:
        return files_below(folder, bool, bool)

    assert known_contents(listed(), cache) is None
    hashes = [
        hashlib.sha256(hashlib.sha256(text).digest()[:16] if text else b"").hexdigest()[:32]
        for text in (b"text" * number for number in range(40))
    ]
    assert list(contents_of(listed(), cache)) == hashes
    known = known_contents(listed(), cache)
    assert known is not None and list(known) == hashes
    (folder / "07").write_text("TEXT" * 7)
    assert known_contents(listed(), cache) is None
    contents = contents_of(listed(), cache)
    assert [number for number, found in enumerate(contents) if found != hashes[number]] == [7]
