"""Which places a path may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch import load_config
from maxbatch.cli import main
from maxbatch.config.keys import ROWS
from tests.helpers.configs import error_of

LOCAL = [key.name for key in ROWS if key.kind == "path"]
DATA = [key.name for key in ROWS if key.kind == "paths"]


def test_every_key_that_names_a_place_is_a_path() -> None:
    named = [key.name for key in ROWS if key.name.endswith(("_path", "_dir"))]
    assert sorted(named) == sorted(LOCAL + DATA)


@pytest.mark.parametrize("key", LOCAL)
def test_a_folder_of_a_store_is_refused_for_now_and_another_scheme_for_good(key: str) -> None:
    for scheme in ("gs", "s3"):
        message = error_of(overrides=(f"{key}={scheme}://bucket/x",))
        assert message.startswith(f"{key}={scheme}://bucket/x: must be a local path ({scheme}:// is not supported yet)")
    for url in ("file:///x", "http://x/y", "hf://x", "gs2:/x"):
        message = error_of(overrides=(f"{key}={url}",))
        assert f"({url.partition(':')[0]}:// is not supported); works: {key}=" in message
        load_config(overrides=[message.partition("works: ")[2].replace("''", "")])
    assert load_config(overrides=[f"{key}=a:b/c"])[key] == "a:b/c"


@pytest.mark.parametrize("key", DATA)
def test_data_are_read_from_every_scheme_that_fsspec_knows(key: str) -> None:
    for path in ("gs://b/*.jsonl", "s3://b/x;hf://c/y", "memory://x", "file:///x", "a:/b"):
        assert load_config(overrides=["dataset_type=jsonl", f"{key}={path}"])[key] == path
    for path in ("gss://b/x", "a;foo://x,0.5"):
        assert ":// is unknown)" in error_of(overrides=("dataset_type=jsonl", f"{key}={path}"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "gs://b/run"], ["report", "runs/a", "file:///x"], ["report", "--output", "s3://b/page", "runs/a"],
        ["critical-batch", "gs://b/run"], ["prepare", "--output", "gs://b/x"], ["prepare", "--verify", "ftp://b/x"],
        ["compile", "--output", "gs://b/x"], ["fit", "--write", "gs://b/x"], ["sweep", "gs://b/sweep.yml"],
    ],
)  # fmt: skip
def test_an_argument_that_names_another_place_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "must be a local path (" in error
    assert list(tmp_path.iterdir()) == []
