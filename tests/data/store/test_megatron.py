"""A store of Megatron-LM, read in place: tokens and documents follow its format."""

from __future__ import annotations

import itertools
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.cli import main
from maxbatch.data.store import megatron
from maxbatch.data.store.megatron import MegatronStore, open_megatron
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.system.storage.storage import as_path
from maxbatch.system.storage.watched_files import check_watched, watching
from tests.helpers.corpus import same
from tests.helpers.megatron_stores import CODES, Documents, joined, some_documents, write_megatron
from tests.helpers.stores import Store

LENGTH = 16
DOCUMENTS = some_documents(60)


def settings(path: object, *overrides: str) -> list[str]:
    stated = (f"max_target_length={LENGTH}", "vocab_size=300")
    return ["dataset_type=megatron", f"dataset_path={path}", *stated, *overrides]


def store_of(path: object, *overrides: str) -> MegatronStore:
    config = load_config(overrides=settings(path, *overrides)).stream
    return open_megatron(config, "dataset_path")


def stream_of(path: object, *overrides: str) -> Stream:
    return open_stream(load_config(overrides=settings(path, *overrides)))


def tokens_of(store: MegatronStore) -> list[list[int]]:
    tokens, offsets = store.tokens[0 : len(store.tokens)], store.offsets.tolist()
    return [tokens[begin:end].tolist() for begin, end in itertools.pairwise(offsets)]


@pytest.mark.parametrize("dtype", [name for name in CODES if not name.startswith("float")])
def test_tokens_of_every_integer_type_and_of_every_document_are_read(
    tmp_path: Path, dtype: str
) -> None:
    store = store_of(write_megatron(tmp_path / "web", DOCUMENTS, dtype))
    assert tokens_of(store) == joined(DOCUMENTS)
    assert store.manifest["documents"] == len(DOCUMENTS)


def test_a_document_is_found_by_each_of_its_tokens(tmp_path: Path) -> None:
    store = store_of(write_megatron(tmp_path / "web", DOCUMENTS))
    offsets, tokens = store.offsets, np.arange(len(store.tokens))
    np.testing.assert_array_equal(
        store.table.containing(tokens), np.searchsorted(offsets, tokens, side="right") - 1
    )


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_the_prefix_and_both_files_name_the_store(tmp_path: Path, suffix: str) -> None:
    prefix = write_megatron(tmp_path / "web.v1", DOCUMENTS)
    assert tokens_of(store_of(f"{prefix}{suffix}")) == joined(DOCUMENTS)


def test_rows_hold_the_tokens_in_order_and_need_no_tokenizer(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "web", DOCUMENTS)
    stream = stream_of(prefix, "enable_data_shuffling=false")
    rows = stream.read(0, len(stream))
    expected = [*itertools.chain(*joined(DOCUMENTS))]
    assert rows["tokens"][rows["segments"] > 0].tolist() == expected
    assert rows["weights"].sum() == sum(
        max(0, min(end, row + LENGTH) - max(begin, row) - 1)
        for begin, end in zip(
            store_of(prefix).offsets[:-1], store_of(prefix).offsets[1:], strict=True
        )
        for row in range(0, len(expected), LENGTH)
    )
    assert stream.tokenizer.decode(rows["tokens"][0][:3]) == " ".join(map(str, expected[:3]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["packing=false"],
        ["packing_strategy=best_fit"],
        ["eval_fraction=0.25"],
        ["grain_worker_count=0"],
    ],
)
def test_packing_and_held_out_documents_are_those_of_other_data(
    tmp_path: Path, overrides: list[str]
) -> None:
    """Bytes with the same documents as jsonl, prepared, give the same rows."""
    documents = [[document] for document in joined(DOCUMENTS) if document]
    write_megatron(tmp_path / "web", documents)
    lines = (json.dumps({"text": "".join(map(chr, document[0]))}) for document in documents)
    (tmp_path / "web.jsonl").write_text("\n".join(lines))
    shared = [*overrides, "add_bos=false", "add_eos=false", "enable_data_shuffling=false"]
    here = stream_of(tmp_path / "web", *shared)
    there = open_stream(
        load_config(
            overrides=[
                "dataset_type=jsonl",
                f"dataset_path={tmp_path}/web.jsonl",
                *settings("")[2:],
                *shared,
            ]
        )
    )
    left, right = here.read(0, len(here)), there.read(0, len(there))
    assert len(here) == len(there)
    for name in ("segments", "weights"):
        np.testing.assert_array_equal(left[name], right[name])
    filled = left["segments"] > 0
    np.testing.assert_array_equal(left["tokens"][filled], right["tokens"][filled])


def test_a_mixture_and_its_epochs_resume_anywhere(tmp_path: Path) -> None:
    paths = [
        write_megatron(tmp_path / name, some_documents(40, seed))
        for seed, name in enumerate(("web", "code"))
    ]
    stream = stream_of(f"{paths[0]},0.75;{paths[1]},0.25")
    whole, far = stream.read(0, 400), 10**15
    assert same({name: rows[250:] for name, rows in whole.items()}, stream.read(250, 400))
    assert stream.samples_by_source(400) == {str(paths[0]): 300, str(paths[1]): 100}
    assert stream[far]["tokens"].shape == (LENGTH,)
    assert same(stream[far], stream_of(f"{paths[0]},0.75;{paths[1]},0.25")[far])


