"""The checkpoints before the newest spikes are kept beside the newest, on a disk and in a store."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import jax
import pytest

from maxbatch.parallel.mesh import make_mesh
from maxbatch.plan.place import Place
from maxbatch.run.folder.position import BestEval, Position, Spikes, committed_steps
from maxbatch.run.weights.checkpoints import Checkpoints, model_identity
from maxbatch.system.storage.storage import AnyPath, as_path
from maxbatch.update.state import TrainState, abstract_state, init_state
from tests.helpers.stores import Store, on
from tests.helpers.tiny import one_layer_config

CONFIG = one_layer_config()


@pytest.fixture(scope="module")
def state() -> TrainState:
    mesh = make_mesh(CONFIG, jax.devices()[:1])
    return init_state(CONFIG.update, abstract_state(CONFIG.update, mesh))


def save(folder: AnyPath, state: TrainState, *steps: int, spikes: tuple[int, ...]) -> list[int]:
    """Saves steps in one start of a run that has met spikes; returns the steps that are kept."""
    identity = {"data": {}, "model": model_identity(CONFIG.update)}
    checkpoints = Checkpoints(folder, 1, identity, pytest.fail, keeps_best=True)
    with closing(checkpoints):
        for step in steps:
            met = Spikes()
            for spike in spikes:
                met = met.skipped(spike) if spike <= step else met
            best = BestEval(1.0, 10)
            checkpoints.save(state, Position(step, Place(step), best_eval=best, spikes=met))
    return committed_steps(folder)


def test_the_checkpoints_before_the_newest_three_spikes_are_kept_beside_the_newest_and_the_best(
    state: TrainState, tmp_path: Path
) -> None:
    assert save(tmp_path, state, 10, 20, 30, 40, spikes=(25, 40)) == [40, 30, 20, 10]
    # A later start knows of them from its position; step 60 is itself a spike, 61 is another.
    assert save(tmp_path, state, 50, 60, 70, spikes=(25, 40, 60, 61)) == [70, 60, 50, 30, 10]


def test_without_a_spike_only_the_newest_and_the_best_are_kept(
    state: TrainState, tmp_path: Path
) -> None:
    assert save(tmp_path, state, 10, 20, 30, spikes=()) == [30, 10]


@on("s3")
def test_a_store_keeps_them_as_a_disk_does(state: TrainState, store: Store) -> None:
    run_dir = as_path(store.bucket() + "/run")
    assert save(run_dir, state, 10, 20, 30, 40, spikes=(25,)) == [40, 20, 10]
