"""What goes wrong with a store while a run trains in it: one line, bounded time, and the same command goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from maxbatch.runs.position import committed_steps
from maxbatch.system.storage import as_path
from tests.helpers.command import maxbatch, start, wait_until
from tests.helpers.stores import Store
from tests.training.test_remote_runs import RAMPED, assert_same, records


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"full_after_bytes": 400_000, "full_status": 507}, "is full; free some space"),
        ({"full_after_bytes": 400_000, "full_status": 403}, "no permission in bucket"),
        ({"denied": r"^(PUT|POST) .*checkpoints/3/position"}, "no permission in bucket"),
    ],
)
def test_a_bucket_that_fills_up_or_is_closed_ends_the_run_in_one_line_and_mended_it_goes_on(
    store: Store, fault: dict, said: str, tmp_path: Path
) -> None:
    command = ["train", *RAMPED, f"run_dir={store.bucket()}/run"]
    with store.failing(**fault):
        started = time.monotonic()
        ended = maxbatch(*command)
        assert ended.returncode == 1 and time.monotonic() - started < 60, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("maxbatch: error")]
    assert len(errors) == 1 and said in errors[0] and " is saved" in errors[0], ended.stderr
    assert maxbatch(*command).returncode == 0
    assert maxbatch("train", *RAMPED, f"run_dir={tmp_path}/run").returncode == 0
    assert_same(records(as_path(command[-1].removeprefix("run_dir="))), records(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_while_the_store_is_down_ends_soon_and_says_what_is_saved(store: Store) -> None:
    run_dir = store.bucket() + "/run"
    process = start("train", *RAMPED, f"run_dir={run_dir}", "steps=100000", "checkpoint_period=20")
    wait_until(lambda: bool(committed_steps(as_path(run_dir))), process)
    with store.failing(down=True):
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        said, _ = process.communicate(timeout=200)
        lasted = time.monotonic() - started
    assert process.returncode == 1 and lasted < 60, (process.returncode, lasted, said)
    saved = committed_steps(as_path(run_dir))[0]
    assert said.strip().splitlines()[-1].startswith("maxbatch: error") and f"step {saved}" in said, said