def test_the_identity_is_that_of_the_content_wherever_it_is(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "web", DOCUMENTS)
    identity = stream_of(prefix).identity
    assert "add_eos" not in identity and identity["tokenizer"] == "ids"
    (tmp_path / "moved").mkdir()
    assert (
        stream_of(write_megatron(tmp_path / "moved/x", DOCUMENTS), "add_eos=false").identity
        == identity
    )
    changed = [*DOCUMENTS[:-1], [*DOCUMENTS[-1], [5]]]
    for documents in (changed, [[sequence] for document in DOCUMENTS for sequence in document]):
        other = stream_of(write_megatron(tmp_path / "other", documents)).identity
        assert {key for key in identity if other[key] != identity[key]} - {"all tokens"} == {
            "content"
        }


def test_every_token_of_a_large_store_is_in_its_identity_which_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample keys the shuffle, as it always has."""
    for name, value in (("_WHOLE_BYTES", 100), ("_PARTS", 4), ("_PART_BYTES", 20)):
        monkeypatch.setattr(megatron, name, value)
    hashed: list[str] = []
    md5_of = megatron.md5_of
    monkeypatch.setattr(
        megatron, "md5_of", lambda file, size: hashed.append(file.name) or md5_of(file, size)
    )
    prefix = write_megatron(tmp_path / "web", DOCUMENTS)
    identity, file = stream_of(prefix).identity, Path(f"{prefix}.bin")
    assert stream_of(prefix).identity == identity and hashed == ["web.bin", "web.idx"]
    size = file.stat().st_size
    for place, sampled in ((0, True), (-2, True), (size // 3 - 40, False)):
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        (tmp_path / "b.bin").write_bytes(data)
        (tmp_path / "b.idx").write_bytes(Path(f"{prefix}.idx").read_bytes())
        other = stream_of(tmp_path / "b").identity
        differing = {key for key in identity if other[key] != identity[key]}
        assert differing == ({"content", "all tokens"} if sampled else {"all tokens"})


def test_a_store_that_is_rewritten_while_a_run_reads_it_is_named(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "web", DOCUMENTS)
    file = Path(f"{prefix}.bin")
    with watching():
        stream_of(prefix)
        file.touch()
        check_watched()  # the same content
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        with file.open("r+b") as same_file:
            same_file.write(data)
        with pytest.raises(ConfigError, match=r"web\.bin: has changed since this start hashed it"):
            check_watched()
    check_watched()  # no run reads it any more


def test_a_store_crosses_to_worker_processes_without_its_tokens(tmp_path: Path) -> None:
    store = store_of(write_megatron(tmp_path / "web", some_documents(5000)))
    tokens_of(store)
    sent = pickle.dumps(store)
    assert len(sent) < 2000
    assert tokens_of(pickle.loads(sent)) == tokens_of(store)


def header(
    version: int = 1,
    code: int = 8,
    sequences: int = 2,
    marks: int = 3,
    magic: bytes = b"MMIDIDX\0\0",
) -> bytes:
    return magic + struct.pack("<QBQQ", version, code, sequences, marks)


DAMAGE = {
    "not an index": (header(magic=b"PK\3\4" + b"\0" * 5), "not an index of Megatron-LM's"),
    "cut in its header": (header()[:20], "not an index of Megatron-LM's"),
    "version": (header(version=2), "version 2, and 1 is read"),
    "floats": (header(code=7), "float32 numbers, not token ids"),
    "type": (header(code=99), r"unknown type \(99\)"),
    "too many": (header(sequences=1 << 60), "sequences"),
    "too few": (header(sequences=1), r"has \d+ bytes, and 1 sequences"),
    "no marks": (header(marks=0), "0 marks of documents"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_header_is_one_line(tmp_path: Path, name: str) -> None:
    replaced, problem = DAMAGE[name]
    prefix = write_megatron(tmp_path / "web", [[[1, 2]], [[3]]])
    file = Path(f"{prefix}.idx")
    file.write_bytes(replaced + file.read_bytes()[34:] if len(replaced) >= 34 else replaced)
    with pytest.raises(
        ConfigError, match=rf"dataset_path='{prefix}': {file} cannot be used: .*{problem}"
    ):
        store_of(prefix)


ARRAYS = {  # bytes of the index behind its header; two documents of one and two sequences
    "lengths": (34, "<i", -1, "sequence 0 does not follow"),
    "places": (34 + 12 + 8, "<q", 6, "sequence 1 does not follow"),
    "first mark": (34 + 36, "<q", 1, "first document begins at sequence 1, and must begin at 0"),
    "marks": (34 + 36 + 8, "<q", 9, "documents 0 to 2 are not in order"),
    "last mark": (34 + 36 + 16, "<q", 2, "documents end at sequence 2 of 3"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_damaged_index_is_one_line(tmp_path: Path, name: str) -> None:
    place, form, value, problem = ARRAYS[name]
    prefix = write_megatron(tmp_path / "web", [[[1, 2]], [[3], [4, 5]]])
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    struct.pack_into(form, data, place, value)
    Path(f"{prefix}.idx").write_bytes(data)
    with pytest.raises(ConfigError, match=problem):
        store_of(prefix)


def test_files_that_are_missing_or_of_another_store_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_megatron(tmp_path / "web", DOCUMENTS)
    for path, problem in (
        (tmp_path / "no", r"needs .*no.bin: No such file"),
        ("", "needs the prefix"),
        ("a;b", "mixture"),
    ):
        with pytest.raises(ConfigError, match=problem):
            store_of(path)
    with open(f"{prefix}.bin", "r+b") as file:
        file.truncate(file.seek(-1, 2))
    assert main(["data", *settings(prefix)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "its sequences have" in error and "Traceback" not in error
    write_megatron(prefix, [])
    with pytest.raises(ConfigError, match="holds no document"):
        store_of(prefix)


@pytest.mark.parametrize("rest", [1, 1000])
def test_bytes_after_the_sequences_are_not_read_and_one_line_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rest: int
) -> None:
    prefix = write_megatron(tmp_path / "web", DOCUMENTS)
    identity, size = stream_of(prefix).identity, Path(f"{prefix}.bin").stat().st_size
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"\1" * rest)
    assert (
        tokens_of(store_of(prefix)) == joined(DOCUMENTS) and stream_of(prefix).identity == identity
    )
    line = (
        f"{prefix}.bin has {size + rest} bytes, and the sequences of web.idx end after {size}; "
        "the rest is not read"
    )
    assert capsys.readouterr().err == f"maxbatch: warning: dataset_path='{prefix}': {line}\n"


def test_a_store_of_empty_documents_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"dataset_type=megatron: none of the 2 documents has a token$"
    ):
        stream_of(write_megatron(tmp_path / "web", [[[]], [[], []]]))


def test_a_mixture_with_another_kind_of_data_resumes_anywhere(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "web", DOCUMENTS)
    (tmp_path / "code.jsonl").write_text(
        "".join(json.dumps({"text": "x" * n}) + "\n" for n in range(1, 90))
    )
    mixture = tmp_path / "mix.yml"
    code = "code: {path: code.jsonl, weight: 0.25, dataset_type: jsonl}"
    mixture.write_text(f"web: {{path: {prefix}, weight: 0.75}}\n{code}\n")
    stream = stream_of(mixture)
    assert stream.samples_by_source(1000) == {"web": 750, "code": 250}
    assert same(
        {name: rows[300:] for name, rows in stream.read(0, 400).items()},
        stream_of(mixture).read(300, 400),
    )


def test_an_id_beyond_the_vocabulary_is_refused_where_it_is_read(tmp_path: Path) -> None:
    for dtype, token, problem in (
        ("uint16", 300, "vocab_size=301"),
        ("int16", -5, "-5, which is not a token id"),
        ("int64", 1 << 40, "which is not a token id"),
    ):
        stream = stream_of(write_megatron(tmp_path / dtype, [[[1] * LENGTH], [[2, token]]], dtype))
        assert (
            stream_of(tmp_path / dtype, "enable_data_shuffling=false")[0]["tokens"].tolist()
            == [1] * LENGTH
        )
        with pytest.raises(ConfigError, match=problem):
            stream.read(0, 2)


@pytest.mark.parametrize("modes", [[0, 0, 0], [0, 1, 0]])
def test_a_multimodal_store_is_read_if_all_of_it_is_text(tmp_path: Path, modes: list[int]) -> None:
    documents: Documents = [[[1, 2]], [[3], [4, 5]]]
    prefix = write_megatron(tmp_path / "web", documents, modes=modes)
    if any(modes):
        with pytest.raises(
            ConfigError, match=r"sequence 1 has mode 1: only text \(mode 0\) is read"
        ):
            store_of(prefix)
    else:
        assert tokens_of(store_of(prefix)) == joined(documents)


def test_a_store_in_a_bucket_is_that_of_a_disk_and_is_read_by_range(
    tmp_path: Path, store: Store
) -> None:
    prefix = write_megatron(tmp_path / "web", some_documents(3000))
    there = f"{store.bucket()}/data/web"
    for suffix in (".bin", ".idx"):
        as_path(f"{there}{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes())
    here, far = stream_of(prefix), stream_of(there)
    assert here.identity == far.identity
    store.forget()
    again = stream_of(there)
    assert not any(size > 1000 for _, method, _, size, _ in store.requests() if method == "GET"), (
        "index and content"
    )
    store.forget()
    assert same(again.batch([5, 900, 3]), here.batch([5, 900, 3]))
    read = [size for _, method, _, size, _ in store.requests() if method == "GET"]
    assert len(read) <= 3 and sum(read) < Path(f"{prefix}.bin").stat().st_size / 10
