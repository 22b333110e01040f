"""A start never cuts lines that checkpoints stand for, unless it resumes from one of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.cli import main
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.own import Parts
from maxbatch.run.pretraining import train
from maxbatch.run.record.recorder import Output, Record
from maxbatch.run.session import Outcome
from tests.helpers.tiny import ONE_LAYER, TINY_RUN, one_layer_config, read_metrics

ONE = jax.devices()[:1]
UNSAVED = "enable_checkpointing=false"


class Killed(BaseException):
    """The end of a process, without a last checkpoint."""


class EndsAt(Output):
    def __init__(self, step: int) -> None:
        self._step = step

    def append(self, record: Record) -> None:
        if record["step"] == self._step:
            raise Killed


def run(folder: Path, *overrides: str) -> Outcome:
    return train(
        one_layer_config(f"run_dir={folder}", "checkpoint_period=2", "steps=5", *overrides), ONE
    )


def content(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder but for the lock, which a refused start holds too."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(folder, "steps=4")
    return folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained_once, tmp_path / "run")
    return tmp_path / "run"


def assert_refused(folder: Path, message: str, *overrides: str) -> str:
    before = content(folder)
    with pytest.raises(ConfigError, match=message) as error:
        run(folder, *overrides)
    assert content(folder) == before, "a refused start changes nothing"
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_start_without_checkpointing_does_not_begin_anew_over_a_run_with_checkpoints(
    trained: Path,
) -> None:
    said = assert_refused(trained, "there is a checkpoint of step 4 in run_dir", UNSAVED)
    (new,) = re.findall(r"works: run_dir=(\S+),", said)
    assert new == f"{trained}-2" and not Path(new).exists()


def test_a_folder_whose_checkpoints_are_not_mounted_is_refused(trained: Path) -> None:
    (trained / "checkpoints").rename(trained.parent / "elsewhere")
    assert_refused(trained, "sessions.jsonl states a checkpoint of step 4 and there is none")
    (trained / "checkpoints").mkdir()
    assert_refused(trained, "sessions.jsonl states a checkpoint of step 4 and there is none")
    assert_refused(
        trained, "sessions.jsonl states a checkpoint of step 4 and there is none", UNSAVED
    )


@pytest.mark.runs
def test_lines_speak_of_checkpoints_where_sessions_do_not(trained: Path) -> None:
    """As of a version whose sessions did not state what was saved, or of a lost file."""
    shutil.rmtree(trained / "checkpoints")
    sessions = trained / "sessions.jsonl"
    lines = [json.loads(line) for line in sessions.read_text().splitlines()]
    sessions.write_text(
        "".join(json.dumps({k: v for k, v in x.items() if k != "saved_step"}) + "\n" for x in lines)
    )
    assert_refused(
        trained, "metrics.jsonl has 4 updates of a run that saves a checkpoint every 2 updates"
    )
    sessions.unlink()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl has 4 updates"):
        run(trained)


@pytest.mark.runs
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = one_layer_config(f"run_dir={tmp_path}", "checkpoint_period=100", "steps=5")
    with pytest.raises(Killed):
        train(config, ONE, Parts(outputs=[EndsAt(3)]))
    capsys.readouterr()
    assert train(config, ONE).position.step == 5
    assert (
        "begun anew: 3 updates of an earlier start are in no checkpoint" in capsys.readouterr().out
    )
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.runs
def test_a_run_without_checkpoints_begins_anew_as_often_as_it_is_started(tmp_path: Path) -> None:
    for _ in range(2):
        run(tmp_path, UNSAVED, "steps=2")
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.runs
def test_overwrite_run_begins_anew_once_and_the_same_command_then_resumes(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / "notes.txt").write_text("mine")
    (trained / "checkpoints").rename(trained.parent / "elsewhere")
    old_id = json.loads((trained / "run.json").read_text())["run_id"]
    run(trained, "overwrite_run=true", "steps=2", "learning_rate=1e-3")
    assert [line["step"] for line in read_metrics(trained)] == [1, 2] and committed_steps(
        trained
    ) == [2]
    assert json.loads((trained / "run.json").read_text())["run_id"] != old_id
    assert len((trained / "sessions.jsonl").read_text().splitlines()) == 1
    assert (trained / "notes.txt").read_text() == "mine"
    assert not load_config(str(trained / "config.yml")).overwrite_run, (
        "training from it overwrites nothing"
    )
    first = read_metrics(trained)
    run(trained, "overwrite_run=true", "steps=3", "learning_rate=1e-3")
    assert "resumed at step 2" in capsys.readouterr().out and read_metrics(trained)[:2] == first
    # the old run's checkpoints come back: they are of another run than the lines, and nothing
    # removes them
    shutil.rmtree(trained / "checkpoints")
    (trained.parent / "elsewhere").rename(trained / "checkpoints")
    assert_refused(trained, "its checkpoint of step 4 is of another run", "overwrite_run=true")
    assert_refused(
        trained, "its checkpoint of step 4 is of another run", "overwrite_run=true", UNSAVED
    )


@pytest.mark.runs
def test_overwrite_run_without_checkpointing_removes_the_checkpoints_too(trained: Path) -> None:
    run(trained, UNSAVED, "overwrite_run=true", "steps=2")
    assert [line["step"] for line in read_metrics(trained)] == [1, 2] and not committed_steps(
        trained
    )
    run(trained, "steps=3")
    assert [line["step"] for line in read_metrics(trained)] == [1, 2, 3]


@pytest.mark.runs
def test_overwrite_run_resumes_where_there_is_a_checkpoint(trained: Path) -> None:
    before = read_metrics(trained)
    run(trained, "overwrite_run=true")
    assert read_metrics(trained)[:4] == before


@pytest.mark.runs
def test_where_every_checkpoint_is_damaged_the_lines_are_kept_beside_them(trained: Path) -> None:
    lines = (trained / "metrics.jsonl").read_bytes()
    for step in committed_steps(trained):
        (trained / "checkpoints" / str(step) / "position" / "metadata").write_text("{}")
    run(trained)
    assert (trained / "checkpoints-damaged" / "metrics.jsonl").read_bytes() == lines
    shutil.rmtree(trained / "checkpoints" / "2")
    run(trained, "steps=6")  # and the next start goes on


def orbax_step(folder: Path, step: int) -> None:
    (folder / "checkpoints" / str(step) / "items" / "d").mkdir(parents=True)
    (folder / "checkpoints" / str(step) / "items" / "d" / "values").write_text("MaxText's")
    (folder / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").write_text("{}")


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_folder_with_checkpoints_of_maxtext_is_never_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = tmp_path / "theirs"
    for step in (2, 10):
        orbax_step(folder, step)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    assert main([command, *TINY_RUN, ONE_LAYER, f"run_dir={folder}", "overwrite_run=true"]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.endswith(f"works: run_dir={folder}-2 load_full_state_path={folder}/checkpoints/10")
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))} == before


def test_an_import_says_that_its_run_dir_holds_checkpoints_of_maxtext(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orbax_step(tmp_path / "runs" / "theirs", 10)
    words = tmp_path / "theirs.yml"
    words.write_text(
        f"base_output_directory: {tmp_path}/runs\nrun_name: theirs\ndataset_type: "
        "synthetic\nsteps: 9\n"
    )
    assert main(["import", "maxtext", str(words), "--output", str(tmp_path / "ours.yml")]) == 0
    where = (
        f"works: run_dir={tmp_path}/runs/theirs-2 "
        f"load_full_state_path={tmp_path}/runs/theirs/checkpoints/10"
    )
    assert where in " ".join(capsys.readouterr().err.split())
    assert main(["plan", str(tmp_path / "ours.yml"), f"run_dir={tmp_path}/runs/theirs-2"]) == 0, (
        "it displaces run_name"
    )


@pytest.mark.parametrize("what", ["a folder", "an empty folder", "text", "other JSON", "a link"])
def test_a_best_of_another_program_is_refused_and_stays(tmp_path: Path, what: str) -> None:
    best = tmp_path / "run" / "checkpoints" / "best"
    best.parent.mkdir(parents=True)
    if what.endswith("folder"):
        best.mkdir()
        if what == "a folder":
            (best / "pytorch_model.bin").write_text("theirs")
    elif what == "a link":
        best.symlink_to(tmp_path / "gone")
    else:
        best.write_text("theirs" if what == "text" else '{"step": "500"}')
    kind = "a folder" if what.endswith("folder") else "a file with other content"
    for keys in ((), (UNSAVED,), ("overwrite_run=true",), ("keep_best_checkpoint=false",)):
        assert_refused(
            tmp_path / "run",
            rf"checkpoints/best in it is {kind}, .*; works: run_dir=.*/run-2$",
            *keys,
        )
    assert best.is_symlink() == (what == "a link")


@pytest.mark.runs
def test_what_is_not_ours_in_checkpoints_is_never_touched(tmp_path: Path) -> None:
    theirs = ["checkpoint-500/model.bin", "notes.txt", "7.orbax-checkpoint-tmp/items/d"]
    for name in theirs:
        file = tmp_path / "checkpoints" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    run(tmp_path, "steps=2")
    run(tmp_path, "steps=3", "max_num_checkpoints_to_keep=1")
    assert [(tmp_path / "checkpoints" / name).read_text() for name in theirs] == theirs
    (tmp_path / "checkpoints" / "500").mkdir()
    (tmp_path / "checkpoints" / "500" / "model.bin").write_text("theirs")
    assert_refused(
        tmp_path,
        "checkpoints/500 in it is not a checkpoint of maxbatch .it holds model.bin",
        "steps=500",
    )
