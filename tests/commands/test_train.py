"""`maxbatch train` as a process: it stops when asked, survives being killed, and resumes as if
nothing had been.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import grain
import jax
import pytest

from maxbatch.cli import main
from maxbatch.run.folder.sessions import read_sessions
from maxbatch.run.pretraining import train
from tests.helpers.command import Hold, environment, maxbatch, recorded, start
from tests.helpers.processes import wait_for
from tests.helpers.tiny import (
    MEASURED,
    ONE_LAYER,
    SAME,
    TINY_RUN,
    assert_same_run,
    read_metrics,
    tiny_config,
)

pytestmark = pytest.mark.processes

RAMP = (
    *TINY_RUN,
    ONE_LAYER,
    MEASURED,
    "enable_rampup_batch_size=true",
    "per_device_batch_size_start=2",
    "per_device_batch_size_increment=2",
    "per_device_batch_size=6",
    "gradient_accumulation_steps=3",
    "global_rampup_samples=240",
    "train_samples=664",
    "checkpoint_period=4",
)
# The same batches on half the devices: twice the rows on each.
RAMP_ON_TWO = (
    *RAMP,
    "per_device_batch_size_start=4",
    "per_device_batch_size_increment=4",
    "per_device_batch_size=12",
)
ALSO_SAME = (*SAME, "learning_rate", "tokens_seen")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    result = maxbatch("train", *RAMP, f"run_dir={run_dir}", "--simulate-devices", "4")
    assert result.returncode == 0, result.stderr
    return read_metrics(run_dir)


def test_nothing_compiles_on_the_critical_path_after_the_second_step(
    uninterrupted: list[dict],
) -> None:
    assert {m["stage"] for m in uninterrupted} == {0, 1, 2}
    assert len({m["compiles"] for m in uninterrupted[1:]}) == 1


def test_a_length_in_data_is_met_exactly(uninterrupted: list[dict]) -> None:
    assert uninterrupted[-1]["samples_seen"] == 664
    assert sum(m["global_batch_size"] for m in uninterrupted) == 664
    assert uninterrupted[-1]["global_batch_size"] < 72


# A program that runs the command line it is given, then prints the packages that other threads
# imported, and whether Orbax is loaded.
IMPORTS = """
import sys, threading
def note(event, arguments):
    if event == "import" and threading.current_thread() is not threading.main_thread():
        imported.add(arguments[0])
