"""A checkpoint commits whole or not at all, and one that cannot be trusted is passed over, never
trained on.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import resource
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from maxbatch import ConfigError, load_config
from maxbatch.config.loading import dump_config
from maxbatch.parallel.mesh import make_mesh
from maxbatch.plan.place import Place
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.pretraining import train
from maxbatch.run.weights import shard_files
from maxbatch.run.weights.checkpoints import Checkpoints, Position, model_identity
from maxbatch.run.weights.parameters import open_parameters, open_source, restored
from maxbatch.system.errors import TrainingError
from maxbatch.update.state import TrainState, abstract_state, init_state
from tests.helpers.damage import flip_a_parameter
from tests.helpers.tiny import read_metrics, tiny_config

DATA = {"dataset_type": "synthetic", "data_shuffle_seed": 0}


class Saved:
    """Three checkpoints of one state, at steps 1, 2 and 3."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = tiny_config()
        self.abstract = abstract_state(
            self.config.update, make_mesh(self.config, jax.devices()[:1])
        )
        self.state = init_state(self.config.update, self.abstract)
        self.warnings: list[str] = []
        with self.open() as checkpoints:
            for step in (1, 2, 3):
                checkpoints.save(self.state, Position(step, Place(10 * step)))

    @contextmanager
    def open(self, data: dict[str, Any] = DATA, *overrides: str) -> Iterator[Checkpoints]:
        identity = {"data": data, "model": model_identity(tiny_config(*overrides).update)}
        checkpoints = Checkpoints(self.folder, 3, identity, self.warnings.append)
        yield checkpoints
        checkpoints.close()


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def saved(saved_once: Saved, tmp_path: Path) -> Saved:
    """A copy of its own for each test."""
    own = copy.copy(saved_once)
    own.folder, own.warnings = tmp_path / "run", []
    shutil.copytree(saved_once.folder, own.folder)
    return own


def newest_of(checkpoints: Checkpoints) -> tuple[Position, tuple[int, int]]:
    record = checkpoints.newest()
    assert record is not None
    return record.position, record.hosts


def assert_equal(a: TrainState, b: TrainState) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.runs
def test_restores_the_newest_onto_another_mesh(saved: Saved) -> None:
    mesh = make_mesh(tiny_config("ici_tensor_parallelism=2", "ici_data_parallelism=2"))
    abstract = abstract_state(saved.config.update, mesh)
    with saved.open() as checkpoints:
        assert newest_of(checkpoints) == (Position(3, Place(30)), (1, 1))
        restored = checkpoints.restore(abstract)
    assert restored is not None and restored.position == Position(3, Place(30))
    assert_equal(restored.state, saved.state)
    for leaf, planned in zip(
        jax.tree.leaves(restored.state), jax.tree.leaves(abstract), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)


def cut_in_half(step: Path) -> None:
    for file in [p for p in (step / "params").rglob("*") if p.is_file()]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_the_parameters(step: Path) -> None:
    for file in (step / "params").glob("*.bin"):
        file.unlink()


def lose_the_position(step: Path) -> None:
    (step / "position" / "metadata").unlink()


def garble_the_position(step: Path) -> None:
    (step / "position" / "metadata").write_text('{"position": 3}')


def flip_the_samples(step: Path) -> None:
    change_the_position(step, lambda saved: saved["position"].update(samples_seen=50))


def other_samples_than_the_metrics(step: Path) -> None:
    """As a version wrote it whose JSON had no checksum."""
    change_the_position(
        step, lambda saved: (saved.pop("json_checksum"), saved["position"].update(samples_seen=50))
    )
    line = {
        "step": 3,
        "samples_seen": 30,
        "tokens_seen": 960,
        "global_batch_size": 10,
        "stage": 0,
        "loss": 1.0,
    }
    (step.parent.parent / "metrics.jsonl").write_text(
        json.dumps(line | {"learning_rate": 0.1}) + "\n"
    )


def name_it_anew(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.with_name("1"), step)


