"""`maxbatch critical-batch`: the arithmetic, what is refused, and branches that train, die and go on."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
from rich.console import Console

from maxbatch import ConfigError, load_config
from maxbatch.commands.critical_batch.branches import Branches, locked
from maxbatch.commands.critical_batch.critical_size import (
    Chunk,
    critical_batch,
    last_chunks,
    schedule,
    schedule_text,
    smoothed,
    standard_error,
)
from maxbatch.commands.critical_batch.measured_run import MeasuredRun
from maxbatch.commands.critical_batch.plan import check_plan, make_plan
from maxbatch.commands.critical_batch.runner import BranchProgress, BranchRuns
from maxbatch.config.loading import configs_dir, dump_config
from maxbatch.plan.stages import parse_schedule
from maxbatch.runs.outcome import Status
from maxbatch.runs.position import CheckpointRecord, Position
from maxbatch.runs.supervisor import ChildEnd
from maxbatch.system.errors import TrainingError
from tests.helpers.command import maxbatch, start, wait_until
from tests.helpers.tiny import TINY_RUN, read_metrics

TOLERANCE = 0.01


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({4: 2.0, 8: 2.005, 16: 2.0099, 32: 2.02}, 16),
        ({4: 2.0, 8: 2.02, 16: 2.0}, 4),  # contiguous: what lies beyond a batch that fails does not count
        ({4: 2.0, 8: 1.9, 16: 1.95, 32: 2.0}, 32),  # against the base, not against the best
        ({2: 1.995, 4: 2.0, 8: 2.02}, 4),
        ({4: 2.0, 8: None, 16: 2.0}, 4),
    ],
)
def test_the_critical_batch_is_the_largest_within_the_tolerance_of_the_base(losses, expected):
    assert critical_batch(losses, 4, TOLERANCE).batch_size == expected


def test_a_base_that_a_smaller_batch_beats_is_beyond_the_critical_batch():
    found = critical_batch({1: 1.8, 2: 1.805, 4: 2.0, 8: 2.0}, 4, TOLERANCE)
    assert found.batch_size == 2 and found.is_below_base and not found.is_at_most
    lowest = critical_batch({2: 1.9, 4: 2.0}, 4, TOLERANCE)
    assert lowest.batch_size == 2 and lowest.is_at_most
    diverged = critical_batch({2: 1.9, 4: None, 8: 1.9}, 4, TOLERANCE)
    assert diverged.batch_size == 2 and diverged.is_below_base


def test_a_bound_is_called_a_bound():
    assert critical_batch({4: 2.0, 8: 2.0}, 4, TOLERANCE).is_at_least
    assert not critical_batch({4: 2.0, 8: 2.5}, 4, TOLERANCE).is_at_least


def test_losses_are_compared_over_the_same_samples_weighted_by_tokens():
    def records(batch: int) -> list[dict]:
        return [
            {
                "samples_seen": s + batch,
                "loss": s / 100,
                "loss_weight": 10.0 * batch,
                "global_batch_size": batch,
            }
            for s in range(0, 64, batch)
        ]

    assert [chunk.weight for chunk in last_chunks(records(4), 32, 64, 8)] == [80.0] * 4
    assert smoothed(last_chunks(records(8), 32, 64, 16)) == pytest.approx((32 + 40 + 48 + 56) / 400)
    assert smoothed([Chunk(1.0, 1.0), Chunk(3.0, 3.0)]) == 2.5
    with pytest.raises(ValueError, match="do not cover"):
        last_chunks(records(8)[:-1], 32, 64, 16)
    lost = [*records(8)[:-1], {**records(8)[-1], "loss": None}]
    assert last_chunks(lost, 32, 64, 16) is None


def test_noise_that_branches_share_does_not_count():
    base = [Chunk(loss, 1.0) for loss in (1.0, 3.0, 2.0)]
    assert standard_error([Chunk(c.loss + 0.5, 1.0) for c in base], base) == pytest.approx(0)
    assert standard_error(base[:1], base[:1]) is None


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(100, 4), (400, 16)], "0:4 200:8 400:16"),  # log B over log s
        ([(100, 8), (400, 8)], "0:4 100:8"),
        ([(100, 4), (400, 4)], "0:4"),
        ([(100, 16), (400, 8), (900, 8)], "0:4 100:8"),  # no stage exceeds a later measurement
        ([(100, 2), (400, 8)], "0:4 400:8"),
        ([(100, 16)], "0:4 100:16"),
        ([(100, 12), (400, 12)], "0:4 100:8"),  # doublings alone
        ([(100, 4), (1000, 5), (2000, 8)], "0:4 2000:8"),
    ],
)
def test_the_batch_is_doubled_where_the_measured_critical_batch_allows_it(points, expected):
    text = schedule_text(schedule(points, 4))
    assert text == expected
    assert parse_schedule(text, 32)


def test_a_schedule_never_exceeds_what_was_measured_there_or_later():
    points = [(100, 8), (300, 32), (700, 8), (1500, 64), (4000, 64)]
    stages = schedule(points, 4)
    assert [batch for _, batch in stages] == sorted(batch for _, batch in stages)
    for position, measured in points:
        assert [batch for at, batch in stages if at <= position][-1] <= measured


def fake_run(
    path: Path, *overrides: str, batch: int = 16, updates: int = 640, every: int = 80, first: int = 80
) -> Path:
    """A run folder as a run leaves it, without the arrays."""
    config = load_config(overrides=[*TINY_RUN, f"global_batch_size={batch}", f"steps={updates}", *overrides])
    path.mkdir(parents=True)
    (path / "config.yml").write_text(dump_config(config))
    fixed = {"global_batch_size": batch, "stage": 0, "loss": 1.0, "learning_rate": 1e-3}
    lines = [
        {"step": k, "samples_seen": k * batch, "tokens_seen": 32 * k * batch, **fixed}
        for k in range(1, updates + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in range(first, updates + 1, every):
        write_position(path, Position(step, step * batch), checksum=step)
    return path


def write_position(path: Path, position: Position, checksum: int) -> None:
    folder = path / "checkpoints" / str(position.step) / "position"
    folder.mkdir(parents=True, exist_ok=True)
    record = CheckpointRecord(position, {"data": {}, "model": {}}, checksum, (1, 1))
    (folder / "metadata").write_text(json.dumps(record.to_json()))


def planned(path: Path, devices: int = 1, **stated):
    asked = {"steps": None, "factors": None, "samples": None, "scaling": "sqrt"} | stated
    return make_plan(MeasuredRun.read(path, devices), **asked)


def works(error: pytest.ExceptionInfo[ConfigError]) -> tuple[str, str]:
    """The flag, or the key, and the value that a message names."""
    assert "\n" not in str(error.value)
    found = re.search(r"works: (?:--)?(\w+)[ =](\S+)$", str(error.value))
    assert found, str(error.value)
    return found[1], found[2]


def factors(text: str) -> tuple[Fraction, ...]:
    return tuple(map(Fraction, text.split(",")))


def test_checkpoints_are_spread_over_the_logarithm_without_warmup_and_end(tmp_path):
    run = fake_run(tmp_path / "run", updates=1600, every=80)
    steps = [fork.step for fork in planned(run).forks]
    assert steps == [160, 320, 720, 1520]


def test_every_branch_of_a_plan_is_whole_updates_of_equal_samples(tmp_path):
    plan = planned(fake_run(tmp_path / "run"), factors=factors("1/2,1,3,4"), samples=1000)
    assert plan.samples >= 1000 and plan.samples % (16 * 3) == plan.samples % (16 * 4) == 0
    for fork in plan.forks:
        for branch in plan.branches(fork):
            assert plan.samples % branch.batch_size == 0 == plan.compared % branch.batch_size
    assert Fraction(1, 4) <= Fraction(plan.compared, plan.samples) <= Fraction(1, 2)


def test_defaults_are_those_that_the_run_is_long_enough_for(tmp_path):
    assert planned(fake_run(tmp_path / "long", updates=640)).factors[-1] == 8
    assert planned(fake_run(tmp_path / "short", updates=160)).factors[-1] == 2


def test_a_run_too_short_to_tell_is_refused_with_what_works(tmp_path):
    run = fake_run(tmp_path / "run", updates=320)
    with pytest.raises(ConfigError, match="too short to tell") as error:
        planned(run, factors=factors("1/2,1,2,4,8"))
    name, value = works(error)
    assert name == "factors"
    assert planned(run, factors=factors(value)).factors[-1] == 4

    shorter = fake_run(tmp_path / "shorter", updates=80)
    with pytest.raises(ConfigError, match="too short to tell") as error:
        planned(shorter)
    name, value = works(error)
    assert name == "samples" and planned(shorter, samples=int(value), factors=factors("1,2"))

    shortest = fake_run(tmp_path / "shortest", updates=20, every=10, first=10)
    with pytest.raises(ConfigError, match="too short to tell") as error:
        planned(shortest)
    name, value = works(error)
    assert name == "train_samples"
    assert planned(fake_run(tmp_path / "longer", updates=int(value) // 16))


def test_a_branch_of_too_few_updates_is_refused(tmp_path):
    run = fake_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="at least 8 updates") as error:
        planned(run, factors=factors("1,8"), samples=100)
    assert planned(run, factors=factors("1,8"), samples=int(works(error)[1])).samples == 8 * 128


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    run = fake_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="max_num_checkpoints_to_keep=null") as error:
        planned(run, steps=[100])
    assert planned(run, steps=[int(works(error)[1])]).forks[0].step == 80
    bare = fake_run(tmp_path / "bare", first=10**6)
    with pytest.raises(ConfigError, match="no checkpoints"):
        planned(bare)


def test_a_batch_that_the_devices_cannot_hold_is_refused_with_what_they_can(tmp_path):
    run = fake_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="divisible by 16 ") as error:
        planned(run, devices=16, factors=factors("1/2,1,2"))
    plan = planned(run, devices=16, factors=factors(works(error)[1]))
    assert plan.factors == (1, 2)
    assert planned(run, devices=16).factors == (1, 2, 4, 8)  # nobody asked for the half
    with pytest.raises(ConfigError, match="must be whole") as error:
        planned(run, factors=factors("1/3,1,2"))
    assert planned(run, factors=factors(works(error)[1]))


def test_a_ramp_is_measured_by_its_own_rule_alone(tmp_path):
    run = fake_run(tmp_path / "run", "batch_size_schedule=0:8 2000:16", "global_batch_size=null")
    with pytest.raises(ConfigError, match="two rules") as error:
        planned(run)
    assert planned(run, scaling=works(error)[1])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run here"):
        MeasuredRun.read(tmp_path, 1)


def test_a_run_of_reinforcement_learning_is_refused(tmp_path):
    config = load_config(configs_dir() / "post_train" / "rl.yml")
    (tmp_path / "config.yml").write_text(dump_config(config))
    with pytest.raises(ConfigError, match="a run of maxbatch rl"):
        MeasuredRun.read(tmp_path, 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["steps=3"], "steps=3: maxbatch critical-batch takes no config keys"),
        (["--factors", "2,4"], "--factors 2,4"),
        (["--factors", "1,0"], "--factors 1,0"),
        (["--checkpoints", "ten"], "--checkpoints ten"),
        (["--samples", "few"], "--samples few"),
        (["--tolerance", "-1"], "--tolerance"),
        (["--scaling", "cubic"], "--scaling"),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(tmp_path, capsys, arguments, named):
    from maxbatch.cli import main

    assert main(["critical-batch", str(tmp_path), *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and named in message


def test_a_branch_that_diverges_is_a_result_and_no_failure(tmp_path):
    run = MeasuredRun.read(fake_run(tmp_path / "run"), 1)
    plan = make_plan(run, [80], factors("1,2"), None, "sqrt")
    folder = tmp_path / "run" / "critical-batch"
    with locked(folder) as lock:
        branches = Branches(run, plan, folder)
        branches.fork()
        runs = BranchRuns(branches, lock, [], BranchProgress(Console(), branches))
        first = runs.next()
        runs.ended(first, ChildEnd(Status.DIVERGED, "9 updates in a row", 1, 0.0))
        assert branches.left() == branches.all[1:] and branches.chunks(branches.all[0]) is None
        second = runs.next()
        assert second.subject == branches.all[1] and not runs.is_exhausted()
        with pytest.raises(TrainingError, match="the disk is full"):
            runs.ended(second, ChildEnd(Status.FAILED, "the disk is full", 1, 0.0))
        with pytest.raises(ConfigError, match="no such key"):
            runs.ended(second, ChildEnd(Status.FAILED, "no such key", 2, 0.0))
        with pytest.raises(TrainingError, match="killed by SIGKILL; the same command goes on"):
            runs.ended(second, ChildEnd(Status.FAILED, "killed by SIGKILL", -9, 0.0))
        assert branches.left() == branches.all[1:]


def test_a_branch_whose_last_losses_are_not_finite_diverged(tmp_path):
    run = MeasuredRun.read(fake_run(tmp_path / "run"), 1)
    plan = make_plan(run, [80], factors("1,2"), None, "sqrt")
    branches = Branches(run, plan, tmp_path / "run" / "critical-batch")
    branches.fork()
    for branch, loss in zip(branches.all, (1.0, None), strict=True):
        fixed = {"stage": 0, "learning_rate": 1e-3, "loss": loss, "loss_weight": 9.0}
        steps = range(1, branch.samples // branch.batch_size + 1)
        lines = [
            {"step": 80 + k, "samples_seen": 1280 + k * branch.batch_size, "tokens_seen": 0,
             "global_batch_size": branch.batch_size, **fixed}
            for k in steps
        ]  # fmt: skip
        path = branches.folder(branch) / "metrics.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        branches.finish(branch, Status.DONE, "")
    base, other = branches.all
    assert smoothed(branches.chunks(base)) == 1.0 and branches.chunks(other) is None
    outcome = json.loads((branches.folder(other) / "outcome.json").read_text())
    assert outcome == {"status": "diverged", "reason": "its last losses are not finite"}
    assert not (branches.folder(other) / "checkpoints").exists()


def test_a_run_that_was_trained_anew_is_planned_anew_and_its_old_branches_are_refused(tmp_path):
    path = fake_run(tmp_path / "run")
    run = MeasuredRun.read(path, 1)
    plan = make_plan(run, [80], factors("1,2"), None, "sqrt")
    assert check_plan(run, plan)
    Branches(run, plan, path / "critical-batch").fork()
    write_position(path, Position(80, 1280), checksum=7)
    again = MeasuredRun.read(path, 1)
    assert not check_plan(again, plan)
    other = make_plan(again, [80], factors("1,2"), None, "sqrt")
    with pytest.raises(ConfigError, match="another run of this name"):
        Branches(again, other, path / "critical-batch").fork()


def test_two_commands_on_one_run_do_not_mix(tmp_path, monkeypatch):
    from maxbatch.commands.critical_batch import branches

    monkeypatch.setattr(branches, "_LOCK_S", 0)
    with (
        branches.locked(tmp_path),
        pytest.raises(ConfigError, match="another command"),
        branches.locked(tmp_path),
    ):
        pass


# The same batch and rate throughout: the base branch must repeat the run.
RUN = (
    *TINY_RUN,
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
        found[step, batch] = read_metrics(folder)
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
    result = maxbatch("critical-batch", path, *MEASURE)
    assert result.returncode == 0, result.stdout + result.stderr
    assert digest(path / "checkpoints") == before  # forked by hard links, and never written to
    return path, result


@pytest.mark.slow
def test_every_branch_trains_on_the_same_samples(measured):
    path, _ = measured
    own = {record["samples_seen"]: record for record in read_metrics(path)}

    def added(records: list[dict]) -> int:
        return sum(int(record["data_fingerprint"], 16) for record in records) % 2**64

    for (step, batch), records in branch_records(path).items():
        assert [r["step"] for r in records] == list(range(step + 1, step + 1 + 128 // batch))
        assert [r["samples_seen"] for r in records] == list(range(4 * step + batch, 4 * step + 129, batch))
        assert added(records) == added([r for at, r in own.items() if 4 * step < at <= 4 * step + 128])


@pytest.mark.slow
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


@pytest.mark.slow
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
            assert branch["loss"] == pytest.approx(sum(r["loss"] * r["loss_weight"] for r in last) / weight)
            assert f"{branch['loss']:.4f}" in result.stdout
            assert str(branch["loss"]) in (folder / "critical_batch.html").read_text()
    assert maxbatch("report", path).returncode == 0
    assert found["checkpoints"][0]["in_words"] in (path / "report.html").read_text(), (
        "the report shows it too"
    )
    assert "further: --factors 1,2,4" in result.stdout
    assert f"next: {found['command']}" in result.stdout and "\x1b" not in result.stdout


@pytest.mark.slow
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
    assert [r["loss"] for r in records[:16]] == pytest.approx([r["loss"] for r in own[:16]], rel=2e-4)


@pytest.mark.slow
def test_kill_9_and_the_same_command_loses_nothing_and_runs_nothing_twice(run_dir, measured, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run_dir, path)
    command = ("critical-batch", path, *MEASURE)
    process = start(*command)
    second = path / "critical-batch" / "sqrt-128" / "step-16-batch-8"
    wait_until((second / "metrics.jsonl").exists, process)
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


@pytest.mark.slow
def test_sigterm_saves_the_branch_and_exits_75(run_dir, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run_dir, path)
    process = start("critical-batch", path, *MEASURE, "--simulate-devices", "2")
    log = path / "critical-batch" / "sqrt-128" / "step-16-batch-4" / "log.txt"
    wait_until(lambda: log.exists() and "ready in" in log.read_text(), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and "The same command goes on" in output, output
    assert "of 4 branches are left" in output
    assert "per device x 2 devices" in log.read_text()
