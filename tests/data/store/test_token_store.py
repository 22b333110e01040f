from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.config.config import Config
from maxbatch.config.values import Value
from maxbatch.data.store import builder
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.lookup import find_store, open_store
from maxbatch.data.store.token_store import TokenStore
from maxbatch.data.stream.fingerprint import fingerprint
from maxbatch.data.stream.stream import open_stream
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer, make_tokenizer
from maxbatch.system.errors import TrainingError
from tests.data.store.test_formats import write_parquet
from tests.data.tokenizers.test_tokenizers import write_bpe
from tests.helpers.corpus import jsonl_config, write_jsonl

TOKENIZER = ByteTokenizer()
TEXTS = ["alpha", "", "be", "żółw"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return jsonl_config(tmp_path / "a.jsonl", TEXTS, f"data_cache_dir={tmp_path}/cache")


def opened(config: Config) -> TokenStore:
    return open_store(config.store, TOKENIZER)


def found(config: Config) -> TokenStore | None:
    return find_store(config.store, TOKENIZER)


def changed(config: Config, **values: Value) -> Config:
    return config.replaced(values)


def document(store: TokenStore, number: int) -> list[int]:
    return store.tokens[store.offsets[number] : store.offsets[number + 1]].tolist()


def test_every_document_is_stored_between_its_special_tokens(config: Config) -> None:
    store = opened(config)
    assert [document(store, number) for number in range(3)] == [
        [256, *text.encode(), 257] for text in ("alpha", "be", "żółw")
    ]
    assert store.tokens.dtype == np.uint16
    assert store.manifest["documents"] == 3 and store.manifest["tokens"] == len(store.tokens)


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (False, False)])
def test_special_tokens_are_settings(config: Config, bos: bool, eos: bool) -> None:
    store = opened(changed(config, add_bos=bos, add_eos=eos))
    assert document(store, 1) == [256] * bos + list(b"be") + [257] * eos


def test_empty_documents_are_left_out_and_counted(config: Config) -> None:
    assert opened(config).manifest["skipped_records"] == 1


def test_nothing_is_found_before_it_is_built_and_then_nothing_is_read_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(config) is None
    first = opened(config)
    monkeypatch.setattr(DocumentSource, "documents", lambda self: pytest.fail("read again"))
    assert found(config) == first
    assert opened(config) == first


def test_a_changed_file_is_a_new_entry_also_where_its_size_stays(config: Config) -> None:
    first = opened(config)
    write_jsonl(Path(config.dataset_path), [{"text": text} for text in ["alphA", *TEXTS[1:]]])
    os.utime(config.dataset_path, ns=(1, 1))
    second = opened(config)
    assert second.folder != first.folder and second.manifest["content"] != first.manifest["content"]
    assert document(first, 0) == [256, *b"alpha", 257], "a run keeps what it opened"


def hidden(path: Path, content: bytes, how: str) -> None:
    """Replaces a file by other content of its size, and sets the time of writing back."""
    before = path.stat()
    if how == "rewritten":
        path.write_bytes(content)
    elif how == "renamed over":
        path.with_suffix(".new").write_bytes(content)
        path.with_suffix(".new").rename(path)
    else:  # a link that points elsewhere now
        (path.parent / "elsewhere").mkdir()
        other = path.parent / "elsewhere" / path.name
        other.write_bytes(content)
        path.unlink()
        path.symlink_to(other)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("how", ["rewritten", "renamed over", "linked"])