def change_the_position(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = step / "position" / "metadata"
    saved = json.loads(path.read_text())
    change(saved)
    path.write_text(json.dumps(saved))


def lose_everything(step: Path) -> None:
    for file in [p for p in step.rglob("*") if p.is_file()]:
        file.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_parameter,
        cut_in_half,
        lose_the_parameters,
        lose_the_position,
        garble_the_position,
        flip_the_samples,
        other_samples_than_the_metrics,
        name_it_anew,
        lose_everything,
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    saved: Saved, damage: Callable[[Path], None]
) -> None:
    damage(saved.folder / "checkpoints" / "3")
    with saved.open() as checkpoints:
        assert newest_of(checkpoints) in (
            (Position(2, Place(20)), (1, 1)),
            (Position(3, Place(30)), (1, 1)),
        )
        restored = checkpoints.restore(saved.abstract)
        assert restored is not None and restored.position == Position(2, Place(20))
        assert_equal(restored.state, saved.state)
        # nothing blocks the same step's next save
        checkpoints.save(restored.state, Position(3, Place(30)))
    (warning,) = saved.warnings
    assert "checkpoint 3" in warning and "checkpoints-damaged" in warning
    assert (saved.folder / "checkpoints-damaged" / "3").is_dir(), "set aside, not deleted"
    with saved.open() as checkpoints:
        assert newest_of(checkpoints) == (Position(3, Place(30)), (1, 1))


