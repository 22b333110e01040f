"""Simulated machines have a limit that a flag beyond it names."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from maxbatch import load_config
from maxbatch.cli import main
from maxbatch.commands import simulation
from maxbatch.run.newest import newest_saved


@pytest.mark.parametrize(
    "keys",
    [
        # the first stage may be behind a resume
        ("batch_size_schedule=0:6 12:8", "per_device_batch_size=4"),
        ("steps=91", "num_epochs=2"),  # the data decides whether they agree
    ],
    ids=str,
)
def test_a_plan_that_needs_the_run_is_left_to_the_hosts(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(simulation, "run_hosts", lambda command, *_: started.append(command) or 0)
    assert main(["train", *keys, "--simulate-hosts", "4"]) == 0
    assert started == [["train", *keys, "--simulate-devices", "1"]]


@pytest.mark.parametrize(
    ("scripts", "said", "code"),
    [
        (
            ("stop", "end 75"),
            "host 0 of 2 has died: it is stopped (heartbeat_timeout_s); step 7 is saved",
            75,
        ),
        (
            ("stop", "end 1"),
            "host 0 of 2 has died: it is stopped (heartbeat_timeout_s); step 7 is saved",
            75,
        ),
        (("stop", "wait"), "host 0 of 2 has died: it is stopped", 75),
        (("stop", "stop"), "host 0 of 2 has died: it is stopped", 75),
        (("wait", "stop"), "host 1 of 2 has died: it is stopped", 75),
        (("end 1", "stop"), "", 1),  # the first host has reported it
        (("stop 0.3", "end 0"), "", 0),
    ],
)
def test_a_host_that_is_stopped_is_a_dead_one(
    scripts: tuple[str, str],
    said: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Shells in place of hosts, and a short timeout."""
    words = {
        "stop": "kill -STOP $$; sleep 60",
        "stop 0.3": "(sleep 0.3; kill -CONT $$) & kill -STOP $$",
        "wait": "sleep 60",
        "end 0": "exit 0",
        "end 1": "sleep 0.2; exit 1",
        "end 75": "sleep 0.2; exit 75",
    }

    def started(
        arguments: object, output: object, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["sh", "-c", words[scripts[int(variables["JAX_PROCESS_ID"])]]], stdin=subprocess.PIPE
        )

    monkeypatch.setattr(simulation, "start_child", started)
    monkeypatch.setattr(simulation, "_STOPPED_S", 0.1)
    monkeypatch.setattr(simulation, "_GRACE_S", 0.1)
    assert simulation.run_hosts(["train"], 2, lambda: 7, heartbeat_timeout_s=1) == code
    error = capsys.readouterr().err
    assert error.startswith(f"maxbatch: error: {said}") if said else error == ""


def test_a_run_that_dies_in_its_warm_start_goes_on_from_there(tmp_path: Path) -> None:
    run_dir, keys = str(tmp_path), load_config().checkpoint
    assert newest_saved(run_dir, keys) is None
    for saved, step in ((tmp_path / "warm_start", 30), (tmp_path, 2)):
        (saved / "checkpoints" / str(step)).mkdir(parents=True)
        assert newest_saved(run_dir, keys) == step, "a step of its own goes first"
