"""A damaged checkpoint never gives a wrong answer: readers name it, and a resume names the older
one it uses.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch import ConfigError
from maxbatch.cli import main
from maxbatch.parallel.mesh import make_mesh
from maxbatch.plan.place import Place
from maxbatch.run.folder.position import CheckpointRecord, read_record
from maxbatch.run.pretraining import train
from maxbatch.run.weights.checkpoint_reading import StoredCheckpoint
from maxbatch.run.weights.checkpoints import Checkpoints, Position
from maxbatch.run.weights.checksums import array_checksums, warn_of_no_checksums
from maxbatch.run.weights.parameters import open_parameters, open_source
from maxbatch.system.errors import DivergedError
from maxbatch.update.state import TrainState, abstract_state
from tests.helpers.damage import flip_a_parameter
from tests.helpers.parameters import load_parameters
from tests.helpers.tiny import one_layer_config, read_metrics

ONE = jax.devices()[:1]


class Trained:
    """A run with checkpoints of steps 2, 4 and 6."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = one_layer_config(f"run_dir={folder}", "steps=6", "checkpoint_period=2")
        self.abstract = abstract_state(self.config.update, make_mesh(self.config, ONE))
        if not folder.exists():
            train(self.config, ONE)

    def copy(self, to: Path) -> Trained:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.folder, to)
        return Trained(to)

    @property
    def newest(self) -> Path:
        return self.folder / "checkpoints" / "6"

    def record(self, step: int = 6) -> CheckpointRecord:
        return read_record(self.folder / "checkpoints" / str(step))

    def state(self, step: int = 6) -> TrainState:
        return StoredCheckpoint(self.folder / "checkpoints" / str(step)).full_state(self.abstract)

    def open(self, warn: Callable[[str], Any] = print) -> closing[Checkpoints]:
        return closing(Checkpoints(self.folder, 9, self.record(2).identity, warn))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def run(trained: Trained, tmp_path: Path) -> Trained:
    return trained.copy(tmp_path / "run")


def same(a: Any, b: Any) -> bool:
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def put_in_the_parameters_of(step: int, checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "params")
    shutil.copytree(checkpoint.with_name(str(step)) / "params", checkpoint / "params")


def lose_the_parameters(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "params")


def damage(checkpoint: Path, rng: random.Random) -> None:
    """Flips, cuts, doubles, swaps, removes or replaces one file of a checkpoint."""
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file())
    file, other = rng.choice(files), rng.choice(files)
    kind = rng.choice(
        ("flip", "flip", "cut", "double", "swap", "copy", "delete", "folder", "older")
    )
    if kind in ("flip", "cut"):  # one that has content
        file = rng.choice([path for path in files if path.stat().st_size])
    content, others = file.read_bytes(), other.read_bytes()
    if kind == "flip":
        place = rng.randrange(8 * len(content))
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        file.write_bytes(changed)
    elif kind == "cut":
        file.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "double":
        file.write_bytes(content * 2)
    elif kind in ("swap", "copy"):
        file.write_bytes(others)
        other.write_bytes(content if kind == "swap" else others)
    elif kind == "older":
        item = rng.choice(("params", "opt_state", "position"))
        shutil.rmtree(checkpoint / item)
        shutil.copytree(checkpoint.with_name("4") / item, checkpoint / item)
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()


