"""`maxbatch sweep` as a process: a kill loses and repeats nothing, what fails is recorded, a signal
saves.
"""

from __future__ import annotations

import functools
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from maxbatch.around.child_runs.supervisor import Supervisor, locked
from maxbatch.around.child_runs.training_process import TrainingProcess
from maxbatch.around.sweep.folder import SweepFolder, Trial
from maxbatch.around.sweep.study import SweepStudy
from maxbatch.around.sweep.sweep_file import SweepFile
from maxbatch.cli import main
from maxbatch.commands.sweep import TrialRuns
from maxbatch.run.folder.metrics import read_metrics as recorded
from maxbatch.system.processes.stopping import Stopping
from maxbatch.system.terminal.bars import LinesAboveBar
from tests.helpers.chromium import ask
from tests.helpers.command import maxbatch, start
from tests.helpers.full_disk import small_disk
from tests.helpers.processes import children_of, wait_for
from tests.helpers.sweeps import RATES, planned, wait_until_free, write_evals, write_sweep
from tests.helpers.tiny import read_metrics

pytest.importorskip("optuna", reason="Optuna is not installed (pip install 'maxbatch[sweep]')")


def starts_of(folder: Path) -> int:
    return (folder / "log.txt").read_text().count("samples per update")


def test_the_sweep_itself_leaves_the_accelerator_to_its_trials() -> None:
    code = "import sys, maxbatch.commands.sweep as _; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.processes
def test_a_sweep_of_4_trials_killed_twice_loses_nothing_and_runs_nothing_twice() -> None:
    write_sweep(
        {"learning_rate": ["1e-3", "1e-2"], "global_batch_size": ["2", "6"]},
        {"steps": 20, "checkpoint_period": 5},
        parallel=2,
    )
    folder = SweepFolder(Path("sw"))

    def finished() -> dict[Path, bytes]:
        return {
            trial.folder: (trial.folder / "metrics.jsonl").read_bytes()
            for trial in folder.trials()
            if trial.is_finished
        }

    for at_least in (1, 2):
        process = start("sweep", "sweep.yml")
        wait_for(lambda count=at_least: len(finished()) >= count, process)  # type: ignore[misc]
        process.kill()
        process.communicate()
        before = finished()
        wait_until_free(folder)  # every training process goes with the sweep
    assert 2 <= len(before) < 4

    result = maxbatch("sweep", "sweep.yml")
    assert result.returncode == 0 and "failed" not in result.stdout, result.stdout + result.stderr
    trials = folder.trials()
    assert len(trials) == len({trial.title for trial in trials}) == 4
    for trial in trials:
        records = read_metrics(trial.folder)
        assert [record["step"] for record in records] == list(range(1, 21))
        assert records[-1]["global_batch_size"] == int(trial.overrides["global_batch_size"])
        assert records[2]["learning_rate"] == pytest.approx(
            float(trial.overrides["learning_rate"]), rel=0.05
        )
    assert all((path / "metrics.jsonl").read_bytes() == text for path, text in before.items())
    assert sum(starts_of(trial.folder) for trial in trials) <= 4 + 2 * 2
    table = [line.split() for line in result.stdout.splitlines() if line.rstrip().endswith(" done")]
    values = [float(row[3]) for row in table]
    assert len(table) == 4 and values == sorted(values)
    best = folder.results("loss")[0]
    assert best.value == pytest.approx(values[0], abs=1e-4)
    assert (
        f"next: maxbatch train sw/base.yml learning_rate={best.trial.overrides['learning_rate']} "
        in result.stdout
    )

    shown, console = ask(
        Path("sw/sweep.html").resolve(),
        "return document.querySelector('.plot').series.map(({ y }) => ({ y }))",
    )
    assert console == []
    values = {result.value for result in folder.results("loss")}
    assert {value for line in shown for value in line["y"]} == values and len(values) == 4

    again = maxbatch("sweep", "sweep.yml", "--json")
    assert (
        again.returncode == 0 and "trial 0:" not in again.stderr and "best: trial" in again.stderr
    )
    assert json.loads(again.stdout) == json.loads(json.dumps(folder.to_dict()))  # and nothing else


@pytest.mark.processes
def test_training_goes_with_a_sweep_that_is_killed() -> None:
    write_sweep({"learning_rate": ["1e-3"]}, {"steps": 1_000_000, "checkpoint_period": 1_000_000})
    process = start("sweep", "sweep.yml")
    log = Path("sw/trials/0000/metrics.jsonl")
    wait_for(log.exists, process)
    process.kill()
    process.communicate()
    wait_until_free(SweepFolder(Path("sw")))
    size = log.stat().st_size
    time.sleep(1)
    assert log.stat().st_size == size


