from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.config.file_formats import file_format
from maxbatch.data.store.documents import STDLIB_HELD_OUT, DocumentSource
from maxbatch.data.store.files import list_files
from tests.data.store.test_formats import source, texts


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_text_folder_is_its_files_in_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", "a.txt", ".hidden", ".git/config"):
        write(tmp_path / "data" / name, name)
    assert texts(source("text", tmp_path / "data")) == sorted(
        ["b.txt", "a/z.txt", "a/b/c.txt", "a.txt"]
    )


def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "one.txt", "a\r\nb\n\n\tż")
    assert texts(source("text", path)) == ["a\r\nb\n\n\tż"]


def test_a_glob_finds_files_in_folders_below(tmp_path: Path) -> None:
    for name in ("x/1.md", "x/y/2.md", "x/3.txt"):
        write(tmp_path / name, name)
    assert texts(source("text", f"{tmp_path}/**/*.md")) == ["x/1.md", "x/y/2.md"]


@pytest.mark.parametrize("path", ["x/*.md", "./x/*.md", "x//*.md"])
def test_files_have_the_same_names_however_their_path_is_spelled(tmp_path: Path, path: str) -> None:
    write(tmp_path / "x/1.md", "one")
    assert [file[:3] for file in source("text", path).files] == [
        (f"{tmp_path}/x/1.md", "x/1.md", 3)
    ]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    write(tmp_path / "a[1].txt", "it")
    write(tmp_path / "a1.txt", "other")
    assert texts(source("text", tmp_path / "a[1].txt")) == ["it"]


def test_jsonl_lines_are_documents_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"id": 3, "text": "tw\\u00f6\\n"}',
    )
    assert texts(source("jsonl", path)) == ["one", "twö\n"]


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"content": "x", "text": 3}\n')
    assert texts(source("jsonl", path, "text_field=content")) == ["x"]


def test_a_jsonl_folder_is_its_jsonl_files(tmp_path: Path) -> None:
    write(tmp_path / "d/2.jsonl", '{"text": "b"}\n')
    write(tmp_path / "d/1.ndjson", '{"text": "a"}\n')
    write(tmp_path / "d/README.md", "# no record")
    assert texts(source("jsonl", tmp_path / "d")) == ["a", "b"]


BAD_LINES = {
    "not JSON": b"{oops}",
    "not UTF-8": b'{"text": "\xff"}',
    "a list, not an object": b"[1]",
    "no field text_field='text'": b'{"body": "x"}',
    "is a int, not a string": b'{"text": 3}',
    "half of a surrogate pair": b'{"text": "\\ud800"}',
    "not JSON (": b"[" * 100_000,
}


@pytest.mark.parametrize("problem", BAD_LINES)
def test_a_bad_record_is_named_by_file_and_line_or_left_out(tmp_path: Path, problem: str) -> None:
    path = write(
        tmp_path / "a.jsonl", b'{"text": "one"}\n' + BAD_LINES[problem] + b'\n{"text": "three"}\n'
    )
    with pytest.raises(ConfigError) as raised:
        texts(source("jsonl", path))
    message = str(raised.value)
    assert f"{path} line 2" in message and problem in message and "\n" not in message
    assert message.startswith("dataset_path=") and "skip_bad_records=true" in message
    assert texts(source("jsonl", path, "skip_bad_records=true")) == ["one", "", "three"]


def test_a_file_that_is_no_text_is_named_or_left_out(tmp_path: Path) -> None:
    write(tmp_path / "d/a.txt", "fine")
    bad = write(tmp_path / "d/b.bin", b"ab\xff")
    with pytest.raises(ConfigError, match=rf"dataset_path=.*{bad}: not UTF-8 at byte 2"):
        texts(source("text", tmp_path / "d"))
    assert texts(source("text", tmp_path / "d", "skip_bad_records=true")) == ["fine", ""]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "needs a file, a folder or a glob"),
        ("missing", "no such file or folder"),
        ("*.nothing", "the glob matches no file"),
        ("empty", "the folder holds no"),
        ("loop", "no such file or folder"),
        ("around", "Too many levels of symbolic links"),
        ("a\0b", "must be UTF-8 text without NUL characters"),
    ],
)
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_path_that_leads_nowhere_is_named(
    tmp_path: Path, kind: str, path: str, problem: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    write(tmp_path / "around/a.jsonl", "{}")
    (tmp_path / "around/loop").symlink_to(".")
    with pytest.raises(ConfigError, match=problem) as raised:
        source(kind, path)
    assert str(raised.value).startswith("dataset_path=") and "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "arrayrecord"])
@pytest.mark.parametrize("path", ["fifo", "/dev/zero", "/dev/null", "fif[o]"])
def test_what_is_no_regular_file_is_one_line(kind: str, path: str) -> None:
    os.mkfifo("fifo")
    with pytest.raises(
        ConfigError, match=r"dataset_path='.*': (not a regular file|the glob matches no file)"
    ):
        source(kind, path)


def test_a_long_path_is_not_repeated_in_full() -> None:
    for path in ("x" * 5000, "y" * 5000 + "*", "z" * 5000 + ";;"):
        with pytest.raises(ConfigError) as raised:
            source("text", path)
        assert len(str(raised.value).split("; works: ")[0]) < 250


def test_a_file_gone_since_it_was_listed_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x")
    listed = source("text", path)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"cannot read {path}: No such file"):
        texts(listed)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x")
    path.chmod(0)
    with pytest.raises(ConfigError, match=rf"cannot read {path}: Permission denied"):
        texts(source("text", path))


def test_the_standard_library_is_modules_without_tests_bundles_and_empty_files() -> None:
    files = DocumentSource.from_config(load_config().store).files
    names = [file.name for file in files]
    assert names == sorted(names) and len(names) > 300
    assert {"argparse.py", "json/encoder.py"} < set(names)
    assert all(name.endswith(".py") for name in names) and all(file.size for file in files)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {
        "test",
        "tests",
        "site-packages",
        "__pycache__",
        "idlelib",
        "lib2to3",
        "ensurepip",
    }


def test_the_standard_librarys_held_out_files_are_all_there() -> None:
    documents = DocumentSource.from_config(load_config().store)
    held_out = [document.utf8 for document in documents.documents() if document.held_out]
    root = Path(sysconfig.get_paths()["stdlib"])
    assert sorted(held_out) == sorted((root / name).read_bytes() for name in STDLIB_HELD_OUT)


def test_a_number_of_shards_that_only_a_name_states_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "a-00000000001-of-99999999999.jsonl").write_text('{"text": "x"}\n')
    jsonl = file_format("jsonl")
    found = list_files("dataset_path", str(tmp_path), jsonl.names, jsonl.suffixes)
    assert len(found.files) == 1 and found.missing == ()


def test_a_line_of_too_many_values_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x", "more": [' + b"[]," * 6_000_000 + b"0]}\n")
    config = load_config(overrides=["dataset_type=jsonl", f"dataset_path={tmp_path}/a.jsonl"])
    with pytest.raises(ConfigError, match="line 1: holds more than 5,000,000 values"):
        list(DocumentSource.from_config(config.store).documents())
