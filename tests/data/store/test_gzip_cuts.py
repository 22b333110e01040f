"""Files of several gzip members are cut between members, at lines; what only looks like a member is
none.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from maxbatch import ConfigError
from maxbatch.around.formats import jsonl
from maxbatch.cli import main
from maxbatch.data.store import gzip_cuts
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.formats import Piece
from maxbatch.data.store.gzip_cuts import Cut, line_cuts
from maxbatch.system.storage.storage import as_path
from tests.data.store.test_formats import source, texts
from tests.helpers.stores import Store

RANDOM = random.Random(1)
TEXTS = [f"{number} " + "word" * RANDOM.randrange(60) for number in range(400)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def member(content: bytes, level: int = 6) -> bytes:
    return gzip.compress(content, level, mtime=0)


def bgzip(content: bytes, size: int) -> bytes:
    """Members of `size` bytes of content with the extra field BC, and an empty one at the end, as
    bgzip writes.
    """
    blocks = []
    for begin in range(0, len(content) + size, size):
        packer = zlib.compressobj(wbits=-15)
        block = content[begin : begin + size]
        packed = packer.compress(block) + packer.flush()
        head = struct.pack("<4BI2BH2BHH", 31, 139, 8, 4, 0, 0, 255, 6, 66, 67, 2, len(packed) + 25)
        blocks.append(head + packed + struct.pack("<II", zlib.crc32(block), len(block)))
    return b"".join(blocks)


def cut_anywhere(content: bytes, count: int) -> list[bytes]:
    ends = sorted(RANDOM.randrange(len(content)) for _ in range(count - 1))
    return [
        content[begin:end] for begin, end in zip([0, *ends], [*ends, len(content)], strict=True)
    ]


def pieces(path: Path, monkeypatch: pytest.MonkeyPatch, size: int = 100) -> list[Piece]:
    monkeypatch.setattr(jsonl, "PIECE_BYTES", size)
    return [piece for job in source("jsonl", path).jobs() for piece in job]


def by_piece(documents: DocumentSource, parts: Sequence[Piece]) -> list[str]:
    return [document.utf8.decode() for piece in parts for document in documents.documents([piece])]


FILES = {
    "lines": [member(line) for line in LINES.splitlines(keepends=True)],
    "anywhere": [member(part) for part in cut_anywhere(LINES, 60)],
    "empty members": [
        one for part in cut_anywhere(LINES, 30) for one in (member(part), member(b""))
    ],
    "zeros between": [
        member(part) + bytes(RANDOM.randrange(3000)) for part in cut_anywhere(LINES, 30)
    ],
    "bgzip": [bgzip(LINES, 100)],
    "stored": [member(part, 0) for part in cut_anywhere(LINES, 60)],
    "no last newline": [member(part) for part in cut_anywhere(LINES[:-1], 60)],
    "named": [
        b"\x1f\x8b\x08\x18" + bytes(6) + b"a.jsonl\0\x1f\x8b\x08\0" + member(part)[10:]
        for part in cut_anywhere(LINES, 60)
    ],
}


@pytest.mark.parametrize("name", FILES)
def test_pieces_of_members_give_the_lines_of_the_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"".join(FILES[name]))
    for size in (1, 50, 700):
        parts = pieces(path, monkeypatch, size)
        assert len(parts) > 5, "the file is cut"
        assert sum(part.size for part in parts) == path.stat().st_size
        assert by_piece(source("jsonl", path), parts) == TEXTS
        assert (
            by_piece(source("jsonl", path), parts[3:4])
            == TEXTS[len(by_piece(source("jsonl", path), parts[:3])) :][
                : len(by_piece(source("jsonl", path), parts[3:4]))
            ]
        )


def test_a_line_of_many_members_is_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = json.dumps({"text": RANDOM.randbytes(20_000).hex()}).encode()
    content = b'{"text": "a"}\n' + long + b"\n" + LINES
    (tmp_path / "a.jsonl.gz").write_bytes(bgzip(content, 500))
    parts = pieces(tmp_path / "a.jsonl.gz", monkeypatch)
    assert len(parts) > 20
    assert by_piece(source("jsonl", tmp_path / "a.jsonl.gz"), parts)[2:] == TEXTS


@pytest.mark.parametrize("level", [0, 6])
def test_a_gzip_file_inside_of_a_member_is_none_of_the_members(level: int) -> None:
    """Stored, the inner file is in the bytes of the outer one, with a checksum that is right."""
    inner = member(LINES[:5000])
    packed = [member(b"one\n"), member(inner + b"\n" + inner + b"\n", level), member(b"two\n")]
    starts = [len(packed[0]), len(packed[0] + packed[1])]
    file = b"".join(packed)
    assert level or file.count(inner) == 2
    assert [cut.member for cut in line_cuts(io.BytesIO(file), 1)] == starts


def test_a_cut_is_at_the_first_line_of_the_last_member_that_reaches_it() -> None:
    packed = [member(b"one\ntw"), member(b"o and"), member(b" more\nthree\n"), member(b"four\n")]
    places = [sum(map(len, packed[:number])) for number in range(4)]
    assert [*line_cuts(io.BytesIO(b"".join(packed)), 1)] == [
        Cut(17, places[2], 11),
        Cut(23, places[3], 23),
    ]


def test_a_file_of_one_member_is_one_piece_and_is_not_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(member(LINES))
    monkeypatch.setattr(gzip_cuts, "_parts", None)
    assert len(pieces(tmp_path / "a.jsonl.gz", monkeypatch)) == 1


def damaged(packed: list[bytes], number: int, place: int) -> bytes:
    changed = bytearray(packed[number])
    changed[place] ^= 255
    return b"".join([*packed[:number], changed, *packed[number + 1 :]])


ANYWHERE = FILES["anywhere"]
DAMAGE = {
    "data of a member": damaged(ANYWHERE, 30, 40),
    "checksum of a member": damaged(ANYWHERE, 30, -8),
    "size of the last": damaged(ANYWHERE, -1, -1),
    "magic of a member": damaged(ANYWHERE, 30, 0),
    "cut short": b"".join(ANYWHERE)[:-30],
    "foreign tail": b"".join(ANYWHERE) + b"tail" * 50,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_ends_the_file_and_keeps_the_lines_before_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(DAMAGE[name])
    kept = by_piece(source("jsonl", path, "skip_bad_records=true"), pieces(path, monkeypatch))
    assert kept[-1] == "" and kept[:-1] == TEXTS[: len(kept) - 1] and len(kept) > 100
    assert len(kept) == len(texts(source("jsonl", path, "skip_bad_records=true")))
    with pytest.raises(ConfigError, match=rf"line {len(kept)}: (cut short or damaged|not JSON)"):
        by_piece(source("jsonl", path), pieces(path, monkeypatch))


def test_a_bad_line_has_its_number_in_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(bgzip(LINES + b"oops\n", 100))
    with pytest.raises(ConfigError, match="line 401: not JSON"):
        by_piece(source("jsonl", path), pieces(path, monkeypatch))


def test_workers_share_the_members_and_write_the_bytes_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(bgzip(LINES, 1000))
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 500)
    data = ["prepare", "dataset_type=jsonl", f"dataset_path={path}"]
    for workers in ("1", "2"):
        assert main([*data, "--workers", workers, "--output", str(tmp_path / workers)]) == 0
    names = sorted(file.name for file in (tmp_path / "1").iterdir())
    assert all(
        (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
        for name in names
    )


def test_a_file_in_a_bucket_is_one_piece(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_path(f"{store.bucket()}/a.jsonl.gz")
    path.write_bytes(bgzip(LINES, 1000))
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 500)
    documents = source("jsonl", str(path))
    assert len([piece for job in documents.jobs() for piece in job]) == 1
    assert texts(documents) == TEXTS
