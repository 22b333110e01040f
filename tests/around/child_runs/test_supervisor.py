"""The supervisor of child runs: exit codes and outcome files give their results, and no output is
lost.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from maxbatch.around.child_runs import supervisor, training_process
from maxbatch.around.child_runs.supervisor import ChildEnd, ChildRun, Supervisor, locked
from maxbatch.around.child_runs.training_process import TrainingProcess
from maxbatch.run.folder.outcome import RecordedOutcome, Status, read_outcome, write_outcome
from maxbatch.system.errors import ConfigError, PassingFault
from maxbatch.system.processes.stopping import Stopping

SLEEP = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('up', "
    "flush=True); time.sleep(60)"
)
DIVERGE = (
    "import json, sys; json.dump({'status': 'diverged', 'reason': 'loss'}, open(sys.argv[2] + "
    "'/outcome.json', 'w'));print('maxbatch: error: the loss'); sys.exit(1)"
)


@pytest.fixture(autouse=True)
def scripts_for_children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Children are short Python scripts, the first argument after `train`; returns their
    processes.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def start(
        arguments: list[str], log: BinaryIO, keep_open: list[int], tells_passing_faults: bool
    ) -> subprocess.Popen[bytes]:
        assert arguments[0] == "train" and tells_passing_faults
        command = [sys.executable, "-c", arguments[1], *arguments[1:]]
        processes.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=keep_open
            )
        )
        return processes[-1]

    monkeypatch.setattr(training_process, "start_child", start)
    return processes


class Scripts:
    """Scripts by name; the one named `prune` is pruned while it runs."""

    def __init__(self, folder: Path, scripts: dict[str, str], prune: str = "") -> None:
        self.folder, self.left, self.prune = folder, list(scripts.items()), prune
        self.ends: dict[str, ChildEnd] = {}
        self.running: set[str] = set()
        self.most = 0
        self.stop: Stopping | None = None

    def next(self) -> ChildRun[str] | None:
        if not self.left:
            return None
        name, script = self.left.pop(0)
        run_dir = self.folder / name
        run_dir.mkdir()
        self.running.add(name)
        self.most = max(self.most, len(self.running))
        return ChildRun(name, run_dir, [script, str(run_dir)])

    def is_exhausted(self) -> bool:
        return not self.left

    def watch(self, run: ChildRun[str]) -> str | None:
        if "up" not in (run.run_dir / "log.txt").read_text():
            return None
        if self.stop:
            os.kill(os.getpid(), signal.SIGTERM)
            self.stop = None
        return "too slow" if run.subject == self.prune else None

    def ended(self, run: ChildRun[str], end: ChildEnd) -> None:
        self.running.discard(run.subject)
        self.ends[run.subject] = end


def train(runs: Scripts, parallel: int = 2) -> bool:
    with Stopping() as stop, locked(runs.folder, "trains") as lock:
        return Supervisor(
            runs, functools.partial(TrainingProcess, lock), parallel, lambda line: None
        ).train(stop)


def test_an_end_is_told_by_exit_codes_and_outcome_files_and_never_by_the_log(
    tmp_path: Path,
) -> None:
    scripts = {
        "done": "print('a gradient that is not finite')",
        "diverged": DIVERGE,
        "failed": "import sys; sys.exit('maxbatch: error: a gradient that is not finite')",
        "silent": "import sys; sys.exit(3)",
        "killed": "import os; os.kill(os.getpid(), 9)",
        "stopped": "import sys; sys.exit(75)",
        "full": "import sys; print('maxbatch: error: no space left'); sys.exit(74)",
    }
    runs = Scripts(tmp_path, scripts)
    assert train(runs, parallel=3) and runs.most == 3
    found = {name: (end.status, end.reason, end.exit_code) for name, end in runs.ends.items()}
    assert found == {
        "done": (Status.DONE, "", 0),
        "diverged": (Status.DIVERGED, "loss", 1),
        "failed": (Status.FAILED, "a gradient that is not finite", 1),
        "silent": (Status.FAILED, "exit code 3", 3),
        "killed": (Status.FAILED, "killed by SIGKILL", -9),
        "stopped": (None, "", 75),
        "full": (None, "no space left", 74),
    }


def test_faults_of_a_disk_in_a_row_end_the_command_and_are_no_outcome(tmp_path: Path) -> None:
    full = "import sys; print('maxbatch: error: no space left'); sys.exit(74)"
    names = ["a", "b", "c", "d", "e", "f"]
    scripts = dict.fromkeys(names, full) | {"c": "pass"}
    runs = Scripts(tmp_path, scripts)
    with pytest.raises(PassingFault, match=r"no space left \(3 such faults in a row\)"):
        train(runs, parallel=1)
    assert list(runs.ends) == names, "c ended well, so that the count began again"
    runs = Scripts(tmp_path / "less", dict(list(scripts.items())[:5]))
    runs.folder.mkdir()
    assert train(runs, parallel=1)
    assert not list(tmp_path.rglob("outcome.json"))


def test_an_outcome_of_an_earlier_start_does_not_count(tmp_path: Path) -> None:
    class Again(Scripts):
        def next(self) -> ChildRun[str] | None:
            if run := super().next():
                write_outcome(run.run_dir, RecordedOutcome(Status.DIVERGED, "before"))
            return run

    runs = Again(tmp_path, {"a": "import sys; sys.exit('now')"})
    assert train(runs) and runs.ends["a"].reason == "now"


def test_a_pruned_run_is_recorded_before_it_is_stopped(tmp_path: Path) -> None:
    check = "import os, sys; sys.exit(75 if os.path.exists(sys.argv[2] + '/outcome.json') else 3)"
    script = SLEEP.replace("sys.exit(75)", f"exec({check!r})")
    runs = Scripts(tmp_path, {"slow": script, "other": "pass"}, prune="slow")
    assert train(runs)
    assert runs.ends["slow"][:3] == (Status.PRUNED, "too slow", 75)
    assert read_outcome(tmp_path / "slow") == (Status.PRUNED, "too slow")


def test_a_stop_request_reaches_every_child_and_starts_nothing_new(tmp_path: Path) -> None:
    runs = Scripts(tmp_path, {"a": SLEEP, "b": "import sys, time; time.sleep(60)", "c": "pass"})
    runs.stop = Stopping()
    assert not train(runs)
    assert {name: end.status for name, end in runs.ends.items()} == {"a": None, "b": None}, (
        "b died of the signal"
    )
    assert [name for name, _ in runs.left] == ["c"]


def test_children_end_with_an_exception(
    tmp_path: Path, scripts_for_children: list[subprocess.Popen[bytes]]
) -> None:
    class Failing(Scripts):
        def ended(self, run: ChildRun[str], end: ChildEnd) -> None:
            super().ended(run, end)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        train(Failing(tmp_path, {"long": SLEEP, "short": "pass"}))
    assert [process.returncode for process in scripts_for_children] == [-signal.SIGKILL, 0]


def test_a_folder_has_one_command_which_waits_for_the_children_of_a_killed_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scripts_for_children: list[subprocess.Popen[bytes]],
) -> None:
    with locked(tmp_path, "trains") as lock:
        (tmp_path / "run").mkdir()
        child = TrainingProcess(lock, tmp_path / "run", [SLEEP])
        monkeypatch.setattr(supervisor, "_LOCK_S", 0)
        with (
            pytest.raises(ConfigError, match="another command trains in it"),
            locked(tmp_path, "trains"),
        ):
            pass
    with (
        pytest.raises(ConfigError, match="another command trains in it"),
        locked(tmp_path, "trains"),
    ):
        pass
    threading.Timer(0.2, scripts_for_children[0].kill).start()
    monkeypatch.undo()
    with locked(tmp_path, "trains"):
        assert child.poll() is not None
