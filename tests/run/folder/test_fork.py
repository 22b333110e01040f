"""A fork is a new run with another run's state: whole or absent, and never with the other's id."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxbatch.config.loading import dump_config, load_config
from maxbatch.plan.place import Place
from maxbatch.run.folder import fork as forking
from maxbatch.run.folder.best_checkpoint import read_best
from maxbatch.run.folder.devices import DevicesUsed, read_devices, record_devices
from maxbatch.run.folder.fork import Fork
from maxbatch.run.folder.position import (
    BestEval,
    CheckpointRecord,
    Position,
    committed_steps,
    read_record,
)
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.run.folder.run_id import RunIdentity, read_identity
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage import atomic_files, storage
from maxbatch.system.storage.storage import AnyPath, as_path, copy_tree
from tests.helpers.measured_runs import fake_run
from tests.helpers.stores import Store, on

PARENT = "0123456789abcdef"


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_checkpoint(folder: Path, position: Position, run_id: str = PARENT) -> None:
    """A checkpoint as a run leaves it, of one small array file and a batch ahead."""
    checkpoint = folder / "checkpoints" / str(position.step)
    identity: dict[str, Any] = {"data": {}, "model": {}}
    record = CheckpointRecord(position, identity, 7, (1, 1), run_id=run_id)
    files = {
        "params/x-0.bin": b"values",
        "params/index.json": b"{}",
        "ahead/batches": b"ahead",
        "position/metadata": json.dumps(record.to_json()).encode(),
        "commit_success.txt": b"",
    }
    for name, data in files.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 8 updates with checkpoints of steps 2, 4 and 8, the best of them 2."""
    folder = fake_run(tmp_path / "run", updates=8, first=99)
    identity = RunIdentity(PARENT, False, "", {"reference": "aa"}, {"jax": "0.10.2"})
    (folder / "run.json").write_text(json.dumps(identity.__dict__))
    for step in (2, 4, 8):
        best = BestEval(1.5, 2, step // 2 - 1)
        write_checkpoint(folder, Position(step, Place(16 * step), best_eval=best))
    (folder / "checkpoints/best").write_text('{"step": 2, "eval_loss": 1.5, "is_extra": true}')
    for step in (1, 4, 5):
        record_devices(folder, DevicesUsed(step, "cpu", step, 1, 1, {"fsdp": step}))
    (folder / "transcripts.jsonl").write_text('{"step": 3}\n{"step": 5}\n')
    (folder / "reference.bin").write_bytes(b"reference")
    for name in ("sessions.jsonl", "trackers.json", "events.out.tfevents.1", ".lock"):
        (folder / name).write_text("{}\n")
    write_checkpoint(folder / "warm_start", Position(3, Place(9)), run_id="warm")
    (folder / "warm_start/config.yml").write_text((folder / "config.yml").read_text())
    return folder


def forked(run: AnyPath, target: AnyPath, step: int = 4) -> RunIdentity:
    config = load_config(str(run / "config.yml"), [f"run_dir={target}"])
    fork = Fork.at(run, step, lambda nearest: f"; nearest {nearest}")
    return fork.write_new(target, dump_config(config), "--output other")


def assert_whole(new: AnyPath) -> None:
    """A fork of the run at step 4, in every file that a resume reads."""
    identity = read_identity(new)
    assert identity is not None and identity.run_id != PARENT and not identity.is_older
    origin = identity.forked_from
    assert origin is not None and (origin["run_id"], origin["step"]) == (PARENT, 4)
    assert committed_steps(new) == [4, 2]
    for step in (2, 4):
        record = read_record(new / "checkpoints" / str(step))
        assert (record.run_id, record.forked_from) == (identity.run_id, origin)
        assert record.position.step == step and record.checksum == 7
        assert (new / f"checkpoints/{step}/params/x-0.bin").read_bytes() == b"values"
    best = read_best(new / "checkpoints")
    assert best is not None and (best.step, best.is_extra) == (2, True)
    lines = (new / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert (new / "transcripts.jsonl").read_text() == '{"step": 3}\n'
    assert [used.first_step for used in read_devices(new)] == [1, 4]
    assert (new / "reference.bin").read_bytes() == b"reference"
    assert identity.reads == {"reference": "aa"} and identity.software == {"jax": "0.10.2"}
    warm_start = read_record(new / "warm_start/checkpoints/3")
    assert warm_start.run_id not in ("warm", None) and warm_start.forked_from is not None
    assert f'run_dir: "{new}"' in (new / "config.yml").read_text()
    for name in ("sessions.jsonl", "trackers.json", "events.out.tfevents.1", ".lock"):
        assert not (new / name).exists()


def test_a_fork_has_what_a_resume_reads_under_an_id_of_its_own_and_the_run_is_untouched(
    run: Path, tmp_path: Path
) -> None:
    before, new = content(run), tmp_path / "below" / "new"
    forked(run, new)
    assert content(run) == before
    assert_whole(new)
    shared = "checkpoints/4/params/x-0.bin"
    assert os.path.samefile(run / shared, new / shared), "linked"
    assert not os.path.samefile(run / "metrics.jsonl", new / "metrics.jsonl")


def test_a_fork_whose_run_json_is_lost_keeps_its_own_id_and_its_origin(
    run: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    identity = forked(run, new)
    (new / "run.json").unlink()
    with RunFolder(str(new)) as folder:
        assert folder.identity is not None
        assert folder.identity.run_id == identity.run_id != PARENT
        assert folder.forked_from == identity.forked_from


def test_a_run_without_run_json_is_forked_by_the_id_of_its_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    (run / "run.json").unlink()
    origin = forked(run, tmp_path / "new").forked_from
    assert origin is not None and origin["run_id"] == PARENT


def test_a_step_without_a_checkpoint_names_the_nearest(run: Path, tmp_path: Path) -> None:
    for step, nearest in ((5, "[4, 8]"), (1, "[2]"), (9, "[8]")):
        with pytest.raises(ConfigError) as refusal:
            forked(run, tmp_path / "new", step)
        assert str(refusal.value).endswith(f"no checkpoint of step {step}; nearest {nearest}")
    assert not (tmp_path / "new").exists()


class Killed(BaseException):
    """Stands for a kill: no handler of errors runs."""


def killing_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> list[int]:
    """Ends the process, as far as a test can, at the `moment`-th file that is linked, copied or
    written; what would clean up afterwards does nothing.
    """
    count = [0]

    def counted(do: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **keywords: Any) -> Any:
            count[0] += 1
            if count[0] == moment:
                raise Killed
            return do(*arguments, **keywords)

        return counting

    for module, name in (
        (forking, "write_atomically"),
        (forking, "write_json"),
        (forking, "clone_file"),
        (storage, "clone_file"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    monkeypatch.setattr(atomic_files, "remove_tree", lambda path: None)
    return count


def test_a_fork_that_is_killed_at_any_moment_is_absent_and_the_same_command_makes_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, new = content(run), tmp_path / "below" / "new"
    with monkeypatch.context() as patch:
        moments = killing_at(patch, 0)
        forked(run, new)
    assert moments[0] > 20
    shutil.rmtree(new)
    for moment in range(1, moments[0] + 1):
        with monkeypatch.context() as patch:
            killing_at(patch, moment)
            with pytest.raises(Killed):
                forked(run, new)
        assert not new.exists() and content(run) == before
    forked(run, new)
    assert_whole(new)


@pytest.mark.parametrize("when", ["before", "during", "after the listing"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_one_line_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def remove() -> None:
        (run / "checkpoints/4").rename(run / "checkpoints/.building-x-4")

    clone = storage.clone_file

    def cloning(source: AnyPath, target: AnyPath) -> None:
        clone(source, target)
        if when == "after the listing" and source.name == "batches":
            remove()

    def listing(folder: Path) -> list[Path]:
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        if when == "during" and folder.name == "4":
            remove()
            return found[:1]
        return found

    monkeypatch.setattr(storage, "clone_file", cloning)
    monkeypatch.setattr(storage, "_files_below", listing)
    fork = Fork.at(run, 4, lambda nearest: "")
    if when == "before":
        remove()
    with pytest.raises(ConfigError, match="removed its checkpoint of step 4 while it was copied"):
        fork.write(tmp_path / "new", "")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_best_checkpoint_that_vanishes_is_left_out(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run / "checkpoints/2")
    forked(run, tmp_path / "new")
    assert committed_steps(tmp_path / "new") == [4]
    assert read_best(tmp_path / "new/checkpoints") is None


def test_nothing_is_written_over_a_folder_that_is_there(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(ConfigError, match=r"new: is there already.*; works: --output other"):
        forked(run, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


@on("s3")
def test_in_a_bucket_objects_are_copied_there_and_a_killed_fork_is_made_anew(
    run: Path, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = store.bucket()
    source, new = as_path(f"{bucket}/run"), as_path(f"{bucket}/new")
    copy_tree(run, source)
    with monkeypatch.context() as patch:
        killing_at(patch, 15)
        patch.setattr(atomic_files.RemotePath, "unlink", lambda self, missing_ok=False: None)
        with pytest.raises(Killed):
            forked(source, new)
    assert new.exists() and not (new / "config.yml").exists()
    store.forget()
    forked(source, new)
    read = [path for _, method, path, *_ in store.requests() if method == "GET"]
    assert not any("x-0.bin" in path for path in read), "copied inside of the store"
    assert_whole(new)
    assert not any(name.startswith(".") for name in storage.file_sizes(new))
    with pytest.raises(ConfigError, match="is there already"):
        forked(source, new)
    away = tmp_path / "here"
    forked(source, away)
    assert_whole(away)


@on("s3")
def test_in_a_bucket_a_checkpoint_that_vanishes_leaves_nothing(
    run: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = store.bucket()
    source, new = as_path(f"{bucket}/run"), as_path(f"{bucket}/new")
    copy_tree(run, source)
    clone = storage.clone_file

    def cloning(one: AnyPath, target: AnyPath) -> None:
        clone(one, target)
        if one.name == "batches":
            (source / "checkpoints/4/commit_success.txt").unlink(missing_ok=True)

    monkeypatch.setattr(storage, "clone_file", cloning)
    with pytest.raises(ConfigError, match="removed its checkpoint of step 4 while it was copied"):
        forked(source, new)
    assert not new.exists()
