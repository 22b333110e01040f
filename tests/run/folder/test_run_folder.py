"""A run folder has one writer, and its entries are of the right kind."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from maxbatch import ConfigError
from maxbatch.plan.place import Place
from maxbatch.run.folder.json_file import write_json
from maxbatch.run.folder.position import CheckpointRecord, Position
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.run.folder.run_id import read_identity
from maxbatch.system.errors import LeaseLost
from maxbatch.system.storage import leases
from tests.helpers.stores import Store


def test_a_second_process_is_refused_and_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    with (
        RunFolder(str(tmp_path / "run")),
        pytest.raises(ConfigError, match=r"run_dir=.*another process"),
    ):
        RunFolder(str(tmp_path / "run"))
    with RunFolder(str(tmp_path / "run")):
        pass


def test_a_run_whose_lock_was_removed_stops(tmp_path: Path) -> None:
    with RunFolder(str(tmp_path / "run")) as held:
        held.check()
        (tmp_path / "run" / ".lock").unlink()  # as by `rm -r run_dir`
        with (
            RunFolder(str(tmp_path / "run")) as other,
            pytest.raises(LeaseLost, match="its lock was removed"),
        ):
            other.check()
            held.check()


def test_a_second_process_is_refused_in_a_bucket_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.3)
    monkeypatch.setattr(leases, "_LOOK_S", 0.1)
    run_dir = store.bucket() + "/run"
    with RunFolder(run_dir) as held:
        with pytest.raises(ConfigError) as refused:
            RunFolder(run_dir)
        held.check()
    holder = rf"process {os.getpid()} on \S+ \(renewed \d+ s ago\)"
    said = rf"run_dir={run_dir}: {holder} is training in it; wait for it, or give another run_dir"
    assert re.fullmatch(said, str(refused.value))
    with RunFolder(run_dir):
        pass
    assert [path.name for path in held.path.iterdir()] == ["run.json"], "the lease is given back"


def test_a_run_dir_that_cannot_be_made_is_the_users_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run_dir="):
        RunFolder(str(tmp_path / "file" / "run"))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("checkpoints", Path.touch),
        ("checkpoints", os.mkfifo),
        ("checkpoints", lambda path: path.symlink_to("nowhere")),
        ("checkpoints-damaged", Path.touch),
        ("metrics.jsonl", Path.mkdir),
        ("metrics.jsonl", os.mkfifo),
        ("metrics.jsonl", lambda path: path.symlink_to("nowhere")),
        ("transcripts.jsonl", Path.mkdir),
        ("answers.jsonl", Path.mkdir),
        ("config.yml", Path.mkdir),
        (".lock", os.mkfifo),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_before_training(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)
    with pytest.raises(
        ConfigError, match=rf"run_dir=.*: {name} in it must be a (file|folder); move it away"
    ):
        RunFolder(str(tmp_path))


def test_links_to_files_and_folders_of_the_right_kind_are_fine(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/log").touch()
    (tmp_path / "run/metrics.jsonl").symlink_to(tmp_path / "elsewhere/log")
    with RunFolder(str(tmp_path / "run")):
        pass


def test_a_refused_start_removes_the_folder_that_it_made_and_no_other(tmp_path: Path) -> None:
    def refuse(content: str = "") -> None:
        with pytest.raises(ConfigError), RunFolder(str(tmp_path / "run")) as folder:
            if content:
                folder.write("config.yml", content)
            raise ConfigError("refused")

    refuse()
    assert not (tmp_path / "run").exists()
    refuse("steps: 1")
    refuse()
    assert (tmp_path / "run" / "config.yml").exists()


def test_a_run_has_a_random_id_from_its_first_start_on(tmp_path: Path) -> None:
    ids = []
    for name in ("run", "run", "other"):
        with RunFolder(str(tmp_path / name)) as folder:
            assert folder.identity is not None and not folder.identity.is_older
            ids.append(folder.identity.run_id)
    assert ids[0] == ids[1] != ids[2]
    assert (
        folder.identity.wrote(ids[2])
        and not folder.identity.wrote(ids[0])
        and not folder.identity.wrote(None)
    )


def test_a_run_made_before_there_were_ids_gets_one_and_keeps_its_states(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for _ in range(2):
        with RunFolder(str(tmp_path)) as folder:
            assert (
                folder.identity is not None
                and folder.identity.wrote(None)
                and not folder.identity.wrote("another")
            )


@pytest.mark.parametrize("content", [None, "{"])
def test_a_run_whose_id_is_lost_takes_the_one_that_its_newest_sound_checkpoint_holds(
    tmp_path: Path, content: str | None
) -> None:
    for step, name in ((3, "older"), (10, "newer"), (20, "damaged")):
        checkpoint = tmp_path / "checkpoints" / str(step) / "position"
        checkpoint.mkdir(parents=True)
        record = CheckpointRecord(
            Position(step, Place(8 * step)), {"data": {}, "model": {}}, 0, (1, 1), run_id=name
        )
        write_json(
            checkpoint / "metadata",
            record.to_json() | ({"run_id": "other"} if name == "damaged" else {}),
        )
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    for _ in range(2):
        with RunFolder(str(tmp_path)) as folder:
            assert folder.identity is not None and folder.identity.run_id == "newer"
            assert folder.identity.wrote(None)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": 3}', "null"])
def test_a_damaged_id_is_made_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with RunFolder(str(tmp_path)) as folder:
        assert folder.identity == read_identity(tmp_path)


def test_hosts_know_the_folder_of_the_first_one_from_another_at_the_same_path(
    tmp_path: Path,
) -> None:
    """Also from a copy of it, with the same id."""
    with RunFolder(str(tmp_path / "run")) as first:
        first.start_together()
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        started = first.start_together()
        assert RunFolder(str(tmp_path / "run"), writes=False).join(started, 0)
        for another in ("copy", "nowhere"):
            assert not RunFolder(str(tmp_path / another), writes=False).join(started, 0)
    assert not (tmp_path / "nowhere").exists()