@pytest.mark.processes
def test_failed_and_diverged_trials_are_recorded_and_a_signal_saves_and_exits_75() -> None:
    write_sweep(
        {
            "learning_rate": ["1e-2", "1e30"],
            "synthetic_samples": ["500"],
            "dataset_type": ["synthetic", "text"],
        },
        {"steps": 1_000_000, "max_consecutive_skips": 2},
        parallel=4,
    )
    process = start("sweep", "sweep.yml")
    folder = SweepFolder(Path("sw"))
    wait_for(
        lambda: (
            len(trials := folder.trials()) == 4
            and all(trial.is_finished for trial in trials[1:])
            and len(children_of(process.pid)) == 1  # a signal would reach one that is ending
            and recorded(trials[0].folder)
        ),
        process,
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 75, output
    assert "SIGTERM" in output and "1 of 4 trials are left. The same command continues." in output
    results = {r.trial.number: r for r in folder.results("loss")}
    assert results[0].status == "unfinished"
    done = read_metrics(results[0].trial.folder)[-1]["step"]
    assert (results[0].trial.folder / "checkpoints" / str(done)).is_dir()
    assert results[2].status == "diverged" and "not finite" in results[2].reason
    assert results[1].status == results[3].status == "failed"
    assert "dataset_path" in results[1].reason
    assert json.loads((results[1].trial.folder / "outcome.json").read_text())["status"] == "failed"


@pytest.mark.processes
def test_trials_that_met_a_full_disk_have_not_failed_and_the_same_command_trains_them(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", 200) as disk:
        write_sweep(RATES, {"steps": 2}, sweep_dir=str(disk / "sw"))
        full = maxbatch("sweep", "sweep.yml")
        assert full.returncode == 1, full.stderr
        assert (
            "no space left on the disk" in full.stderr and "3 such faults in a row" in full.stderr
        )
        folder = SweepFolder(disk / "sw")
        assert [result.status for result in folder.results("loss")] == ["unfinished", "unfinished"]
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        again = maxbatch("sweep", "sweep.yml")
        assert again.returncode == 0, again.stderr
        assert [result.status for result in folder.results("loss")] == ["done", "done"]


@pytest.mark.processes
def test_a_pruned_trial_is_stopped_recorded_and_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = planned({"learning_rate": ["1e-3"]}, {"steps": 1_000_000})
    folder.base.write_text(SweepFile.read("sweep.yml").base)

    class Pruning(SweepStudy):
        def should_prune(self, trial: Trial) -> str | None:
            return "enough" if recorded(trial.folder) else None

    study = Pruning(SweepFile.read("sweep.yml"), folder)
    lines: list[str] = []
    progress = LinesAboveBar(Console(file=io.StringIO()), study.num_trials, 0)
    monkeypatch.setattr(progress, "say", lines.append)
    runs = TrialRuns(folder, study, "loss", progress)
    with locked(folder.path, "sweeps") as lock:
        assert Supervisor(runs, functools.partial(TrainingProcess, lock), 1, lines.append).train(
            Stopping()
        )
    (result,) = folder.results("loss")
    assert (result.status, result.reason) == ("pruned", "enough") and 0 < result.steps < 1_000_000
    assert (
        len(lines) == 2
        and lines[1].startswith("trial 0 pruned loss ")
        and "(1 of 1 trials ended)" in lines[1]
    )
    assert study.is_exhausted()


def test_a_sweep_without_optuna_or_bokeh_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = planned(RATES)
    for number, trial in enumerate(folder.trials()):
        write_evals(trial, 3.0 - number)
        folder.finish(trial, "done")
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert main(["sweep", "sweep.yml", "--svg", "plots"]) == 0
    out = capsys.readouterr().out
    assert "svg: 1 plot in plots" in out and [path.suffix for path in Path("plots").iterdir()] == [
        ".svg"
    ]
    assert "best: trial 0, loss 1.0000" in out and "pip install 'maxbatch[report]'" in out
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", "sweep.yml"]) == 2
    error = capsys.readouterr().err
    assert (
        error
        == "maxbatch: error: maxbatch sweep needs Optuna; works: pip install 'maxbatch[sweep]'\n"
    )
