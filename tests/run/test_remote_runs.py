"""Runs in object stores: the same files and figures as on a disk, one writer, nothing lost or
repeated.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from maxbatch.cli import main
from maxbatch.run.folder.position import COMMITTED_FILE, committed_steps
from maxbatch.run.pretraining import train
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import AnyPath, as_path
from tests.data.tokenizers.test_tokenizers import write_bpe
from tests.helpers.command import Hold, environment, maxbatch, start
from tests.helpers.processes import wait_for
from tests.helpers.stores import LEASE_WRITES, Store, on
from tests.helpers.tiny import ONE_LAYER, TINY_RUN, assert_same_run, tiny_config

RAMPED = (
    *TINY_RUN,
    "per_device_batch_size=2",
    "enable_rampup_batch_size=true",
    "per_device_batch_size_start=1",
    "per_device_batch_size_increment=1",
    "global_rampup_samples=24",
    "checkpoint_period=3",
    "steps=6",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    ONE_LAYER,
)


def records(run_dir: AnyPath) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def names(run_dir: AnyPath) -> set[str]:
    """The files and folders of a run; a disk has a lock besides, which a store does not."""
    return {p.name.split(".out.")[0] for p in run_dir.iterdir()} - {".lock"}


@on("s3")
def test_a_run_in_a_store_is_the_run_on_a_disk_and_resumes_from_the_bucket_alone(
    store: Store, tmp_path: Path
) -> None:
    bucket = store.bucket()
    train(tiny_config(*RAMPED, f"run_dir={tmp_path}/run"))
    train(tiny_config(*RAMPED, "steps=4", f"run_dir={bucket}/run"))
    there = as_path(f"{bucket}/run")
    assert committed_steps(there) == [4, 3] and len(records(there)) == 4
    store.forget()
    train(tiny_config(*RAMPED, f"run_dir={bucket}/run"))
    assert_same_run(records(there), records(tmp_path / "run"))
    assert names(there) == names(tmp_path / "run")
    assert committed_steps(there) == [6, 4, 3]
    assert main(["report", str(there)]) == 0 and (there / "report.html").is_file()
    assert main(["generate", str(there), "--max-new-tokens", "2"]) == 0
    path = f"load_parameters_path={there}"
    train(tiny_config(*RAMPED, "steps=1", path, f"run_dir={tmp_path}/next"))


@on("gs")
def test_lines_through_step_k_can_be_read_before_checkpoint_k_commits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = as_path(store.bucket() + "/run")
    copy, lines_at = RemotePath.copy, dict[int, int]()

    def noted(path: RemotePath, target: RemotePath) -> None:
        if target.name == COMMITTED_FILE and target.parent.parent == run_dir / "checkpoints":
            lines_at[int(target.parent.name)] = len(records(run_dir))
        copy(path, target)

    monkeypatch.setattr(RemotePath, "copy", noted)
    train(tiny_config(*RAMPED, "steps=4", f"run_dir={run_dir}"))
    assert set(lines_at) == {3, 4} and all(lines >= step for step, lines in lines_at.items())


@on("s3")
def test_an_unfinished_checkpoint_is_no_checkpoint_and_a_damaged_one_is_set_aside(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = store.bucket() + "/run"
    train(tiny_config(*RAMPED, "steps=3", f"run_dir={run_dir}"))
    there = as_path(run_dir)
    (there / "checkpoints" / "5" / "params" / "d" / "x").write_bytes(b"half of a save")
    assert committed_steps(there) == [3]
    train(tiny_config(*RAMPED, "steps=4", f"run_dir={run_dir}"))
    assert committed_steps(there) == [4, 3] and not (there / "checkpoints" / "5").exists()
    (there / "checkpoints" / "4" / "position" / "metadata").write_bytes(b"{}")
    train(tiny_config(*RAMPED, "steps=4", f"run_dir={run_dir}"))
    assert "moved to " in capsys.readouterr().err
    assert (there / "checkpoints-damaged" / "4").is_dir()
    assert [r["step"] for r in records(there)] == [1, 2, 3, 4] and committed_steps(there) == [4, 3]


def test_a_start_that_the_bucket_does_not_let_write_or_remove_is_one_line(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = store.bucket()
    for denied in ("^(PUT|POST)", "^DELETE"):
        with store.failing(denied=denied):
            assert main(["train", *RAMPED, f"run_dir={bucket}/run"]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"no permission in bucket {bucket[5:]}; give this identity" in error
    assert main(["train", *RAMPED, f"run_dir={store.scheme}://no-bucket-is-here/run"]) == 2
    assert "there is no bucket no-bucket-is-here; make it" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_killed_on_two_hosts_goes_on_on_one_from_another_folder(
    gs: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gs.plan()
    run_dir, expected = as_path(gs.bucket() + "/run"), tmp_path / "expected"
    stages = (
        "per_device_batch_size=4",
        "per_device_batch_size_increment=3",
        "global_rampup_samples=32",
    )
    keys = [*RAMPED, *stages, "steps=12", "checkpoint_period=3"]
    command = ["train", *keys, f"run_dir={run_dir}", "--simulate-devices", "4"]

    def go_elsewhere(name: str) -> Path:
        """Another machine has neither the folder nor the caches of the one before."""
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return folder

    hold = Hold(7, go_elsewhere("two hosts"))
    process = start(*command, "--simulate-hosts", "2", own_group=True, **hold.variables)
    wait_for(lambda: bool(committed_steps(run_dir)), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert committed_steps(run_dir)[0] < 12
    go_elsewhere("one host")
    assert maxbatch(*command).returncode == 0
    train(tiny_config(*keys, f"run_dir={expected}"), jax.devices()[:4])
    assert_same_run(records(run_dir), records(expected))
    assert committed_steps(run_dir)[0] == 12


@pytest.mark.slow
@on("gs")
def test_a_run_that_is_killed_goes_on_at_once_and_of_two_starts_one_trains(store: Store) -> None:
    run_dir = store.bucket() + "/run"
    arguments = [*RAMPED, f"run_dir={run_dir}", "steps=16", "checkpoint_period=4"]
    process = start("train", *arguments, **Hold(12, Path.cwd()).variables)
    wait_for(lambda: len(committed_steps(as_path(run_dir))) > 1, process)
    process.kill()
    process.communicate()
    assert (as_path(run_dir) / ".lease").exists()
    found: list[subprocess.CompletedProcess[str]] = []
    starts = [
        threading.Thread(target=lambda: found.append(maxbatch("train", *arguments)))
        for _ in range(2)
    ]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    done, refused = sorted(found, key=lambda one: one.returncode)
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in records(as_path(run_dir))] == list(range(1, 17))
    # The other is refused while the first trains; if it watched until the first had ended, there
    # was nothing to do.
    assert any("waiting up to" not in one.stderr for one in found), (
        "the lease of a killed process is not waited for"
    )
    assert refused.returncode in (0, 2) and (
        "is training in it" in refused.stderr or "is complete" in refused.stdout
    )
    assert not (as_path(run_dir) / ".lease").exists()


@pytest.mark.slow
@on("s3")
def test_of_two_starts_at_the_same_moment_one_trains_and_the_other_is_refused_in_one_line(
    store: Store,
) -> None:
    run_dir = store.bucket() + "/run"
    keys = [*RAMPED, f"run_dir={run_dir}", "steps=1000000", "checkpoint_period=4"]
    # What takes long is behind them when they start, and both have seen no lease when the first of
    # them writes its own.
    waits = (
        "import sys; from maxbatch.cli import main; from maxbatch.run import pretraining;"
        "print('ready', flush=True); sys.stdin.readline(); sys.exit(main())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", waits, "train", *keys],
            env=environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        with store.failing(together=2, matching=LEASE_WRITES):
            for process in processes:
                assert process.stdout and process.stdout.readline() == "ready\n"
            for process in processes:
                assert process.stdin
                process.stdin.write("\n")
                process.stdin.flush()
            end = time.monotonic() + 200
            while all(process.poll() is None for process in processes):
                assert time.monotonic() < end, "none is refused"
                time.sleep(0.05)
        refused, trains = sorted(processes, key=lambda process: process.poll() is None)
        wait_for(lambda: bool(committed_steps(as_path(run_dir))), trains)
        trains.send_signal(signal.SIGTERM)
        _, errors = refused.communicate(timeout=60)
        assert refused.returncode == 2 and len(errors.splitlines()) == 1, errors
        assert re.search(
            r"process \d+ on \S+ \(renewed \d+ s ago\) is training in it; wait for it", errors
        ), errors
        _, errors = trains.communicate(timeout=200)
        assert trains.returncode == 75, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    steps = [record["step"] for record in records(as_path(run_dir))]
    assert steps == list(range(1, len(steps) + 1)) and committed_steps(as_path(run_dir))[0] == len(
        steps
    )


@on("gs")
def test_compiled_programs_and_a_tokenizer_are_taken_from_a_bucket(
    store: Store, tmp_path: Path
) -> None:
    bucket = store.bucket()
    (as_path(bucket) / "tokenizer.json").write_bytes(
        write_bpe(tmp_path / "tokenizer.json").read_bytes()
    )
    lines = "\n".join(json.dumps({"text": f"{number} " + "word " * 40}) for number in range(40))
    (as_path(bucket) / "texts.jsonl").write_text(lines)
    keys = (
        *TINY_RUN,
        "dataset_type=jsonl",
        f"dataset_path={bucket}/texts.jsonl",
        "tokenizer_type=huggingface",
        f"tokenizer_path={bucket}/tokenizer.json",
        "global_batch_size=8",
        "per_device_batch_size=1",
        "steps=2",
        "vocab_size=300",
        "add_bos=false",
        "add_eos=false",
    )
    assert main(["compile", *keys, "--output", f"{bucket}/compiled"]) == 0
    assert main(["train", *keys, f"compiled_dir={bucket}/compiled", f"run_dir={bucket}/run"]) == 0
    assert [one["compiles"] for one in records(as_path(f"{bucket}/run"))] == [0, 0]