def test_content_that_hides_behind_size_and_time_is_not_taken_for_the_old(
    config: Config, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, path = opened(config), Path(config.dataset_path)
    content = path.read_bytes()
    hidden(path, content.replace(b"alpha", b"ALPHA"), how)
    assert found(config) is None, "a plan reads no files"
    assert document(opened(config), 0) == [256, *b"ALPHA", 257]
    monkeypatch.setattr(DocumentSource, "documents", lambda self: pytest.fail("read again"))
    path.unlink()
    path.write_bytes(content)
    assert opened(config) == first


def test_files_that_were_touched_or_copied_are_not_tokenised_again(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, path = opened(config), Path(config.dataset_path)
    monkeypatch.setattr(DocumentSource, "documents", lambda self: pytest.fail("read again"))
    os.utime(path)
    assert opened(config) == first
    (tmp_path / "copies").mkdir()
    copy = shutil.copy(path, tmp_path / "copies" / "another-name.jsonl")
    assert opened(changed(config, dataset_path=str(copy))) == first


@pytest.mark.parametrize(
    "setting",
    [{"add_bos": False}, {"add_eos": False}, {"text_field": "b"}, {"skip_bad_records": True}],
)
def test_settings_that_shape_the_tokens_are_another_entry(
    config: Config, setting: dict[str, object]
) -> None:
    opened(config)
    assert found(changed(config, **setting)) is None


def test_settings_that_shape_rows_only_share_the_entry(config: Config) -> None:
    opened(config)
    others = changed(
        config, max_target_length=99, packing=False, data_shuffle_seed=5, eval_fraction=0.5
    )
    assert found(others) is not None


def test_the_content_hash_knows_texts_and_order_but_not_places(
    config: Config, tmp_path: Path
) -> None:
    def content(texts: list[str]) -> str:
        return opened(
            jsonl_config(tmp_path / "other.jsonl", texts, f"data_cache_dir={tmp_path}/c")
        ).manifest["content"]

    original = opened(config).manifest["content"]
    assert content(TEXTS) == original
    os.utime(tmp_path / "other.jsonl", ns=(5, 5))
    assert content(["be", "alpha", "żółw"]) != original
    assert content(["alphab", "e", "żółw"]) != original


DAMAGE = {
    "tokens cut short": lambda folder: os.truncate(folder / "tokens.bin", 3),
    "offsets cut short": lambda folder: os.truncate(folder / "offsets.npy", 100),
    "tokens missing": lambda folder: (folder / "tokens.bin").unlink(),
    "manifest cut short": lambda folder: os.truncate(folder / "manifest.json", 20),
    "manifest missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest that is a fifo": lambda folder: (
        (folder / "manifest.json").unlink(),
        os.mkfifo(folder / "manifest.json"),
    ),
    "offsets overwritten": lambda folder: (folder / "offsets.npy").write_bytes(
        b"\0" * (folder / "offsets.npy").stat().st_size
    ),
    "everything missing": lambda folder: [file.unlink() for file in folder.iterdir()],
}
DAMAGE |= {
    f"manifest {text[:15]!r}": partial(
        lambda text, folder: (folder / "manifest.json").write_bytes(text), text
    )
    for text in (
        b"[]",
        b'"version"',
        b"3",
        b"null",
        b"{",
        b'{"version": 2}',
        b"[" * 100_000,
        b"1" * 5000,
        b"\xff",
    )
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_noticed_and_built_again(config: Config, damage: str) -> None:
    first = opened(config)
    before = document(first, 2)
    DAMAGE[damage](first.folder)
    assert found(config) is None
    assert opened(config) == first and document(opened(config), 2) == before
    assert [path.name for path in first.folder.parent.iterdir()] == [first.folder.name], "no litter"


def test_a_manifest_with_missing_or_wrong_values_is_built_again(config: Config) -> None:
    first = opened(config)
    path = first.folder / "manifest.json"
    wrong = [
        None,
        True,
        -1,
        1.5,
        1e400,
        10**30,
        "3",
        [],
        [1, 300_000],
        ["1"],
        [10**30],
        {},
        {"tokens.bin": "1"},
    ]
    is_refused = {}
    for name, right in first.manifest.items():
        for value in wrong:
            if type(value) is not type(right) or isinstance(value, int | list | dict):
                path.write_text(json.dumps({**first.manifest, name: value}))
                # Some are right for a list, as no document that is held out.
                is_refused[name, str(value)] = found(config) is None or (
                    value == [] and isinstance(right, list)
                )
        path.write_text(
            json.dumps({key: value for key, value in first.manifest.items() if key != name})
        )
        is_refused[name, "missing"] = found(config) is None
    assert [case for case, refused in is_refused.items() if not refused] == []
    assert opened(config) == first


def test_stores_and_streams_of_earlier_versions_have_the_same_identity(config: Config) -> None:
    store = opened(config)
    assert store.manifest["content"] == "689e4d7f24b70fd777ca4e5e38697649"
    before = {
        key: value for key, value in store.manifest.items() if key not in ("vocab_size", "checksum")
    }
    before["sizes"] = {name: size for name, size in before["sizes"].items() if name != "blocks.bin"}
    (store.folder / "manifest.json").write_text(json.dumps(before))
    assert opened(config).manifest == before, "taken as it is"
    stream = open_stream(config)
    assert stream.identity["content"] == store.manifest["content"]
    assert fingerprint([stream.read(0, 20)]) == "ffd1191b84bd6e02"


def test_those_who_want_the_same_new_entry_do_the_work_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders, built = 6, []
    together = threading.Barrier(builders)
    write_files = builder._write_files

    def counted(*arguments: Any) -> dict[str, Any]:
        built.append(1)
        return write_files(*arguments)

    monkeypatch.setattr(builder, "_write_files", counted)
    results: list[list[int]] = []

    def want_it() -> None:
        together.wait()
        results.append(document(opened(config), 2))

    threads = [threading.Thread(target=want_it) for _ in range(builders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[256, *"żółw".encode(), 257]] * builders
    assert built == [1]
    assert len(list((Path(config.data_cache_dir) / "tokens").iterdir())) == 1, "no lock stays"


def test_a_build_that_fails_leaves_nothing_behind(config: Config) -> None:
    Path(config.dataset_path).write_text('{"text": "fine"}\n{bad}\n')
    with pytest.raises(ConfigError, match="line 2"):
        opened(config)
    assert list((Path(config.data_cache_dir) / "tokens").iterdir()) == []


def test_what_killed_builders_left_is_removed_after_a_day(config: Config) -> None:
    cache = Path(config.data_cache_dir) / "tokens"
    for name, age in (("old", 2 * 86400), ("new", 0)):
        folder = cache / f".building-{name}"
        folder.mkdir(parents=True)
        moment = folder.stat().st_mtime - age
        os.utime(folder, (moment, moment))
    opened(config)
    assert [path.name for path in cache.glob(".building-*")] == [".building-new"]


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_a_dataset_without_documents_is_refused(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"dataset_path=.*holds no document"):
        opened(jsonl_config(tmp_path / "a.jsonl", texts))


def test_a_cache_that_cannot_be_written_is_named(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data_cache_dir='file/x': .* cannot be written"):
        opened(changed(config, data_cache_dir="file/x"))


def test_a_full_disk_is_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match=r"data_cache_dir=.*no space left on the disk"):
        opened(config)


def test_a_file_that_changes_while_it_is_read_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = DocumentSource.from_config(config.store)
    monkeypatch.setattr(DocumentSource, "from_config", lambda *_: source)
    with open(config.dataset_path, "a") as file:
        file.write('{"text": "late"}\n')
    with pytest.raises(ConfigError, match="changed while it was read"):
        opened(config)


def test_the_cache_lies_where_the_user_said(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened(config).folder.parent == tmp_path / "cache" / "tokens"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert (
        opened(changed(config, data_cache_dir="")).folder.parent
        == tmp_path / "xdg" / "maxbatch" / "tokens"
    )
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert (
        opened(changed(config, data_cache_dir="")).folder.parent
        == tmp_path / "home/.cache/maxbatch/tokens"
    )


def test_an_entry_that_is_there_needs_no_writing(config: Config) -> None:
    folder = opened(config).folder
    shutil.copytree(folder, folder.parent / "copy")
    folder.parent.chmod(0o555)
    try:
        assert opened(config).folder == folder
    finally:
        folder.parent.chmod(0o755)


def test_a_store_damaged_under_a_running_job_is_an_error_where_it_is_mapped(config: Config) -> None:
    for damage in ("tokens cut short", "tokens missing", "manifest missing"):
        store = opened(config)
        in_a_worker = pickle.loads(pickle.dumps(store))
        DAMAGE[damage](store.folder)
        with pytest.raises(ConfigError, match="the tokenised data cannot be used"):
            _ = in_a_worker.tokens


def test_a_file_that_is_written_to_while_it_is_read_is_told_as_that(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = DocumentSource.documents

    def torn(source: DocumentSource, *pieces: Any) -> Any:
        Path(config.dataset_path).write_text('{"text": "fine"}\n{"te')
        return documents(source, *pieces)

    monkeypatch.setattr(DocumentSource, "documents", torn)
    with pytest.raises(
        ConfigError, match="changed while it was read; start again once it is complete"
    ):
        opened(config)


def test_one_process_is_enough_for_little_and_all_cores_are_for_much(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = DocumentSource.from_config(config.store)
    monkeypatch.setattr(builder, "num_cores", lambda: 5)
    assert builder.default_workers(source) == 1
    large = next(iter(source.files))._replace(size=1 << 30)
    assert builder.default_workers(dataclasses.replace(source, files=(large,))) == 5


def test_a_plan_of_any_format_loads_neither_formats_nor_tokenizers(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", TEXTS)
    write_bpe(tmp_path, "<|endoftext|>")
    overrides = [
        "dataset_type=parquet",
        "dataset_path=a.parquet",
        "tokenizer_type=huggingface",
        "tokenizer_path=.",
        "vocab_size=512",
    ]
    config = load_config(overrides=overrides)
    open_store(config.store, make_tokenizer(config.tokenizer_type, config.tokenizer_path))
    script = (
        "import sys\nfrom maxbatch import load_config\nfrom maxbatch.data.stream.sources import "
        "samples_per_epoch_if_cached\nfrom maxbatch.config.combined import StreamConfig\nassert "
        f"samples_per_epoch_if_cached(load_config(overrides={overrides!r}).stream) == "
        "1\nprint(*sorted({'jax', 'grain', 'pyarrow', 'tokenizers', 'fsspec', 'array_record'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
