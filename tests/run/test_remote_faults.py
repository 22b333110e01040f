"""Store faults during a run: one line, bounded time, and the same command resumes."""

from __future__ import annotations

import signal
import time
from typing import Any

import jax
import pytest

from maxbatch.parallel.mesh import make_mesh
from maxbatch.plan.place import Place
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.pretraining import train
from maxbatch.run.weights.checkpoints import Checkpoints, Position, model_identity
from maxbatch.system.errors import StoreFailed
from maxbatch.system.storage.patience import Patience
from maxbatch.system.storage.storage import as_path
from maxbatch.update.state import abstract_state, init_state
from tests.helpers.command import maxbatch, start
from tests.helpers.processes import wait_for
from tests.helpers.stores import Store
from tests.helpers.tiny import assert_same_run, tiny_config
from tests.run.test_remote_runs import RAMPED, records


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What the command records on a disk."""
    run_dir = tmp_path_factory.mktemp("faults") / "run"
    train(tiny_config(*RAMPED, f"run_dir={run_dir}"), jax.devices()[:1])
    return records(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "fault", "said"),
    [  # each on one store: every driver's answers are in tests/system/storage/test_storage.py
        ("gs", {"full_after_bytes": 400_000, "full_status": 507}, "is full; free some space"),
        ("s3", {"full_after_bytes": 400_000, "full_status": 403}, "no permission in bucket"),
        ("s3", {"denied": r"^(PUT|POST) .*checkpoints/3/position"}, "no permission in bucket"),
        ("gs", {"denied": r"^(PUT|POST) .*checkpoints/3/params"}, "no permission in bucket"),
        ("s3", {"denied": r"^(PUT|POST) .*checkpoints/6"}, "no permission in bucket"),
    ],
    indirect=["store"],
)
def test_a_bucket_that_fills_up_or_is_closed_ends_the_run_in_one_line_and_mended_it_goes_on(
    store: Store, fault: dict, said: str, expected: list[dict]
) -> None:
    keys = [*RAMPED, f"run_dir={store.bucket()}/run"]
    with store.failing(**fault):
        started = time.monotonic()
        ended = maxbatch("train", *keys)
        assert ended.returncode == 1 and time.monotonic() - started < 60, ended.stderr
    lines = ended.stderr.splitlines()
    assert (
        lines[0].startswith("maxbatch: warning: the run ends inside its ramp") and len(lines) == 2
    ), ended.stderr
    saved = committed_steps(as_path(keys[-1].removeprefix("run_dir=")))
    fate = f"step {saved[0]} is saved" if saved else "nothing is saved"
    assert lines[1].startswith("maxbatch: error") and said in lines[1] and fate in lines[1], (
        ended.stderr
    )
    train(tiny_config(*keys), jax.devices()[:1])
    assert_same_run(records(as_path(keys[-1].removeprefix("run_dir="))), expected)


# No client tries again what is answered so, as if it had tried for as long as it does: the bound is
# the house's alone.
CLIENTS_GAVE_UP = ("425",)


class Saving:
    """Checkpoints of a state in a store."""

    def __init__(self, run_dir: str) -> None:
        config = tiny_config("base_num_decoder_layers=1")
        self.state = init_state(
            config.update, abstract_state(config.update, make_mesh(config, jax.devices()[:1]))
        )
        self.run_dir = as_path(run_dir)
        self.checkpoints = Checkpoints(
            self.run_dir, 3, {"data": {}, "model": model_identity(config.update)}, print
        )

    def save(self, step: int) -> None:
        self.checkpoints.save(self.state, Position(step, Place(10 * step)))


def test_an_outage_while_a_checkpoint_begins_is_waited_for(store: Store) -> None:
    saving = Saving(store.bucket() + "/run")
    store.forget()
    with store.failing(matching=r"checkpoints/3", share=1.0, at_most=4, kinds=CLIENTS_GAVE_UP):
        saving.save(3)
        saving.checkpoints.close()
    assert [status for *_, status in store.requests()].count(425) == 4
    assert committed_steps(saving.run_dir) == [3]


def test_an_outage_while_a_checkpoint_begins_is_given_up_after_the_bound_that_the_line_names(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(store.bucket() + "/run")
    saving.save(3)
    monkeypatch.setattr(Patience, "seconds", 1.5)
    # what a failed save makes of it is of this test
    monkeypatch.setattr(Patience, "current", Patience())
    with (
        store.failing(matching=r"checkpoints/4", share=1.0, kinds=CLIENTS_GAVE_UP),
        pytest.raises(
            StoreFailed,
            match=r"does not answer .*\(tried for \d+ s\); run the same command again later$",
        ),
    ):
        saving.save(4)
        saving.checkpoints.close()
    assert saving.checkpoints.fate == "step 3 is saved" and committed_steps(saving.run_dir) == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "fault"),
    [("gs", {"down": True}), ("s3", {"share": 1.0, "kinds": ["pause"], "pause_s": 200.0})],
    indirect=["store"],
)
def test_a_run_that_is_asked_to_stop_while_the_store_is_down_or_hangs_ends_soon_and_says_what_is_saved(
    store: Store, fault: dict[str, Any]
) -> None:
    run_dir = store.bucket() + "/run"
    process = start("train", *RAMPED, f"run_dir={run_dir}", "steps=100000", "checkpoint_period=20")
    wait_for(lambda: bool(committed_steps(as_path(run_dir))), process)
    with store.failing(**fault):
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        said, _ = process.communicate(timeout=200)
        lasted = time.monotonic() - started
    assert process.returncode == 1 and lasted < 60, (process.returncode, lasted, said)
    saved = committed_steps(as_path(run_dir))[0]
    assert (
        said.strip().splitlines()[-1].startswith("maxbatch: error") and f"step {saved}" in said
    ), said
