"""A checkpoint commits whole or not at all, and one that cannot be trusted is passed over, never trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxbatch import ConfigError
from maxbatch.parallel.mesh import make_mesh
from maxbatch.training.checkpoints import Checkpoints, Position, model_identity, restore_parameters
from maxbatch.training.state import TrainState, abstract_state, init_state
from tests.helpers.tiny import tiny_config

DATA = {"dataset_type": "synthetic", "data_shuffle_seed": 0}


class Saved:
    """Three checkpoints of one state, at steps 1, 2 and 3."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = tiny_config()
        self.abstract = abstract_state(self.config, make_mesh(self.config, jax.devices()[:1]))
        self.state = init_state(self.config, self.abstract)
        self.warnings: list[str] = []
        with self.open() as checkpoints:
            for step in (1, 2, 3):
                checkpoints.save(self.state, Position(step, 10 * step))

    @contextmanager
    def open(self, data: dict[str, Any] = DATA, *overrides: str) -> Iterator[Checkpoints]:
        identity = {"data": data, "model": model_identity(tiny_config(*overrides))}
        checkpoints = Checkpoints(self.folder, 3, identity, self.warnings.append)
        yield checkpoints
        checkpoints.close()


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def assert_equal(a: TrainState, b: TrainState) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_restores_the_newest_onto_another_mesh(saved: Saved) -> None:
    mesh = make_mesh(tiny_config("ici_tensor_parallelism=2", "ici_data_parallelism=2"))
    abstract = abstract_state(saved.config, mesh)
    with saved.open() as checkpoints:
        assert checkpoints.newest() == (Position(3, 30), (1, 1))
        restored = checkpoints.restore(abstract)
    assert restored is not None and restored.position == Position(3, 30)
    assert_equal(restored.state, saved.state)
    for leaf, planned in zip(jax.tree.leaves(restored.state), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)


def flip_a_bit(step: Path) -> None:
    file = largest_file(step / "params")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut_in_half(step: Path) -> None:
    for file in [p for p in (step / "params").rglob("*") if p.is_file()]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_the_parameters(step: Path) -> None:
    shutil.rmtree(step / "params" / "d")


def lose_the_position(step: Path) -> None:
    (step / "position" / "metadata").unlink()


def garble_the_position(step: Path) -> None:
    (step / "position" / "metadata").write_text('{"position": 3}')


def lose_everything(step: Path) -> None:
    for file in [p for p in step.rglob("*") if p.is_file()]:
        file.unlink()


@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, cut_in_half, lose_the_parameters, lose_the_position, garble_the_position, lose_everything],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    saved: Saved, damage: Callable[[Path], None]
) -> None:
    damage(saved.folder / "checkpoints" / "3")
    with saved.open() as checkpoints:
        restored = checkpoints.restore(saved.abstract)
        assert restored is not None and restored.position == Position(2, 20)
        assert_equal(restored.state, saved.state)
        checkpoints.save(restored.state, Position(3, 30))  # nothing blocks the same step's next save
    (warning,) = saved.warnings
    assert "checkpoint 3" in warning and "checkpoints-damaged" in warning
    assert (saved.folder / "checkpoints-damaged" / "3").is_dir(), "set aside, not deleted"
    with saved.open() as checkpoints:
        assert checkpoints.newest() == (Position(3, 30), (1, 1))


def test_where_every_checkpoint_is_damaged_there_is_none(saved: Saved) -> None:
    for step in "123":
        cut_in_half(saved.folder / "checkpoints" / step)
    with saved.open() as checkpoints:
        assert checkpoints.restore(saved.abstract) is None
    assert len(saved.warnings) == 3


def test_a_half_written_checkpoint_does_not_count(saved: Saved) -> None:
    unfinished = saved.folder / "checkpoints" / "4.orbax-checkpoint-tmp" / "params"
    unfinished.mkdir(parents=True)
    (unfinished / "part").write_text("half")
    with saved.open() as checkpoints:
        assert checkpoints.newest() == (Position(3, 30), (1, 1))
        restored = checkpoints.restore(saved.abstract)
    assert restored is not None and restored.position.step == 3 and not saved.warnings


@pytest.mark.parametrize(
    ("data", "overrides", "names"),
    [
        ({**DATA, "data_shuffle_seed": 1}, (), ["data_shuffle_seed", "0", "1"]),
        ({"dataset_type": "text", "content": "abc"}, (), ["dataset_type", "content", "data_shuffle_seed"]),
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
        checkpoints.save(saved.state, Position(4, 40))
    assert sorted(p.name for p in (saved.folder / "checkpoints").iterdir()) == ["2", "3", "4"]


def test_the_position_is_exact_beyond_32_bits(saved: Saved) -> None:
    with saved.open() as checkpoints:
        checkpoints.save(saved.state, Position(4, 2**53 + 1))
    with saved.open() as checkpoints:
        assert checkpoints.newest() == (Position(4, 2**53 + 1), (1, 1))
    record = json.loads((saved.folder / "checkpoints" / "4" / "position" / "metadata").read_text())
    assert record["position"]["samples_seen"] == 2**53 + 1


def test_parameters_alone_start_another_run(saved: Saved) -> None:
    params = restore_parameters(saved.folder, saved.abstract.params)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(saved.state.params), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ConfigError, match="no checkpoint here"):
        restore_parameters(saved.folder / "nothing", saved.abstract.params)
    wider = abstract_state(tiny_config("base_emb_dim=64"), make_mesh(saved.config, jax.devices()[:1]))
    with pytest.raises(ConfigError, match="do not fit"):
        restore_parameters(saved.folder, wider.params)
