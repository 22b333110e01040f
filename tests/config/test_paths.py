"""Which places a path may name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.cli import main
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


def test_odd_urls_of_data_and_of_maxtexts_words_are_refused_too() -> None:
    for url in (
        "gs://b/a/../x.jsonl",
        "/x;s3://b//x.jsonl,0.5",
        "gs:///x",
        "s3://b*/x",
        "gs://b/a\x01b",
    ):
        for key in DATA:
            assert "must be a" in error_of(overrides=("dataset_type=jsonl", f"{key}={url}"))
    message = error_of(overrides=("base_output_directory=gs://b/x", "run_name=../y"))
    assert (
        "run_dir=gs://b/x/../y: must be a URL without" in message and "such as gs://b/y" in message
    )


def test_a_config_of_another_scheme_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text("base_config: ftp://b/base.yml\n")
    for path, named in (
        ("ftp://b/run.yml", "config file"),
        (str(tmp_path / "run.yml"), "base_config="),
    ):
        with pytest.raises(
            ConfigError, match=rf"^{named} ?ftp://b/\w+\.yml: must be a local path, gs:// or s3:// "
        ):
            load_config(path)


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "hf://b/run"],
        ["critical-batch", "gcs://b/run"],
        ["report", "runs/a", "file:///x"],
        ["report", "--output", "http://b/page", "runs/a"],
        ["prepare", "--output", "http://b/x"],
        ["prepare", "--verify", "ftp://b/x"],
        ["compile", "--output", "gcs://b/x"],
        ["fit", "--write", "gs://b/x"],
        ["sweep", "gs://b/sweep.yml"],
    ],
)
def test_an_argument_that_names_another_place_is_one_line(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1 and "must be a local path" in error and "is not supported" in error
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["score"],
        ["report"],
        ["critical-batch"],
        ["prepare", "--verify"],
        ["prepare", "dataset_type=python_stdlib", "--output"],
        ["compile", "--output"],
        ["export", "runs/a", "--output"],
        ["train"],
        ["plan"],
    ],
)
def test_an_argument_with_an_odd_url_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    after = ["data.jsonl"] if arguments == ["score"] else []
    Path("data.jsonl").write_text('{"text": "x"}\n')
    assert main([*arguments, "gs://bucket/a/../b", *after]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "must be a URL without '//', '.' and '..'" in error


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


LONG = "/data/" + "a long folder/" * 12 + "run"


@pytest.mark.parametrize(
    "stated", [(f"base_output_directory={LONG}", "run_dir=other"), (f"output_dir={LONG}",)]
)
def test_a_long_path_that_works_is_whole_and_quoted(stated: tuple[str, ...]) -> None:
    works = shlex.split(error_of(overrides=stated).partition("; works: ")[2])
    assert works == [f"run_dir={LONG}"] and load_config(overrides=works)["run_dir"] == LONG


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
