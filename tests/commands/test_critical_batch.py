"""`maxbatch critical-batch` as a process: its branches train, die and go on."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import maxbatch, start
from tests.helpers.processes import wait_for
from tests.helpers.tiny import ONE_LAYER, TINY_RUN, read_metrics

# The same batch and rate throughout: the base branch must repeat the run.
RUN = (
    *TINY_RUN,
    ONE_LAYER,
    "global_batch_size=4",
    "per_device_batch_size=8",
    "steps=64",
    "checkpoint_period=16",
    "max_num_checkpoints_to_keep=null",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
)


MEASURE = ("--checkpoints", "16,32", "--factors", "1,2", "--samples", "128", "--tolerance", "9")


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def branch_records(run: Path) -> dict[tuple[int, int], list[dict]]:
    found = {}
    for folder in (run / "critical-batch" / "sqrt-128").iterdir():
        step, batch = map(int, re.fullmatch(r"step-(\d+)-batch-(\d+)", folder.name).groups())
        lines = read_metrics(folder)
        assert [line["step"] for line in lines[:step]] == list(range(1, step + 1)), "the run's"
        found[step, batch] = lines[step:]
    return found


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("critical") / "run"
    result = maxbatch("train", *RUN, f"run_dir={path}")
    assert result.returncode == 0, result.stderr
    return path


@pytest.fixture(scope="module")
def measured(run_dir, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    path = tmp_path_factory.mktemp("measured") / "run"
    shutil.copytree(run_dir, path)
    before = digest(path / "checkpoints")
    result = maxbatch("critical-batch", path, *MEASURE, "--svg", f"{path}-plots")
    assert result.returncode == 0, result.stdout + result.stderr
    assert digest(path / "checkpoints") == before  # forked by hard links, and never written to
    return path, result


@pytest.mark.processes
def test_every_branch_trains_on_the_same_samples(measured):
    path, _ = measured
    assert Path(f"{path}-plots/loss-against-batch-size.svg").is_file(), "its plot, beside the page"
    own = {record["samples_seen"]: record for record in read_metrics(path)}

    def added(records: list[dict]) -> int:
        return sum(int(record["data_fingerprint"], 16) for record in records) % 2**64

    for (step, batch), records in branch_records(path).items():
        assert [r["step"] for r in records] == list(range(step + 1, step + 1 + 128 // batch))
        assert [r["samples_seen"] for r in records] == list(
            range(4 * step + batch, 4 * step + 129, batch)
        )
        assert added(records) == added(
            [r for at, r in own.items() if 4 * step < at <= 4 * step + 128]
        )


@pytest.mark.processes
def test_the_base_branch_repeats_the_run_and_others_scale_its_rate(measured):
    path, _ = measured
    own = {record["step"]: record for record in read_metrics(path)}
    for (step, batch), records in branch_records(path).items():
        for record in records:
            assert record["learning_rate"] == pytest.approx(
                own[step + 1]["learning_rate"] * math.sqrt(batch / 4)
            )
            if batch == 4:
                assert record["loss"] == pytest.approx(own[record["step"]]["loss"], rel=2e-4)


@pytest.mark.processes
def test_the_table_the_json_and_the_plot_say_the_same(measured):
    path, result = measured
    folder = path / "critical-batch"
    found = json.loads((folder / "critical_batch.json").read_text())
    assert [checkpoint["critical_batch_size"] for checkpoint in found["checkpoints"]] == [8, 8]
    records = branch_records(path)
    for checkpoint in found["checkpoints"]:
        for branch in checkpoint["branches"]:
            last = records[checkpoint["step"], branch["batch_size"]][-32 // branch["batch_size"] :]
            weight = sum(r["loss_weight"] for r in last)
            assert branch["loss"] == pytest.approx(
                sum(r["loss"] * r["loss_weight"] for r in last) / weight
            )
            assert f"{branch['loss']:.4f}" in result.stdout
            assert str(branch["loss"]) in (folder / "critical_batch.html").read_text()
    assert maxbatch("report", path).returncode == 0
    assert found["checkpoints"][0]["in_words"] in (path / "report.html").read_text(), (
        "the report shows it too"
    )
    assert "to go further: --factors 1,2,4" in result.stdout
    assert f"next: {found['command']}" in result.stdout and "\x1b" not in result.stdout


@pytest.mark.processes
def test_the_printed_command_trains_by_the_schedule_on_as_many_samples(measured):
    path, _ = measured
    command = json.loads((path / "critical-batch" / "critical_batch.json").read_text())["command"]
    words = shlex.split(command)
    assert words[:2] == ["maxbatch", "train"] and "batch_size_schedule=0:4 64:8" in words
    result = maxbatch(*words[1:])
    assert result.returncode == 0, result.stderr
    own, records = read_metrics(path), read_metrics(f"{path}-batch-warmup")
    assert [r["global_batch_size"] for r in records] == [4] * 16 + [8] * 24
    assert records[-1]["samples_seen"] == own[-1]["samples_seen"]
    for record in records:
        scale = math.sqrt(record["global_batch_size"] / 4)
        assert record["learning_rate"] == pytest.approx(own[0]["learning_rate"] * scale)
    assert [r["loss"] for r in records[:16]] == pytest.approx(
        [r["loss"] for r in own[:16]], rel=2e-4
    )


@pytest.mark.processes
def test_kill_9_and_the_same_command_loses_nothing_and_runs_nothing_twice(
    run_dir, measured, tmp_path
):
    path = tmp_path / "run"
    shutil.copytree(run_dir, path)
    command = ("critical-batch", path, *MEASURE, "--checkpoints", "16")
    process = start(*command)
    second = path / "critical-batch" / "sqrt-128" / "step-16-batch-8"
    wait_for((second / "sessions.jsonl").exists, process)
    process.kill()
    process.communicate()
    first = second.with_name("step-16-batch-4")
    before = digest(first)
    # what a branch forks from is its own: the run may remove its checkpoints now
    shutil.rmtree(path / "checkpoints")
    result = maxbatch(*command)
    assert result.returncode == 0, result.stdout + result.stderr
    assert digest(first) == before
    uninterrupted = branch_records(measured[0])
    for key, records in branch_records(path).items():
        assert [r["step"] for r in records] == [r["step"] for r in uninterrupted[key]]
        assert [r["loss"] for r in records] == pytest.approx(
            [r["loss"] for r in uninterrupted[key]], rel=2e-4
        )
    again = maxbatch(*command)
    assert again.returncode == 0 and "(0 to train)" in again.stdout
    assert digest(first) == before


@pytest.mark.processes
def test_sigterm_saves_the_branch_and_exits_75(run_dir, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run_dir, path)
    process = start("critical-batch", path, *MEASURE, "--simulate-devices", "2")
    log = path / "critical-batch" / "sqrt-128" / "step-16-batch-4" / "log.txt"
    wait_for(lambda: log.exists() and "ready in" in log.read_text(), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 75 and "The same command continues" in output, output
    assert "of 4 branches are left" in output
    assert "per device x 2 devices" in log.read_text()
