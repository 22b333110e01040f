from __future__ import annotations

import csv
import gzip
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from maxbatch import ConfigError, load_config
from maxbatch.around.formats import json_array, jsonl, parquet, tfrecord
from maxbatch.data.store import formats
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.stream.stream import open_stream
from maxbatch.system.errors import StoreFailed
from maxbatch.system.storage import object_stores
from maxbatch.system.storage.patience import Patience
from maxbatch.system.storage.storage import as_path
from tests.helpers.stores import Store

TEXTS = ["one", "tw\u00f6\n", "", "four and more", "\U0001f422"]


def source(kind: str, path: Path | str, *overrides: str) -> DocumentSource:
    return DocumentSource.from_config(
        load_config(overrides=[f"dataset_type={kind}", f"dataset_path={path}", *overrides]).store
    )


def texts(documents: DocumentSource) -> list[str]:
    return [document.utf8.decode() for document in documents.documents()]


def write_jsonl(path: Path, values: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: value}) + "\n" for value in values))
    return path


def write_gzip(path: Path, values: list[str], field: str = "text") -> Path:
    path.write_bytes(gzip.compress(write_jsonl(path, values, field).read_bytes()))
    return path


def write_table(path: Path, values: list[str], field: str = "text") -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        rows.writerows([("id", field), *enumerate(values)])
    return path


def write_array(path: Path, values: list[str], field: str = "text") -> Path:
    path.write_text(json.dumps([{field: value} for value in values], indent=1))
    return path


def write_object(path: Path, values: list[str], field: str = "text") -> Path:
    about = {"version": 1.5, "tags": ["a", [1]], "more": {"rows": [{"text": "no"}]}}
    path.write_text(
        json.dumps({**about, "rows": [{field: value} for value in values], "end": None})
    )
    return path


def packed(path: Path) -> Path:
    path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def write_packed_table(path: Path, values: list[str]) -> Path:
    return packed(write_table(path, values))


def write_packed_array(path: Path, values: list[str]) -> Path:
    return packed(write_array(path, values))


def write_parquet(path: Path, values: list[str], field: str = "text", **options: object) -> Path:
    pq.write_table(pa.table({"id": list(range(len(values))), field: values}), path, **options)
    return path