imported = set()
from maxbatch.cli import main
from maxbatch.run.folder.sessions import read_sessions
sys.addaudithook(note)
main()
packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - {"jaxlib"}
print("imported beside the main thread:", *sorted(packages))
print("orbax:", "orbax.checkpoint" in sys.modules)
"""


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    run_dir = tmp_path_factory.mktemp("imports")
    command = [sys.executable, "-c", IMPORTS, "train", *TINY_RUN, "steps=3", f"run_dir={run_dir}"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=600, check=True
    )
    assert len(read_metrics(run_dir)) == 3
    return done.stdout.splitlines()


def test_only_the_main_thread_imports_packages(imports: list[str]) -> None:
    """Grain's own lazy imports exchange `__import__` for all threads: JAX traced by another one
    would fail.

    What JAX imports of jaxlib on the thread that first lowers is no such import.
    """
    assert imports[-2] == "imported beside the main thread:"


def test_a_command_loads_no_orbax_and_a_users_program_all_of_grain(imports: list[str]) -> None:
    assert imports[-1] == "orbax: False"
    assert grain.checkpoint.CheckpointSave


def kill_at(step: int, run_dir: Path, *arguments: str) -> None:
    """Starts a run and kills it with -9 as soon as it has recorded `step`."""
    process = start("train", *arguments, f"run_dir={run_dir}", **Hold(step, Path.cwd()).variables)
    wait_for(lambda: recorded(run_dir) >= step, process)
    process.kill()
    process.communicate()


def test_kill_9_in_the_ramp_and_resume_on_half_the_devices_is_unnoticed(
    tmp_path: Path, uninterrupted: list[dict]
) -> None:
    kill_at(6, tmp_path, *RAMP, "--simulate-devices", "4")
    kill_at(11, tmp_path, *RAMP, "--simulate-devices", "4")
    result = maxbatch("train", *RAMP_ON_TWO, f"run_dir={tmp_path}", "--simulate-devices", "2")
    assert result.returncode == 0, result.stderr
    assert "resumed at step" in result.stdout
    assert_same_run(read_metrics(tmp_path), uninterrupted, ALSO_SAME)


def test_a_signal_saves_exits_75_and_the_same_command_goes_on(
    tmp_path: Path, uninterrupted: list[dict]
) -> None:
    command = (
        "train",
        *RAMP,
        f"run_dir={tmp_path}",
        "checkpoint_period=1000",
        "--simulate-devices",
        "4",
    )
    done = 0
    for number, step in ((signal.SIGHUP, 5), (signal.SIGINT, 10)):
        hold = Hold(step, Path.cwd())
        process = start(*command, **hold.variables)
        wait_for(lambda step=step: recorded(tmp_path) >= step, process)
        process.send_signal(number)
        hold.release()
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 75, output
        assert number.name in output and "Traceback" not in output
        assert (f"resumed at step {done}" in output) == (done > 0)
        done = read_metrics(tmp_path)[-1]["step"]
        assert (tmp_path / "checkpoints" / str(done)).is_dir()

    result = maxbatch(*command)
    assert result.returncode == 0, result.stderr
    assert f"resumed at step {done}" in result.stdout
    assert_same_run(read_metrics(tmp_path), uninterrupted, ALSO_SAME)
    assert [session.ended_by for session in read_sessions(tmp_path)] == ["SIGHUP", "SIGINT", "done"]


def test_a_signal_before_the_first_step_is_answered_too(tmp_path: Path) -> None:
    process = start("train", *RAMP, f"run_dir={tmp_path}")
    wait_for((tmp_path / "sessions.jsonl").exists, process)
    process.terminate()
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 75, output
    (session,) = read_sessions(tmp_path)
    assert session.ended_by == "SIGTERM" and session.command is not None
    assert session.command.startswith("maxbatch train ") and session.versions is not None
    assert {"maxbatch", "python", "jax", "jaxlib"} <= session.versions.keys()


def test_a_finished_run_says_so_and_takes_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", *TINY_RUN, f"run_dir={tmp_path}", "steps=2"]
    assert main(command) == 0
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert main(command) == 0 and "is complete" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert main([*command, "steps=3"]) == 0 and [m["step"] for m in read_metrics(tmp_path)] == [
        1,
        2,
        3,
    ]


def test_the_config_of_a_run_repeats_it(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert main(["train", *RAMP, "train_samples=400", f"run_dir={one}"]) == 0
    assert main(["train", str(one / "config.yml"), f"run_dir={other}"]) == 0
    assert {m["stage"] for m in read_metrics(one)} == {0, 1, 2}
    assert_same_run(read_metrics(other), read_metrics(one), ALSO_SAME)


def test_data_prints_the_fingerprint_that_the_step_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *TINY_RUN, f"run_dir={tmp_path}", "steps=3"]) == 0
    third = read_metrics(tmp_path)[2]
    size = third["global_batch_size"]
    first = third["samples_seen"] - size
    capsys.readouterr()
    assert (
        main(["data", *TINY_RUN, "--first", str(first), "--count", str(size), "--fingerprint"]) == 0
    )
    assert capsys.readouterr().out.strip() == third["data_fingerprint"]


@pytest.fixture(scope="module")
def one_update(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one-update")
    train(tiny_config("steps=1", f"run_dir={run_dir}"), jax.devices()[:1])
    return run_dir


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("data_shuffle_seed=7", "data_shuffle_seed"),
        ("max_target_length=64", "max_target_length"),
        ("base_emb_dim=64", "base_emb_dim"),
        ("synthetic_samples=400", "synthetic_samples"),
    ],
)
def test_a_resume_onto_another_stream_or_model_is_refused(
    one_update: Path, capsys: pytest.CaptureFixture[str], change: str, named: str
) -> None:
    code = main(["train", *TINY_RUN, f"run_dir={one_update}", "steps=2", change])
    assert_refused(code, capsys.readouterr().err, named)
    assert len(read_metrics(one_update)) == 1


def test_a_run_without_finite_gradients_ends_with_its_last_checkpoint_intact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diverging = [
        "train",
        *TINY_RUN,
        f"run_dir={tmp_path}",
        "max_consecutive_skips=3",
        "checkpoint_period=1",
    ]
    assert main([*diverging, "steps=2"]) == 0
    capsys.readouterr()
    broken = ("learning_rate=1e38", "learning_rate_schedule=constant", "warmup_steps_fraction=0")
    assert main([*diverging, "steps=20", *broken, "gradient_clipping_threshold=0"]) == 1
    assert "3 updates in a row" in capsys.readouterr().err
    skipped = [m for m in read_metrics(tmp_path) if m["skipped"]]
    assert len(skipped) == 3 and skipped[-1]["grad_norm"] is None
    assert main(["generate", str(tmp_path), "--prompt", "a", "--max-new-tokens", "2"]) == 0


def test_the_users_own_device_count_is_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpers import command

    env = command.environment()
    env["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
    monkeypatch.setattr(command, "environment", lambda: env)
    result = maxbatch(
        "train", *TINY_RUN, f"run_dir={tmp_path}", "steps=1", "per_device_batch_size=2"
    )
    assert result.returncode == 0, result.stderr
    assert read_metrics(tmp_path)[0]["global_batch_size"] == 4


def assert_refused(code: int, error: str, *names: str) -> None:
    assert code == 2, (code, error)
    assert error.count("\n") == 1 and "Traceback" not in error, error
    assert all(name in error for name in names), error


def test_output_is_plain_lines_on_a_pipe(tmp_path: Path) -> None:
    result = maxbatch(
        "train", *TINY_RUN, f"run_dir={tmp_path}", "steps=4", "log_period=2", "generate_prompt=ab"
    )
    lines = result.stdout.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("step ")] == [
        "step 1/4",
        "step 2/4",
        "step 4/4",
    ]
    assert "\x1b" not in result.stdout
    assert str(tmp_path) in result.stdout and "maxbatch generate" in result.stdout
    record = read_metrics(tmp_path)[0]
    assert record["mfu"] is None and record["tokens_per_second"] > 0
    json.dumps(record, allow_nan=False)


def test_training_goes_on_when_nobody_reads_its_output(tmp_path: Path) -> None:
    process = start("train", *TINY_RUN, f"run_dir={tmp_path}", "steps=30", "log_period=1")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(300) == 0
    assert len(read_metrics(tmp_path)) == 30 and (tmp_path / "checkpoints" / "30").is_dir()
