"""What a command writes is whole or absent: on a full disk, in a full bucket, and where a right is
missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from maxbatch.cli import main
from maxbatch.commands.fit import write_choice
from maxbatch.run.pretraining import train
from maxbatch.system.storage.storage import as_path
from tests.helpers.full_disk import small_disk
from tests.helpers.stores import Store
from tests.helpers.tiny import TINY_RUN, tiny_config

FOUND = ("config.json", "generation_config.json", "model.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one update."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    keys = ("steps=1", "base_num_decoder_layers=1", "per_device_batch_size=1", f"run_dir={run_dir}")
    train(tiny_config(*keys), jax.devices()[:1])
    return run_dir


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{number} " + "word " * 40}) + "\n" for number in range(200))
    )
    return path


def ended(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Runs a command that fails; returns its exit code and the one line of its error."""
    capsys.readouterr()
    code = main(arguments)
    errors = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("maxbatch: error")
    ]
    assert code and len(errors) == 1, errors
    return code, errors[0]


@pytest.mark.runs
@pytest.mark.parametrize("output", ["", "out"])  # the disk itself, or a new folder on it
def test_an_export_to_a_full_disk_leaves_nothing_and_the_same_command_works_once_there_is_room(
    run: Path, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # of the 75 that it takes: none, some of the tensors, all but config.json
    for num_kilobytes in (4, 48, 76):
        with small_disk(tmp_path / "disk", num_kilobytes) as disk:
            code, error = ended(["export", str(run), "--output", str(disk / output)], capsys)
            assert code == 1 and "no space left on the disk" in error
            assert list(disk.iterdir()) == []
    with small_disk(tmp_path / "disk", 400) as disk:
        assert main(["export", str(run), "--output", str(disk / output)]) == 0
        assert sorted(p.name for p in (disk / output).iterdir()) == sorted(FOUND)


def test_an_export_that_was_killed_does_not_stop_the_next_one(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".building-0123").mkdir(parents=True)
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} >= set(FOUND)


def test_an_export_to_a_store_that_fails_leaves_nothing(
    run: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    there = as_path(store.bucket() + "/out")
    for fault, expected in (
        ({"denied": "^(PUT|POST) .*config.json"}, (2, "no permission in bucket")),
        ({"denied": "^(PUT|POST) .*safetensors"}, (2, "no permission in bucket")),
        ({"full_after_bytes": 72_500}, (1, "is full; free some space")),
    ):
        with store.failing(**fault):
            code, error = ended(["export", str(run), "--output", str(there)], capsys)
        assert code == expected[0] and expected[1] in error
        assert there.files() == []
    assert main(["export", str(run), "--output", str(there)]) == 0
    assert {path.name for path, _ in there.files()} == set(FOUND)


def test_an_export_to_a_store_that_was_killed_between_its_objects_goes_on(
    run: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = as_path(store.bucket() + "/out")
    killed = export_to_be_killed(str(run), str(there))
    assert {path.name for path, _ in there.files()} == killed
    (there / "model-00009-of-00009.safetensors").write_text("of another half")
    assert main(["export", str(run), "--output", str(there)]) == 0
    assert {path.name for path, _ in there.files()} == set(FOUND)
    assert ended(["export", str(run), "--output", str(there)], capsys)[0] == 2, (
        "a whole export is not replaced"
    )
    export_to_be_killed(str(run), str(there) + "2")
    (as_path(f"{there}2") / "notes.txt").write_text("somebody's")
    assert ended(["export", str(run), "--output", f"{there}2"], capsys)[0] == 2


def export_to_be_killed(run: str, there: str) -> set[str]:
    """Kills an export once its tensors are written; returns the names of its half."""
    lines = (
        "import os, sys\nfrom maxbatch.around.huggingface.arrays import writing\n"
        "from maxbatch.around.huggingface.export.model import export_model\n"
        "write = writing._write_tensors\n"
        "writing._write_tensors = lambda *arguments: write(*arguments) and os._exit(9)\n"
        "export_model(sys.argv[1], sys.argv[2], None)\n"
    )
    assert subprocess.run([sys.executable, "-c", lines, run, there]).returncode == 9
    return {"model.safetensors", ".building-config.json"}


def test_a_tensor_file_that_is_cut_off_never_appears_in_a_store(
    run: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = as_path(store.bucket() + "/out")
    monkeypatch.setattr(
        "maxbatch.around.huggingface.arrays.writing._tensors", lambda *args: iter([])
    )
    with pytest.raises((StopIteration, RuntimeError)):
        main(["export", str(run), "--output", str(there)])
    assert there.files() == []


def test_prepare_on_a_full_disk_leaves_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for num_kilobytes in (4, 16, 44):
        with small_disk(tmp_path / "disk", num_kilobytes) as disk:
            words = [
                "prepare",
                "dataset_type=jsonl",
                f"dataset_path={corpus}",
                "--output",
                str(disk / "tokens"),
            ]
            code, error = ended(words, capsys)
            assert code == 1 and "no space left on the disk" in error
            assert [p.name for p in disk.iterdir() if not p.name.startswith(".lock")] == []


def test_prepare_to_a_store_without_room_is_exit_1_and_no_store_is_there(
    corpus: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    there = store.bucket() + "/tokens"
    words = ["prepare", "dataset_type=jsonl", f"dataset_path={corpus}", "--output", there]
    with store.failing(full_after_bytes=5_000):
        code, error = ended(words, capsys)
    assert code == 1 and "is full; free some space" in error
    assert main(["prepare", "--verify", there]) == 2
    assert main(words) == 0 and main(["prepare", "--verify", there]) == 0


def test_a_cache_of_tokens_on_a_full_disk_is_exit_1(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        keys = [*TINY_RUN, "dataset_type=jsonl", f"dataset_path={corpus}", f"data_cache_dir={disk}"]
        code, error = ended(["data", *keys, "--stats"], capsys)
        assert code == 1 and "data_cache_dir=" in error and "no space left on the disk" in error


def test_a_report_and_a_choice_of_fit_on_a_full_disk_leave_what_was_there(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        (disk / "report.html").write_text("the page before")
        code, error = ended(["report", str(run), "--output", str(disk / "report.html")], capsys)
        assert code == 1 and "no space left on the disk" in error
        assert (disk / "report.html").read_text() == "the page before"
        (disk / "report.html").unlink()
        config = disk / "my.yml"
        config.write_text("steps: 7\n")
        (disk / "rest").write_bytes(bytes(4096))
        with pytest.raises(Exception, match="no space left on the disk"):
            write_choice(config, tiny_config(), {"per_device_batch_size": 3})
        assert config.read_text() == "steps: 7\n" and sorted(p.name for p in disk.iterdir()) == [
            "my.yml",
            "rest",
        ]


@pytest.mark.runs
def test_programs_that_find_no_room_leave_the_folder_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        keys = [*TINY_RUN, "base_num_decoder_layers=1", "per_device_batch_size=1", "steps=1"]
        code, error = ended(["compile", *keys, "--output", str(disk / "compiled")], capsys)
        assert code == 1 and "no space left on the disk" in error
        assert list(disk.iterdir()) == []
