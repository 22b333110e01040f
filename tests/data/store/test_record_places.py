"""Every document of a sample is named by its file and its record, however rows are made of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from maxbatch import load_config
from maxbatch.around.formats import jsonl
from maxbatch.cli import main
from maxbatch.data.store import documents, formats
from maxbatch.data.store.record_places import RECORDS, places_of
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.system.storage.storage import as_path
from tests.helpers.stores import Store

LENGTH = 16
PACKINGS = {
    "concatenate": "packing_strategy=concatenate",
    "best_fit": "packing_strategy=best_fit",
    "apart": "packing=false",
    "held out in part": "eval_fraction=0.3",
    "deduplicated": "deduplicate=true",
}


def write_lines(path: Path, seed: int, count: int = 120) -> Path:
    """Lines of different texts, among them blank, bad and equal ones."""
    rng, lines = random.Random(seed), list[str]()
    for number in range(count):
        text = f"{seed}.{number} " + "w" * rng.randint(0, 40)
        if number % 13 == 5:
            lines.append("not JSON")
        elif number % 11 == 3:
            lines += ["", lines[0]]
        else:
            lines.append(json.dumps({"text": text}))
        lines += [""] * (number % 7 == 6)
    path.write_text("\n".join(lines) + "\n\n\n")
    return path


def records(path: str) -> dict[int, str]:
    """The texts of a file by their lines, from 1."""
    lines = enumerate(Path(path).read_text().splitlines(), 1)
    return {number: json.loads(line)["text"] for number, line in lines if line.startswith("{")}


def check_named(stream: Stream, samples: range) -> set[str]:
    """Compares the text of every segment of some samples with the record that is named; returns
    the files.
    """
    files = set()
    for index in samples:
        sample, found = stream[index], stream.documents(index)
        assert len(found) == sample["segments"].max()
        for segment, document in enumerate(found, 1):
            place = places_of(document.store, [document.record])[document.record]
            files.add(Path(place.file).name)
            text = records(place.file)[place.record]
            whole = [stream.tokenizer.bos_id, *text.encode(), stream.tokenizer.eos_id]
            ids = sample["tokens"][sample["segments"] == segment].tolist()
            assert ids == whole[document.offset : document.offset + document.tokens]
    return files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of many pieces and jobs."""
    for module in (jsonl, formats, documents):
        monkeypatch.setattr(module, "PIECE_BYTES", 300)
    (tmp_path / "data").mkdir()
    for name, seed in (("a", 1), ("b", 2)):
        write_lines(tmp_path / "data" / f"{name}.jsonl", seed)
    return tmp_path / "data"


def keys_of(path: Path | str, *others: str) -> list[str]:
    stated = ["dataset_type=jsonl", f"dataset_path={path}", f"max_target_length={LENGTH}"]
    return [*stated, "skip_bad_records=true", *others]


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=list(PACKINGS))
def test_the_documents_of_a_sample_are_those_that_its_row_was_made_of(
    folder: Path, packing: str
) -> None:
    stream = open_stream(load_config(overrides=keys_of(folder, packing)))
    assert check_named(stream, range(len(stream))) == {"a.jsonl", "b.jsonl"}


def test_a_mixture_names_the_documents_of_its_sources(folder: Path) -> None:
    mixture = f"{folder}/a.jsonl,0.7;{folder}/b.jsonl,0.3"
    stream = open_stream(load_config(overrides=keys_of(mixture)))
    assert check_named(stream, range(300)) == {"a.jsonl", "b.jsonl"}


@pytest.mark.parametrize("shuffled", ["true", "false"])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_samples_ahead_that_have_the_rows_of_a_sample_are_all_found(
    folder: Path, mixed: bool, shuffled: str
) -> None:
    path = f"{folder}/a.jsonl,0.7;{folder}/b.jsonl,0.3" if mixed else str(folder)
    keys = keys_of(path, f"enable_data_shuffling={shuffled}")
    stream = open_stream(load_config(overrides=keys))
    end = 2000
    origins = [stream.row(index)._replace(epoch=0) for index in range(end)]
    for indices in ([3], [700, 11, 12]):
        wanted = {origins[index] for index in indices}
        expected = [index for index in range(500, end) if origins[index] in wanted]
        assert len(expected) >= 3 * len(indices)
        assert stream.again(indices, 500, end) == expected


def test_training_reads_a_store_without_the_file_as_one_with_it(folder: Path) -> None:
    config = load_config(overrides=keys_of(folder, f"data_cache_dir={folder}/cache"))
    stream = open_stream(config)
    (file,) = (folder / "cache").glob(f"tokens/*/{RECORDS}")
    identity, first = stream.identity, stream[0]
    file.unlink()
    again = open_stream(config)
    assert again.identity == identity
    np.testing.assert_array_equal(again[0]["tokens"], first["tokens"])
    (document, *_) = again.documents(0)
    assert places_of(document.store, [document.record]) == {} and not file.exists()


def test_prepare_writes_the_file_also_into_a_bucket_shard_by_shard(
    folder: Path, store: Store
) -> None:
    here, there = str(folder / "prepared"), store.bucket() + "/prepared"
    keys = keys_of(folder)
    assert main(["prepare", *keys, "--output", here]) == 0
    assert main(["prepare", *keys, "--output", there, "--shard-tokens", "900"]) == 0
    files = [(as_path(one) / RECORDS).read_bytes() for one in (here, there)]
    assert files[0] == files[1] and files[0].startswith(b'{"first": 0, "file": ')
    tokens = ["dataset_type=tokens", f"dataset_path={there}", f"max_target_length={LENGTH}"]
    check_named(open_stream(load_config(overrides=tokens)), range(20))