def write_records(path: Path, records: list[bytes]) -> Path:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def write_arrayrecord(path: Path, values: list[str]) -> Path:
    return write_records(path, [value.encode() for value in values])


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number % 128 + 128]) + varint(number // 128)


def length_delimited(field: int, payload: bytes) -> bytes:
    """One field of a protobuf message."""
    return bytes([field << 3 | 2]) + varint(len(payload)) + payload


def example(features: dict[str, bytes]) -> bytes:
    """A tf.train.Example, byte by byte; values are serialised Features."""
    entries = b"".join(
        length_delimited(1, length_delimited(1, name.encode()) + length_delimited(2, feature))
        for name, feature in features.items()
    )
    return length_delimited(1, entries)


def byte_strings(*values: bytes) -> bytes:
    return length_delimited(1, b"".join(length_delimited(1, value) for value in values))


def integers(*values: int) -> bytes:
    return length_delimited(
        3, length_delimited(1, b"".join(varint(value % 2**64) for value in values))
    )


def masked_crc(data: bytes) -> bytes:
    """The masked CRC-32C of TFRecord files."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(record: bytes) -> bytes:
    """A record as TFRecord files hold it."""
    head = struct.pack("<Q", len(record))
    return head + masked_crc(head) + record + masked_crc(record)


def write_tfrecord(path: Path, values: list[str]) -> Path:
    path.write_bytes(
        b"".join(framed(example({"text": byte_strings(value.encode())})) for value in values)
    )
    return path


def write_packed_tfrecord(path: Path, values: list[str]) -> Path:
    path.write_bytes(gzip.compress(write_tfrecord(path, values).read_bytes()))
    return path


FLOATS = length_delimited(2, length_delimited(1, struct.pack("<f", 1.5)))
INTEGERS = length_delimited(3, length_delimited(1, b"\x07"))

WRITERS: dict[str, tuple[str, str, Callable[[Path, list[str]], Path]]] = {
    "jsonl": ("jsonl", "a.jsonl", write_jsonl),
    "gzip": ("jsonl", "a.jsonl.gz", write_gzip),
    "parquet": ("parquet", "a.parquet", write_parquet),
    "arrayrecord": ("arrayrecord", "a.array_record", write_arrayrecord),
    "tfrecord": ("tfrecord", "a.tfrecord", write_tfrecord),
    "csv": ("csv", "a.csv", write_table),
    "tsv": ("tsv", "a.tsv", write_table),
    "packed csv": ("csv", "a.csv.gz", write_packed_table),
    "json": ("json", "a.json", write_array),
    "json object": ("json", "a.json", write_object),
    "packed json": ("json", "a.json.gz", write_packed_array),
    "packed tfrecord": ("tfrecord", "a.tfrecord.gz", write_packed_tfrecord),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_texts_in_order(tmp_path: Path, name: str) -> None:
    kind, file_name, write = WRITERS[name]
    assert texts(source(kind, write(tmp_path / file_name, TEXTS))) == TEXTS


@pytest.mark.parametrize("name", WRITERS)
def test_pieces_give_what_the_whole_file_gives(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, file_name, write = WRITERS[name]
    values = [f"{number} " + "x" * (number * 7 % 50) for number in range(300)]
    path = write(tmp_path / file_name, values)
    for module in (jsonl, parquet, tfrecord, formats):
        monkeypatch.setattr(module, "PIECE_BYTES", 100)
    pieces = [piece for job in source(kind, path).jobs() for piece in job]
    assert name not in ("jsonl", "tfrecord") or len(pieces) > 50
    assert sum(piece.size for piece in pieces) <= path.stat().st_size
    assert texts(source(kind, path)) == values


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_line_belongs_to_the_piece_that_it_begins_in(
    tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "PIECE_BYTES", cut)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "bb"}\r\n{"text": "ccc"}')
    assert texts(source("jsonl", path)) == ["a", "bb", "ccc"]


def test_a_bad_line_has_its_number_in_the_file_whatever_piece_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 30)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n' * 20 + "oops\n")
    with pytest.raises(ConfigError, match="line 41: not JSON"):
        texts(source("jsonl", path))


@pytest.mark.parametrize("write", [write_jsonl, write_gzip])
@pytest.mark.parametrize("piece", [30, 10_000])
def test_a_line_of_any_length_is_one_bad_record_and_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path], piece: int
) -> None:
    monkeypatch.setattr(jsonl, "PIECE_BYTES", piece)
    monkeypatch.setattr(jsonl, "LONGEST_RECORD", 100)
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 7)
    path = write(tmp_path / "a.jsonl", ["one", "x" * 1000, "two", "y" * 90, "three"])
    with pytest.raises(ConfigError, match=r"line 2: longer than 100 bytes, the most that is read"):
        texts(source("jsonl", path))
    assert [text for text in texts(source("jsonl", path, "skip_bad_records=true")) if text] == [
        "one",
        "two",
        "three",
    ]


def test_gzip_is_known_by_its_bytes(tmp_path: Path) -> None:
    assert texts(source("jsonl", write_gzip(tmp_path / "plain-name.jsonl", TEXTS))) == TEXTS


def test_row_groups_are_read_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_BATCH_ROWS", 2)
    monkeypatch.setattr(parquet, "PIECE_BYTES", 1)
    path = write_parquet(tmp_path / "a.parquet", TEXTS * 10, row_group_size=7)
    documents = source("parquet", path)
    assert len([piece for job in documents.jobs() for piece in job]) == 8
    assert texts(documents) == TEXTS * 10


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_a_column_of_text_of_any_type_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    column = (
        pa.array(TEXTS).dictionary_encode()
        if pa.types.is_dictionary(kind)
        else pa.array(TEXTS).cast(kind)
    )
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert texts(source("parquet", tmp_path / "a.parquet")) == TEXTS


def test_a_missing_column_names_one_that_works(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "body": ["it"]}), tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"text_field='text'.*columns: 'id', 'body'; works: text_field='body'"
    ):
        texts(source("parquet", tmp_path / "a.parquet"))
    assert texts(source("parquet", tmp_path / "a.parquet", "text_field=body")) == ["it"]
    with pytest.raises(ConfigError, match="text_field='id': the column is of type int64"):
        texts(source("parquet", tmp_path / "a.parquet", "text_field=id"))


def test_a_null_is_a_bad_record(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "c"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet row 2: text is null"):
        texts(source("parquet", tmp_path / "a.parquet"))
    assert texts(source("parquet", tmp_path / "a.parquet", "skip_bad_records=true")) == [
        "a",
        "",
        "c",
    ]


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"dataset_type=parquet: .*pip install 'maxbatch\[parquet\]'"
    ):
        texts(source("parquet", path))


def test_examples_are_read_without_tensorflow(tmp_path: Path) -> None:
    records = [
        example({"label": INTEGERS, "text": byte_strings(value.encode()), "score": FLOATS})
        for value in TEXTS
    ]
    path = write_records(tmp_path / "a.array_record", records)
    assert texts(source("arrayrecord", path, "record_format=example")) == TEXTS
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize("kind", ["tfrecord", "arrayrecord"])
def test_a_list_of_token_ids_is_a_document(tmp_path: Path, kind: str) -> None:
    ids = [[7, 255, 0], [1] * 200, [3]]
    records = [example({"text": integers(*one)}) for one in ids]
    path = tmp_path / f"a.{kind}"
    if kind == "arrayrecord":
        write_records(path, records)
    else:
        path.write_bytes(b"".join(map(framed, records)))
    stated = [
        f"dataset_type={kind}",
        f"dataset_path={path}",
        "record_format=example",
        "enable_data_shuffling=false",
    ]
    for add, special in ((False, []), (True, [257])):
        end = f"add_eos={add}".lower()
        stream = open_stream(
            load_config(overrides=[*stated, "add_bos=false", end, "max_target_length=32"])
        )
        rows = stream.read(0, len(stream))
        assert rows["tokens"][rows["segments"] > 0].tolist() == [
            token for one in ids for token in (*one, *special)
        ]


@pytest.mark.parametrize("token", [256, -1])
def test_an_id_that_the_tokenizer_lacks_is_a_bad_record(tmp_path: Path, token: int) -> None:
    records = [example({"text": integers(*ids)}) for ids in ([1], [2, token], [3])]
    (tmp_path / "a.tfrecord").write_bytes(b"".join(map(framed, records)))
    stated = ["dataset_type=tfrecord", f"dataset_path={tmp_path}/a.tfrecord"]
    with pytest.raises(
        ConfigError,
        match=rf"record 2: the token id {token} is not one of the tokenizer's, 0 to 255",
    ):
        open_stream(load_config(overrides=stated))
    stats = open_stream(load_config(overrides=[*stated, "skip_bad_records=true"])).stats()
    assert (stats["documents"], stats["skipped_records"]) == (2, 1)


def test_a_length_that_differs_from_its_checksum_ends_the_file(tmp_path: Path) -> None:
    path = write_tfrecord(tmp_path / "a.tfrecord", ["one", "two", "three"])
    data = bytearray(path.read_bytes())
    place = len(framed(example({"text": byte_strings(b"one")})))
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        ConfigError, match=rf"record 2: damaged .* length of the record differs .*at byte {place}"
    ):
        texts(source("tfrecord", path))
    assert texts(source("tfrecord", path, "skip_bad_records=true")) == ["one", ""]


def test_tfrecord_without_its_checksums_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tfrecord(tmp_path / "a.tfrecord", TEXTS)
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(
        ConfigError, match=r"dataset_type=tfrecord: .*pip install 'maxbatch\[tfrecord\]'"
    ):
        texts(source("tfrecord", path))


BAD_EXAMPLES = {
    "not a tf.train.Example": b"\xff\xff\xff",
    "no feature text_field='text'; its features: 'body'": example({"body": byte_strings(b"x")}),
    "holds 2 byte strings, not one": example({"text": byte_strings(b"x", b"y")}),
    "holds 0 byte strings, not one": example({"text": FLOATS}),
    "not UTF-8 at byte 0": example({"text": byte_strings(b"\xff")}),
}


@pytest.mark.parametrize("problem", BAD_EXAMPLES)
def test_a_bad_example_is_named_by_record_or_left_out(tmp_path: Path, problem: str) -> None:
    good = example({"text": byte_strings(b"good")})
    path = write_records(tmp_path / "a.array_record", [good, BAD_EXAMPLES[problem], good])
    with pytest.raises(ConfigError) as raised:
        texts(source("arrayrecord", path, "record_format=example"))
    assert f"{path} record 2: " in str(raised.value) and problem in str(raised.value)
    left = source("arrayrecord", path, "record_format=example", "skip_bad_records=true")
    assert texts(left) == ["good", "", "good"]


def test_truncated_files_are_named_and_what_is_whole_is_kept(tmp_path: Path) -> None:
    values = [os.urandom(200).hex() for _ in range(2000)]
    for name in ("gzip", "parquet", "arrayrecord", "tfrecord", "packed tfrecord"):
        kind, file_name, write = WRITERS[name]
        path = write(tmp_path / file_name, values)
        os.truncate(path, path.stat().st_size // 2 + 100)
        with pytest.raises(ConfigError, match=f"{path}") as raised:
            texts(source(kind, path))
        assert "skip_bad_records=true" in str(raised.value) and "\n" not in str(raised.value)
        kept = texts(source(kind, path, "skip_bad_records=true"))
        assert kept[-1] == "" and kept[:-1] == values[: len(kept) - 1], name
        has_index = name in ("parquet", "arrayrecord")
        assert (len(kept) > 100) != has_index, "an index is at the end"


@pytest.mark.parametrize("name", ["parquet", "arrayrecord", "tfrecord"])
def test_damage_inside_a_file_costs_the_records_that_it_hits(tmp_path: Path, name: str) -> None:
    kind, file_name, write = WRITERS[name]
    values = [os.urandom(1000).hex() for _ in range(500)]
    path = write(tmp_path / file_name, values)
    if name == "parquet":
        pq.write_table(
            pa.table({"text": values}), path, row_group_size=50, write_page_checksum=True
        )
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 100] ^= 255
    path.write_bytes(data)
    documents = source(kind, path, "skip_bad_records=true")
    kept = texts(documents)
    assert len(kept) == len(values)
    assert all(text in ("", value) for text, value in zip(kept, values, strict=True))
    assert 1 <= kept.count("") <= 50
    with pytest.raises(ConfigError, match=f"{path}.*(damaged|differs from its checksum)"):
        texts(source(kind, path))


SHARDS = {
    "parquet": ["train-{:05}-of-00003.parquet", "train.parquet-{:05}-of-00003"],
    "arrayrecord": ["c4-train.array_record-{:05}-of-00003", "c4-train-{:05}-of-00003.arrayrecord"],
    "tfrecord": ["c4-train.tfrecord-{:05}-of-00003", "c4-train-{:05}-of-00003.tfrecord"],
    "jsonl": [
        "part-{:05}-of-00003.jsonl",
        "c4-train.{:05}-of-00003.json.gz",
        "x-{:05}-of-00003.jsonl.gz",
    ],
}


@pytest.mark.parametrize(
    ("kind", "pattern"), [(k, p) for k, patterns in SHARDS.items() for p in patterns]
)
def test_a_missing_shard_is_refused_by_name(tmp_path: Path, kind: str, pattern: str) -> None:
    write = {
        "parquet": write_parquet,
        "arrayrecord": write_arrayrecord,
        "jsonl": write_jsonl,
        "tfrecord": write_tfrecord,
    }[kind]
    folder = tmp_path / "d"
    folder.mkdir()
    for shard in range(3):
        write(folder / pattern.format(shard), [f"text {shard}"])
    (folder / "dataset_info.json").write_text("{}")
    assert texts(source(kind, folder)) == ["text 0", "text 1", "text 2"]
    (folder / pattern.format(1)).unlink()
    for path in (folder, f"{folder}/*-of-*"):
        with pytest.raises(ConfigError, match=rf"shard .*{pattern.format(1)} is missing"):
            source(kind, path)
    left = source(kind, folder, "skip_bad_records=true")
    assert texts(left) == ["text 0", "text 2"] and len(left.missing_shards) == 1
    one_by_one = ";".join(str(folder / pattern.format(shard)) for shard in (2, 0))
    assert texts(source(kind, one_by_one)) == ["text 2", "text 0"]


def test_several_paths_follow_one_another_as_written(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ["b"])
    (tmp_path / "d").mkdir()
    write_jsonl(tmp_path / "d/2.jsonl", ["d2"])
    write_gzip(tmp_path / "d/1.jsonl.gz", ["d1"])
    several = f"{tmp_path}/b.jsonl; {tmp_path}/d ;{tmp_path}/[b]*.jsonl"
    assert texts(source("jsonl", several)) == ["b", "d1", "d2", "b"]
    with pytest.raises(
        ConfigError, match=r"an empty path between two ';'; works: dataset_path='a;b'"
    ):
        source("jsonl", "a;;b")


@pytest.mark.parametrize("name", WRITERS)
def test_names_need_not_be_utf8(tmp_path: Path, name: str) -> None:
    kind, file_name, write = WRITERS[name]
    (tmp_path / "d").mkdir()
    os.rename(write(tmp_path / file_name, TEXTS), tmp_path / f"d/\udcff{file_name}")
    assert texts(source(kind, tmp_path / "d")) == TEXTS


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_an_object_store_are_read_like_those_of_a_disk(
    tmp_path: Path, store: Store, name: str
) -> None:
    kind, file_name, write = WRITERS[name]
    folder = as_path(store.bucket() + "/d")
    (folder / file_name).write_bytes(write(tmp_path / file_name, TEXTS).read_bytes())
    (folder / ".hidden" / file_name).write_bytes(b"no data")
    (folder / "README.md").write_bytes(b"no data")
    for path in (f"{folder}/{file_name}", str(folder), f"{folder}/a.*"):
        assert texts(source(kind, path)) == TEXTS
    documents = source(kind, str(folder))
    documents.refuse_changed()
    content = (folder / file_name).read_bytes()
    (folder / file_name).write_bytes(content[::-1])  # of the same size
    with pytest.raises(
        ConfigError, match=f"{store.scheme}:.*{file_name} changed while it was read"
    ):
        documents.refuse_changed()
    (folder / file_name).unlink()
    with pytest.raises(ConfigError, match=f"{file_name} vanished"):
        documents.refuse_changed()
    for path, problem in (
        (f"{folder}/none", "no such file or folder"),
        (f"{folder}/*.none", "matches no file"),
    ):
        with pytest.raises(ConfigError, match=problem):
            source(kind, path)


@pytest.mark.parametrize("name", WRITERS)
def test_a_store_that_does_not_answer_is_waited_for_and_its_records_are_not_damaged(
    tmp_path: Path, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, file_name, write = WRITERS[name]
    folder = as_path(store.bucket() + "/d")
    (folder / file_name).write_bytes(write(tmp_path / file_name, TEXTS).read_bytes())
    documents = source(kind, str(folder), "skip_bad_records=true")
    store.forget()
    # No client tries again what is answered so.
    with store.failing(share=1.0, at_most=2, kinds=("425",)):
        assert texts(documents) == TEXTS
        documents.refuse_changed()
    assert [status for *_, status in store.requests()].count(425) == 2
    monkeypatch.setattr(Patience, "seconds", 0.2)
    with store.failing(share=1.0, kinds=("425",)):
        for ask in (
            lambda: texts(documents),
            documents.refuse_changed,
            lambda: source(kind, str(folder)),
        ):
            with pytest.raises(StoreFailed, match="does not answer"):
                ask()


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("gs://bucket/a.jsonl", r"pip install 'maxbatch\[gcs\]'"),
        ("s3://bucket/a.jsonl", r"pip install 'maxbatch\[s3\]'"),
        ("nowhere://bucket/a.jsonl", "nowhere:// is not supported"),
    ],
)
def test_a_scheme_that_cannot_be_read_says_what_it_needs(
    path: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_stores.file_system.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=problem) as raised:
        source("jsonl", path)
    assert str(raised.value).replace("'", "").startswith(
        f"dataset_path={path}"
    ) and "\n" not in str(raised.value)


@pytest.mark.parametrize("block", [1, 2, 7])
@pytest.mark.parametrize("write", [write_array, write_object])
def test_an_array_of_json_is_read_object_by_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path], block: int
) -> None:
    monkeypatch.setattr(json_array, "_BLOCK_CHARACTERS", block)
    values = [f'{number}, \\ " ] }}' * (number % 3) for number in range(30)]
    assert texts(source("json", write(tmp_path / "a.json", values))) == values


@pytest.mark.parametrize(
    ("content", "kept", "problem"),
    [
        ('[{"text": "a"}, {"text": "b"', ["a", ""], "record 2: not JSON"),
        (
            '[{"text": "a"}, 3, {"text": "b"}]',
            ["a", "", "b"],
            "record 2: a int, not an object with a field 'text'",
        ),
        (
            '[{"text": "a"}, {"text": null}]',
            ["a", ""],
            "record 2: field text_field='text' is null, not a string",
        ),
        (
            '[{"text": "a"}, {"text": ["x"]}]',
            ["a", ""],
            "record 2: field text_field='text' is a list, not a string",
        ),
        ('[{"text": "a"}] [', ["a", ""], "record 2: goes on after its first value"),
        (
            '{"text": "a"}\n{"text": "b"}',
            [""],
            "record 1: has no array of objects; .* dataset_type=jsonl",
        ),
        (
            '{"a": [{"text": "a"}], "b": [{"text": "b"}]}',
            ["a", ""],
            "record 2: has two arrays of objects, 'a' and 'b'",
        ),
        ("", [""], "record 1: has no array of objects"),
        ('"a"', [""], "record 1: has no array of objects"),
    ],
)
def test_json_that_is_no_array_of_objects_is_named_by_record(
    tmp_path: Path, content: str, kept: list[str], problem: str
) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        texts(source("json", tmp_path / "a.json"))
    assert texts(source("json", tmp_path / "a.json", "skip_bad_records=true")) == kept


@pytest.mark.parametrize(
    ("content", "kept", "problem"),
    [
        (b"id,text\n1,a\n2\n3,c\n", ["a", "", "c"], "record 2: has 1 cells, and the header has 2"),
        (b"id,text\n1,a\n\n2,\xff\n3,c\n", ["a", "", "c"], "record 2: not UTF-8"),
        (b'id,text\n1,a\n2,"b\n3,c\n', ["a", ""], "record 2: not a row of cells"),
        (
            b'\xef\xbb\xbfid,text\r\n1,"a"\r\n2,"b"x\r\n3,c\r\n',
            ["a", "", "c"],
            "record 2: not a row of cells",
        ),
    ],
)
def test_a_bad_row_of_a_table_is_named_or_left_out(
    tmp_path: Path, content: bytes, kept: list[str], problem: str
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        texts(source("csv", tmp_path / "a.csv"))
    assert texts(source("csv", tmp_path / "a.csv", "skip_bad_records=true")) == kept


@pytest.mark.parametrize("header", [b"text,text\nx,y\n", b"text,\nx,y\n"])
def test_columns_of_a_table_have_names_of_their_own(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(header)
    with pytest.raises(ConfigError, match=r"a\.csv: the header, its first line, "):
        texts(source("csv", tmp_path / "a.csv", "skip_bad_records=true"))


def test_an_array_read_as_lines_names_the_type_that_reads_it(tmp_path: Path) -> None:
    path = write_array(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(ConfigError, match=r"line 1: .*dataset_type=json"):
        texts(source("jsonl", path))


@pytest.mark.parametrize("name", ["jsonl", "json", "csv", "parquet"])
def test_fields_of_other_names_are_read_by_ours(tmp_path: Path, name: str) -> None:
    kind, file_name, write = WRITERS[name]
    path = write(tmp_path / file_name, TEXTS, "body")
    assert texts(source(kind, path, "record_fields={text: body}")) == TEXTS
    whole = source(kind, path, "use_sft=true", "record_fields={prompt: body, completion: body}")
    read = [json.loads(document.utf8) for document in whole.documents()]
    assert [(record["prompt"], record["completion"]) for record in read] == [
        (text, text) for text in TEXTS
    ]
    with pytest.raises(
        ConfigError, match=r"1: record_fields=.*: no field 'bod'; its fields: 'body'"
    ):
        texts(source(kind, path, "use_sft=true", "record_fields={prompt: bod}"))