@pytest.mark.runs
@pytest.mark.parametrize("seed", range(3))
def test_no_damage_to_any_file_gives_a_wrong_answer(
    trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str], seed: int
) -> None:
    rng, whole = random.Random(seed), {step: trained.state(step) for step in (6, 4)}
    refused = 0
    # Some files are held twice, and their names are random: only the first damage is sure to be
    # met.
    for do_damage in (lambda checkpoint, _: flip_a_parameter(checkpoint), *[damage] * 7):
        run, warnings = trained.copy(tmp_path / "damaged"), list[str]()
        do_damage(run.newest, rng)
        for read in (lambda run: load_parameters(run.folder)[2], lambda run: run.state().params):
            try:
                assert same(read(run), whole[6].params)
            except ConfigError as error:
                refused += 1
                assert "checkpoints/6" in str(error) and "\n" not in str(error)
        with run.open(warnings.append) as checkpoints:
            restored = checkpoints.restore(run.abstract)
        assert restored is not None and same(restored.state, whole[restored.position.step])
        assert (restored.position.step == 6) == (not warnings)
    assert refused
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.runs
@pytest.mark.parametrize(
    "change",
    [flip_a_parameter, lose_the_parameters, lambda folder: put_in_the_parameters_of(4, folder)],
)
def test_a_command_names_the_damaged_checkpoint_and_takes_no_other(
    run: Trained, capfd: pytest.CaptureFixture[str], change: Callable[[Path], None]
) -> None:
    change(run.newest)
    Path("a.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    model = str(run.folder)
    another = ("generate_prompt=", "run_dir=another", "steps=1")
    for words in (
        ("score", model, "a.jsonl"),
        ("generate", model, "--max-new-tokens", "1"),
        ("export", model, "--output", "exported"),
        ("train", str(run.folder / "config.yml"), f"load_parameters_path={model}", *another),
        ("train", str(run.folder / "config.yml"), f"load_full_state_path={model}", *another),
    ):
        capfd.readouterr()
        assert main([*words]) == 2, words
        out, err = capfd.readouterr()
        errors = [line for line in err.splitlines() if not line.startswith("maxbatch: warning")]
        assert len(errors) == 1 and f"{run.newest}: is damaged (" in errors[0], words
        assert words[0] == "train" or not out
    assert not (Path("exported") / "config.json").exists()


def test_a_resume_notices_the_parameters_of_another_step(run: Trained) -> None:
    put_in_the_parameters_of(4, run.newest)
    warnings: list[str] = []
    with run.open(warnings.append) as checkpoints:
        restored = checkpoints.restore(run.abstract)
    assert restored is not None and restored.position.step == 4
    (warning,) = warnings
    assert "checkpoint 6 cannot be read" in warning and "does not match its checksum" in warning


def made_before_checksums(run: Trained) -> None:
    """Rewrites the JSON as that of a version without checksums of parameters and of the JSON."""
    path = run.newest / "position" / "metadata"
    saved = json.loads(path.read_text())
    kept = ("position", "identity", "checksum", "hosts")
    path.write_text(json.dumps({name: saved[name] for name in kept} | {"checksum": 7}))


def test_a_checkpoint_without_checksums_of_parameters_is_read_with_one_warning_and_resumes(
    run: Trained, trained: Trained, capfd: pytest.CaptureFixture[str]
) -> None:
    made_before_checksums(run)
    capfd.readouterr()
    shapes = run.abstract.params
    read = open_parameters(open_source(run.folder), run.config.model, shapes)
    for _ in range(2):
        assert same(read(shapes), trained.state().params)
    assert capfd.readouterr().err.count("was made before parameters had checksums") == 1
    warn_of_no_checksums.cache_clear()
    with run.open(pytest.fail) as checkpoints:
        restored = checkpoints.restore(run.abstract)
    assert restored is not None and same(restored.state, trained.state())
    assert capfd.readouterr().err.count("was made before parameters had checksums") == 1
    flip_a_parameter(run.newest)
    with run.open() as checkpoints:
        restored = checkpoints.restore(run.abstract)
    assert restored is not None and restored.position.step == 4, "blocks have checksums"


def test_parameters_of_another_type_are_checked_before_they_are_rounded(
    run: Trained, trained: Trained
) -> None:
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trained.state().params)
    assert same(load_parameters(run.folder, ["weight_dtype=bfloat16"])[2], rounded)
    flip_a_parameter(run.newest)
    with pytest.raises(ConfigError, match="is damaged"):
        load_parameters(run.folder, ["weight_dtype=bfloat16"])


def test_a_config_that_contradicts_the_checkpoint_is_refused(run: Trained) -> None:
    file = run.folder / "config.yml"
    lines = [
        line for line in file.read_text().splitlines() if not line.startswith("rope_max_timescale")
    ]
    file.write_text("\n".join([*lines, "rope_max_timescale: 20000"]) + "\n")
    with pytest.raises(ConfigError, match=r"config\.yml: states rope_max_timescale=20000.* 10000"):
        load_parameters(run.folder)


def test_checksums_do_not_depend_on_the_mesh(trained: Trained) -> None:
    state = trained.state()
    found = array_checksums(state)
    for devices, tensor in ((8, 1), (4, 2), (2, 2)):
        mesh = make_mesh(
            one_layer_config(f"ici_tensor_parallelism={tensor}"), jax.devices()[:devices]
        )
        places = abstract_state(trained.config.update, mesh)
        moved = jax.tree.map(
            lambda x, place: jax.device_put(np.asarray(x), place.sharding), state, places
        )
        np.testing.assert_array_equal(array_checksums(moved), found)


def test_every_word_and_its_place_change_a_checksum() -> None:
    for dtype in (np.float32, np.int32, np.int8, jnp.bfloat16):
        x = np.random.default_rng(1).integers(-100, 100, (2, 64, 64)).astype(dtype)
        changed, swapped = x.copy(), x[::-1].copy()
        changed[1, 2, 3] += 1
        others = (changed, swapped, x.swapaxes(1, 2), x.reshape(64, 2, 64), np.roll(x, 1, axis=1))
        sums = [int(array_checksums([jnp.asarray(y)])[0]) for y in (x, *others)]
        assert len(set(sums)) == len(sums), dtype


def test_a_score_and_a_run_without_a_finite_value_fail(
    run: Trained, capfd: pytest.CaptureFixture[str]
) -> None:
    state = run.state()
    nan = state._replace(params=jax.tree.map(lambda x: x * np.float32("nan"), state.params))
    with run.open() as checkpoints:
        checkpoints.save(nan, Position(8, Place(128)))
    Path("a.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    capfd.readouterr()
    assert (
        main(
            [
                "score",
                str(run.folder),
                "a.jsonl",
                "--json",
                "ici_fsdp_parallelism=1",
                "ici_data_parallelism=-1",
            ]
        )
        == 1
    )
    out, err = capfd.readouterr()
    assert json.loads(out)["exit_code"] == 1 and len(err.splitlines()) == 1 and "finite" in err
    other = one_layer_config("run_dir=other", "steps=2", f"load_parameters_path={run.folder}")
    for _ in range(2):  # also where the run is complete
        with pytest.raises(DivergedError, match="other: none of its 2 updates changed the par"):
            train(other, ONE)
    assert [record["loss"] for record in read_metrics("other")] == [None, None]