def change_the_index(index: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes an index and states its checksum anew."""
    content = json.loads(index.read_text())
    content.pop("checksum")
    change(content)
    index.write_text(json.dumps(content | {"checksum": shard_files._checksum(content)}))


def first_block(content: dict[str, Any]) -> list[Any]:
    block: list[Any] = next(iter(content["files"].values()))[0]
    return block


@pytest.mark.parametrize(
    "change",
    [
        lambda content: first_block(content).__setitem__(0, "0:x"),
        lambda content: first_block(content).__setitem__(0, "0:0-99999,0-99999"),
        lambda content: first_block(content).__setitem__(0, "-1:0-1"),
        lambda content: first_block(content).__setitem__(0, "999:0-1"),
        lambda content: first_block(content).__setitem__(0, 7),
        lambda content: first_block(content).__setitem__(1, "a text"),
        lambda content: first_block(content).__setitem__(1, -8),
        lambda content: first_block(content).__setitem__(1, 1 << 80),
        lambda content: first_block(content).__setitem__(2, None),
        lambda content: first_block(content).append(1),
        lambda content: content["arrays"][0].__setitem__(0, ["a", "list"]),
        lambda content: content["arrays"][0].__setitem__(1, "a text"),
        lambda content: content["arrays"][0].__setitem__(1, [-1, 4]),
        lambda content: content["arrays"][0].__setitem__(2, "no-such-type"),
        lambda content: content["arrays"][0].__setitem__(2, 3),
        lambda content: content["files"].update({"../../x.bin": content["files"].popitem()[1]}),
        lambda content: content.update(files=[]),
        lambda content: content.update(arrays={"a": 1}),
    ],
)
def test_an_index_with_a_right_checksum_and_wrong_fields_is_damaged(
    saved: Saved, change: Callable[[dict[str, Any]], object]
) -> None:
    change_the_index(saved.folder / "checkpoints" / "3" / "params" / "index.json", change)
    with pytest.raises(ConfigError, match="3: is damaged"):
        read_parameters(saved)
    with saved.open() as checkpoints:
        restored = checkpoints.restore(saved.abstract)
    assert restored is not None and restored.position == Position(2, Place(20))
    assert len(saved.warnings) == 1


def test_a_damaged_checkpoint_on_another_disk_is_set_aside_on_that_disk(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = saved.folder.with_name("another disk")
    (saved.folder / "checkpoints").rename(elsewhere)
    (saved.folder / "checkpoints").symlink_to(elsewhere)
    rename = Path.rename

    def within_a_disk(path: Path, target: Path) -> Path:
        if path.parent.resolve() != Path(target).parent.resolve():
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", within_a_disk)
    cut_in_half(elsewhere / "3")
    with saved.open() as checkpoints:
        restored = checkpoints.restore(saved.abstract)
        assert restored is not None and restored.position.step == 2
        checkpoints.save(restored.state, Position(3, Place(30)))
    (warning,) = saved.warnings
    assert (
        f"moved to {saved.folder}/checkpoints/damaged-3" in warning
        and (elsewhere / "damaged-3").is_dir()
    )
    assert committed_steps(saved.folder) == [3, 2, 1]


def test_a_checkpoint_that_its_run_removes_while_it_is_read_gives_way_to_the_newest(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved.folder / "config.yml").write_text(dump_config(saved.config))
    run, named = open_source(saved.folder), open_source(saved.folder / "checkpoints" / "3")
    (saved.folder / "checkpoints" / "3").rename(saved.folder / "checkpoints" / ".building-removed")
    _, params = restored(run, saved.config.decoder)
    assert_equal(params, saved.state.params)
    assert f"{saved.folder}/checkpoints/2 is read instead" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="3: its run removed it while it was read"):
        restored(named, saved.config.decoder)


def test_where_every_checkpoint_is_damaged_there_is_none(saved: Saved) -> None:
    for step in "123":
        cut_in_half(saved.folder / "checkpoints" / step)
    with saved.open() as checkpoints:
        assert checkpoints.restore(saved.abstract) is None
    assert len(saved.warnings) == 3


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("reads", ["read_range", "file_sizes"])
def test_what_the_system_does_not_let_be_read_is_not_called_damaged(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, code: int, reads: str
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shard_files, reads, refuse)
    with saved.open() as checkpoints, pytest.raises(ConfigError) as error:
        checkpoints.restore(saved.abstract)
    assert (
        str(error.value)
        == f"{saved.folder / 'checkpoints' / '3'}: cannot be read ({os.strerror(code)})"
    )
    assert not saved.warnings and not (saved.folder / "checkpoints-damaged").exists()


def test_an_optimizer_with_other_arrays_is_refused_and_moves_nothing(saved: Saved) -> None:
    other = tiny_config("opt_type=adafactor", "adam_b1=0")
    abstract = abstract_state(other.update, make_mesh(other, jax.devices()[:1]))
    with (
        saved.open() as checkpoints,
        pytest.raises(ConfigError, match="no checkpoint has the arrays of this"),
    ):
        checkpoints.restore(abstract)
    assert not saved.warnings and not (saved.folder / "checkpoints-damaged").exists()


def read_parameters(saved: Saved, shapes: nnx.State | None = None) -> nnx.State:
    shapes = saved.abstract.params if shapes is None else shapes
    return open_parameters(open_source(saved.folder), saved.config.model, shapes)(shapes)


@pytest.mark.parametrize(
    "name", ["q[1]", "lr=[0.1]", "a]b", "back\\slash", "*", "q?", "gs:", "{0} %20 #1 ~ 'ä'"]
)
def test_any_name_of_a_folder_saves_and_restores(saved: Saved, tmp_path: Path, name: str) -> None:
    saved.folder = tmp_path / name / "run"
    saved.folder.mkdir(parents=True)
    with saved.open() as checkpoints:
        checkpoints.save(saved.state, Position(4, Place(40)))
    with saved.open() as checkpoints:
        restored = checkpoints.restore(saved.abstract)
        assert checkpoints.has(4) and not checkpoints.has(3)
    assert (
        restored is not None and restored.position == Position(4, Place(40)) and not saved.warnings
    )
    assert_equal(restored.state, saved.state)
    assert [path.name for path in (saved.folder / "checkpoints").iterdir()] == ["4"]
    read_parameters(saved)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writing more raises EFBIG, as a full disk raises ENOSPC."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("closes", [True, False])
def test_a_disk_that_is_full_during_a_save_is_one_error(
    saved: Saved, capfd: pytest.CaptureFixture[str], closes: bool
) -> None:
    capfd.readouterr()
    refused = pytest.raises(ConfigError, match=r"checkpoints: cannot be written \(File too large\)")
    with refused, saved.open() as checkpoints, files_of_at_most(8000):
        checkpoints.save(saved.state, Position(4, Place(40)))
        if closes:
            checkpoints.close()
        checkpoints.save(saved.state, Position(5, Place(50)))
    assert "Traceback" not in capfd.readouterr().err
    with saved.open() as checkpoints:
        assert newest_of(checkpoints) == (Position(3, Place(30)), (1, 1))
        checkpoints.save(saved.state, Position(4, Place(40)))  # with room again it goes on
    with saved.open() as checkpoints:
        assert newest_of(checkpoints) == (Position(4, Place(40)), (1, 1))
    assert {path.name for path in (saved.folder / "checkpoints").iterdir()} == {"2", "3", "4"}


def test_a_full_disk_says_so_and_leaves_nothing(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shard_files, "write_parts", refuse)
    with saved.open() as checkpoints:
        checkpoints.newest()
        checkpoints.save(saved.state, Position(4, Place(40)))
        with pytest.raises(TrainingError, match="checkpoints: no space left on the disk"):
            checkpoints.close()
        assert checkpoints.fate == "step 3 is saved"
    assert {path.name for path in (saved.folder / "checkpoints").iterdir()} == {"1", "2", "3"}


def test_a_half_written_checkpoint_does_not_count_and_the_next_start_removes_it(
    saved: Saved,
) -> None:
    half = saved.folder / "checkpoints" / ".building-0a1b2c3d-4" / "params"
    half.mkdir(parents=True)
    (half / "part").write_text("half")
    with saved.open() as checkpoints:
        assert newest_of(checkpoints) == (Position(3, Place(30)), (1, 1))
        restored = checkpoints.restore(saved.abstract)
    assert restored is not None and restored.position.step == 3 and not saved.warnings
    assert {path.name for path in (saved.folder / "checkpoints").iterdir()} == {"1", "2", "3"}


def test_a_save_waits_for_no_file(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on, write = threading.Event(), threading.Event(), shard_files.write_parts

    def wait_and_write(*args: Any) -> None:
        begun.set()
        assert may_go_on.wait(60)
        write(*args)

    monkeypatch.setattr(shard_files, "write_parts", wait_and_write)
    with saved.open() as checkpoints:
        checkpoints.newest()
        checkpoints.save(saved.state, Position(4, Place(40)))
        assert begun.wait(60) and checkpoints.has(4) and committed_steps(saved.folder) == [3, 2, 1]
        assert checkpoints.fate == "step 3 is saved, and perhaps step 4"
        may_go_on.set()
        checkpoints.close()
        assert checkpoints.fate == "step 4 is saved" and committed_steps(saved.folder) == [4, 3, 2]


@pytest.mark.parametrize(
    ("data", "overrides", "names"),
    [
        ({**DATA, "data_shuffle_seed": 1}, (), ["data_shuffle_seed", "0", "1"]),
        (
            {"dataset_type": "text", "content": "abc"},
            (),
            ["dataset_type", "content", "data_shuffle_seed"],
        ),
        (DATA, ("base_emb_dim=64", "vocab_size=300"), ["base_emb_dim", "32", "64", "vocab_size"]),
        (DATA, ("opt_type=lion",), ["opt_type", "adamw", "lion"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_differing_keys(
    saved: Saved, data: dict[str, Any], overrides: tuple[str, ...], names: list[str]
) -> None:
    with saved.open(data, *overrides) as checkpoints, pytest.raises(ConfigError) as error:
        checkpoints.newest()
    assert all(name in str(error.value) for name in names) and "\n" not in str(error.value)


def test_only_the_newest_are_kept(saved: Saved) -> None:
    with saved.open() as checkpoints:
        checkpoints.save(saved.state, Position(4, Place(40)))
    assert sorted(p.name for p in (saved.folder / "checkpoints").iterdir()) == ["2", "3", "4"]


def test_the_position_is_exact_beyond_32_bits(saved: Saved) -> None:
    with saved.open() as checkpoints:
        checkpoints.save(saved.state, Position(4, Place(2**53 + 1)))
    with saved.open() as checkpoints:
        assert newest_of(checkpoints) == (Position(4, Place(2**53 + 1)), (1, 1))
    record = json.loads((saved.folder / "checkpoints" / "4" / "position" / "metadata").read_text())
    assert record["position"]["samples_seen"] == 2**53 + 1


def test_parameters_alone_start_another_run(saved: Saved) -> None:
    params = read_parameters(saved)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(saved.state.params), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ConfigError, match="no checkpoint here"):
        open_source(saved.folder / "checkpoints")
    wider = abstract_state(
        tiny_config("base_emb_dim=64").update, make_mesh(saved.config, jax.devices()[:1])
    )
    with pytest.raises(ConfigError, match="do not fit"):
        read_parameters(saved, wider.params)


@pytest.mark.parametrize(
    "place", ["run/checkpoints/4/items", "run/checkpoints/4", "run/checkpoints", "run"]
)
def test_a_checkpoint_in_maxtexts_form_without_arrays_is_one_line(
    tmp_path: Path, place: str
) -> None:
    items = tmp_path / "run" / "checkpoints" / "4" / "items"
    items.mkdir(parents=True)
    (items / "_METADATA").write_text("{}")
    with pytest.raises(
        ConfigError, match="items/_METADATA does not list the arrays of a checkpoint"
    ):
        open_source(tmp_path / place)


def test_a_run_of_0_5_0_resumes_and_ends_as_that_version_did(tmp_path: Path) -> None:
    """The archive was made by maxbatch 0.5.0.

    maxbatch train run_dir=run steps=8 checkpoint_period=4 enable_rampup_batch_size=true
    per_device_batch_size=4 per_device_batch_size_start=2 per_device_batch_size_increment=1
    global_rampup_samples=12 gradient_accumulation_steps=2 and the smallest model (the rest is in
    its config.yml), on one CPU device. `uninterrupted.jsonl` is its metrics.jsonl; `run` is its
    folder as if it was killed after update 6.
    """
    with tarfile.open(Path(__file__).parents[1] / "data" / "run_of_0_5_0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert "attention_output_dim: -1\n" in (tmp_path / "run" / "config.yml").read_text(), (
        "a former key"
    )
    config = load_config(tmp_path / "run" / "config.yml", [f"run_dir={tmp_path / 'run'}"])
    outcome = train(config, jax.devices()[:1])
    assert outcome.position.step == 8 and not (tmp_path / "run" / "checkpoints-damaged").exists()
    ours = read_metrics(tmp_path / "run")
    theirs = [
        json.loads(line) for line in (tmp_path / "uninterrupted.jsonl").read_text().splitlines()
    ]
    for mine, their in zip(ours, theirs, strict=True):
        for key in (
            "step",
            "samples_seen",
            "tokens_seen",
            "global_batch_size",
            "stage",
            "data_fingerprint",
        ):
            assert mine[key] == their[key], (mine["step"], key)
        for key in ("loss", "learning_rate", "grad_norm"):
            assert mine[key] == pytest.approx(their[key], rel=1e-5), (mine["step"], key)


def test_a_checkpoint_that_hashed_a_part_of_a_store_is_of_maxbatch_0_5_0(saved: Saved) -> None:
    hashed = {**DATA, "all tokens": "1", "source 1: all tokens": "2"}
    with saved.open(hashed) as checkpoints:
        with pytest.raises(ConfigError, match=r"maxbatch==0\.5\.0 still reads it"):
            checkpoints.newest()
        checkpoints.save(saved.state, Position(4, Place(40)))
    with (
        saved.open(hashed | {"all tokens": "3"}) as checkpoints,
        pytest.raises(ConfigError, match="all tokens: '1' there"),
    ):
        checkpoints.newest()
