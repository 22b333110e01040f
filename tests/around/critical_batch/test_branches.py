"""Branches on disk: how they end, and to which run they belong."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from maxbatch import ConfigError, LearningRate, load_config
from maxbatch.around.child_runs.supervisor import ChildEnd, locked
from maxbatch.around.critical_batch.branches import Branches, BranchProgress, BranchRuns
from maxbatch.around.critical_batch.critical_size import smoothed
from maxbatch.around.critical_batch.measured_run import MeasuredRun
from maxbatch.around.critical_batch.plan import MeasurementPlan, check_plan, make_plan
from maxbatch.plan.place import Place
from maxbatch.run.folder.outcome import Status
from maxbatch.run.folder.position import Position
from maxbatch.system.errors import TrainingError
from tests.helpers.measured_runs import factors, fake_run, write_position


def test_a_branch_that_diverges_is_a_result_and_no_failure(tmp_path):
    run = MeasuredRun.read(fake_run(tmp_path / "run"), 1)
    plan = make_plan(run, [80], factors("1,2"), None, "sqrt")
    folder = tmp_path / "run" / "critical-batch"
    with locked(folder, "measures"):
        branches = Branches(run, plan, folder)
        branches.fork()
        runs = BranchRuns(branches, [], BranchProgress(Console(), branches))
        first = runs.next()
        runs.ended(first, ChildEnd(Status.DIVERGED, "9 updates in a row", 1, 0.0))
        assert branches.left() == branches.all[1:] and branches.chunks(branches.all[0]) is None
        second = runs.next()
        assert second.subject == branches.all[1] and not runs.is_exhausted()
        with pytest.raises(TrainingError, match="the disk is full"):
            runs.ended(second, ChildEnd(Status.FAILED, "the disk is full", 1, 0.0))
        with pytest.raises(ConfigError, match="no such key"):
            runs.ended(second, ChildEnd(Status.FAILED, "no such key", 2, 0.0))
        with pytest.raises(TrainingError, match="killed by SIGKILL; the same command continues"):
            runs.ended(second, ChildEnd(Status.FAILED, "killed by SIGKILL", -9, 0.0))
        assert branches.left() == branches.all[1:]


def test_a_branch_that_decays_falls_from_the_rate_of_the_checkpoint_to_0(tmp_path):
    run = MeasuredRun.read(fake_run(tmp_path / "run"), 1)
    plan = make_plan(run, [80], factors("1,2"), None, "sqrt", decays=True)
    assert MeasurementPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    constant = make_plan(run, [80], factors("1,2"), None, "sqrt")
    folder = tmp_path / "run" / "critical-batch"
    branches, others = Branches(run, plan, folder), Branches(run, constant, folder)
    for branch in branches.all:
        assert branches.folder(branch) != others.folder(branch)
        rate, held = (
            LearningRate.from_config(
                load_config(str(run.path / "config.yml"), these.overrides(branch))
            )
            for these in (branches, others)
        )
        first, end = branch.fork.samples_seen, branch.end
        assert rate(first) == pytest.approx(held(first)) == pytest.approx(held(end - 1))
        assert rate(first + branch.samples // 2) == pytest.approx(held(first) / 2)
        assert rate(end) == pytest.approx(0, abs=1e-12)


def test_a_branch_whose_last_losses_are_not_finite_diverged(tmp_path):
    run = MeasuredRun.read(fake_run(tmp_path / "run"), 1)
    plan = make_plan(run, [80], factors("1,2"), None, "sqrt")
    branches = Branches(run, plan, tmp_path / "run" / "critical-batch")
    branches.fork()
    for branch, loss in zip(branches.all, (1.0, None), strict=True):
        fixed = {"stage": 0, "learning_rate": 1e-3, "loss": loss, "loss_weight": 9.0}
        steps = range(1, branch.samples // branch.batch_size + 1)
        lines = [
            {
                "step": 80 + k,
                "samples_seen": 1280 + k * branch.batch_size,
                "tokens_seen": 0,
                "global_batch_size": branch.batch_size,
                **fixed,
            }
            for k in steps
        ]
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
    write_position(path, Position(80, Place(1280)), checksum=7)
    again = MeasuredRun.read(path, 1)
    assert not check_plan(again, plan)
    other = make_plan(again, [80], factors("1,2"), None, "sqrt")
    with pytest.raises(ConfigError, match="another run of this name"):
        Branches(again, other, path / "critical-batch").fork()
