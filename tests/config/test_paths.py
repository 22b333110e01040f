"""Which places a path may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch import load_config
from maxbatch.config.loading import dump_config
from maxbatch.config.sections import KEYS
from maxbatch.system.storage.storage import as_path
from tests.helpers.configs import error_of
from tests.helpers.stores import Store

PLACES = [key.name for key in KEYS.values() if key.kind == "path"]
LOCAL = [key.name for key in KEYS.values() if key.kind == "local"]
DATA = [key.name for key in KEYS.values() if key.kind == "paths"]


def test_every_key_that_names_a_place_is_a_path() -> None:
    named = [
        key.name for key in KEYS.values() if key.name.endswith(("_path", "_dir", "_directory"))
    ]
    assert sorted(named) == sorted(PLACES + LOCAL + DATA)


@pytest.mark.parametrize("key", PLACES)
def test_a_place_is_a_local_path_or_one_of_an_object_store(key: str) -> None:
    for place in ("gs://bucket/x", "s3://bucket/x", "a:b/c", "/x"):
        assert load_config(overrides=[f"{key}={place}"])[key] == place
    for url in ("file:///x", "http://x/y", "hf://x", "gs2:/x", "gcs://bucket/x"):
        message = error_of(overrides=(f"{key}={url}",))
        assert f"({url.partition(':')[0]}:// is not supported); works: {key}=" in message
        load_config(overrides=[message.partition("works: ")[2].replace("''", "")])
    for url in ("gs:/bucket/x", "s3:///x"):
        assert "must be a local path or a URL with a bucket" in error_of(
            overrides=(f"{key}={url}",)
        )


# Of each: the URL, the rule, and a URL that keeps it.
ODD_URLS = (
    ("gs://bucket/a/../b", "a URL without '//', '.' and '..'", "gs://bucket/b"),
    ("s3://bucket/../..", "a URL without '//', '.' and '..'", "s3://bucket"),
    ("gs://bucket/./a", "a URL without '//', '.' and '..'", "gs://bucket/a"),
    ("gs://bucket//a", "a URL without '//', '.' and '..'", "gs://bucket/a"),
    ("s3://bucket/a//", "a URL without '//', '.' and '..'", "s3://bucket/a"),
    ("gs://bucket/a\tb", "a URL without ? # * [ ] \\ and unprintable", "gs://bucket/a_b"),
    ("gs://bucket/a\u200b", "a URL without ? # * [ ] \\ and unprintable", "gs://bucket/a_"),
    (
        "s3://bucket/a?versionId=3",
        "a URL without ? # * [ ] \\ and unprintable",
        "s3://bucket/a_versionId=3",
    ),
    ("gs://bucket/a#1", "a URL without ? # * [ ] \\ and unprintable", "gs://bucket/a_1"),
    ("gs://bucket/a[1]", "a URL without ? # * [ ] \\ and unprintable", "gs://bucket/a_1_"),
    ("gs://bucket/" + "x" * 801, "a URL whose name has at most 800 bytes", ""),
    ("gs://..", "a URL whose bucket is letters, digits", "gs://bucket/folder"),
    ("s3://user:word@bucket/x", "a URL whose bucket is letters, digits", "s3://bucket/folder"),
    ("gs://bücket/x", "a URL whose bucket is letters, digits", "gs://bucket/folder"),
    ("gs://?x", "a URL whose bucket is letters, digits", "gs://bucket/folder"),
    ("gs://", "a local path or a URL with a bucket", "gs://bucket/folder"),
)


@pytest.mark.parametrize("key", PLACES)
def test_a_url_that_clients_of_stores_read_in_different_ways_is_refused(key: str) -> None:
    for url, rule, works in ODD_URLS:
        message = error_of(overrides=(f"{key}={url}",))
        assert f"must be {rule}" in message and works in message
        if works:
            assert load_config(overrides=[f"{key}={works}"])[key] == works
    for url in (
        "gs://bucket",
        "s3://bucket/",
        "gs://bucket/a b/%2e%2e/ü&x=1/",
        "s3://my.bucket_1/a",
    ):
        assert load_config(overrides=[f"{key}={url}"])[key] == url
    assert "must be UTF-8 text without NUL" in error_of(overrides=(f"{key}=gs://bucket/a\0b",))


def test_a_config_builds_on_one_in_a_bucket(tmp_path: Path, gs: Store) -> None:
    base = f"{gs.bucket()}/base.yml"
    as_path(base).write_text("steps: 7\n")
    (tmp_path / "run.yml").write_text(f"base_config: {base}\nglobal_batch_size: 8\n")
    config = load_config(tmp_path / "run.yml")
    assert (config.steps, config.global_batch_size) == (load_config(base).steps, 8) == (7, 8)


@pytest.mark.parametrize("key", LOCAL)
def test_a_cache_of_this_machine_lies_on_it(key: str) -> None:
    assert "must be a local path (gs:// is not supported here)" in error_of(
        overrides=(f"{key}=gs://b/x",)
    )


@pytest.mark.parametrize("key", DATA)
def test_data_are_read_from_disks_and_object_stores(key: str) -> None:
    for path in ("gs://b/*.jsonl", "s3://b/x;gs://c/y", "a:/b"):
        assert load_config(overrides=["dataset_type=jsonl", f"{key}={path}"])[key] == path
    for path in ("gss://b/x", "a;foo://x,0.5", "memory://x", "file:///x"):
        assert ":// is not supported)" in error_of(
            overrides=("dataset_type=jsonl", f"{key}={path}")
        )


def test_maxtexts_words_say_run_dir() -> None:
    said = ("base_output_directory=gs://bucket/out", "run_name=llama")
    assert load_config(overrides=said)["run_dir"] == "gs://bucket/out/llama"
    assert load_config(overrides=["run_name=llama"])["run_dir"] == "runs/llama"
    assert load_config(overrides=["base_output_directory=/x/"])["run_dir"] == "/x/"
    agreeing = load_config(overrides=[*said, "run_dir=gs://bucket/out/llama"])
    assert agreeing["run_dir"] == "gs://bucket/out/llama"
    assert "run_dir=elsewhere: must not be stated beside base_output_directory" in error_of(
        overrides=(*said, "run_dir=elsewhere")
    )


def test_of_run_dir_and_maxtexts_words_the_higher_layer_holds(tmp_path: Path) -> None:
    file = tmp_path / "my.yml"
    file.write_text("base_output_directory: /out\nrun_name: llama\n")
    assert load_config(file)["run_dir"] == "/out/llama"
    assert load_config(file, ["run_name=other"])["run_dir"] == "/out/other"
    config = load_config(file, ["run_dir=/there"])
    assert (config["run_dir"], config["run_name"], config["base_output_directory"]) == (
        "/there",
        "",
        "",
    )
    (tmp_path / "again.yml").write_text(dump_config(load_config(file)))
    assert load_config(tmp_path / "again.yml") == load_config(file)
