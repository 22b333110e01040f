"""The command line: help that helps, one line for bad input, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import maxbatch
from maxbatch import ConfigError
from maxbatch.__main__ import main as command_main
from maxbatch.cli import main
from maxbatch.commands import COMMANDS
from maxbatch.commands.arguments import simulate_devices
from tests.helpers.command import start_anew
from tests.helpers.processes import children_of, wait_for
from tests.helpers.tiny import TINY_RUN


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands_with_examples(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and f"maxbatch {name}" in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"maxbatch {maxbatch.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_shows_examples_and_every_flag(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out and all(example in out for example in COMMANDS[name].examples)
    assert out.startswith(f"usage: maxbatch {name} ")
    assert ("[--json]" in out) == COMMANDS[name].prints_json


WITH_JSON = [name for name, command in COMMANDS.items() if command.prints_json]


@pytest.mark.parametrize("flags", [["--nope"], ["learning_rat=1"], ["nowhere"], []], ids=" ".join)
@pytest.mark.parametrize("name", WITH_JSON)
def test_with_json_an_error_is_an_object_on_standard_output_too(
    capsys: pytest.CaptureFixture[str], name: str, flags: list[str]
) -> None:
    """Arguments, keys and files; without arguments most commands miss one, and `plan` and `config`
    do not.
    """
    if name in ("plan", "config", "data", "compile", "fit") and not flags:
        flags = ["max_target_length=1"]
    code = main([name, *flags, "--json"])
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert (
        said == {"error": err.strip().removeprefix("maxbatch: error: "), "exit_code": code}
        and code == 2
    )


def test_with_json_a_bug_is_an_object_on_standard_output_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxbatch.commands.config.run", lambda args: {}["key"])
    assert main(["config", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": "KeyError: 'key'", "exit_code": 1} and "Traceback" in err


@pytest.mark.parametrize("example", COMMANDS["plan"].examples)
def test_the_examples_of_plan_run(capsys: pytest.CaptureFixture[str], example: str) -> None:
    assert main(shlex.split(example)[1:]) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "trian: unknown command; nearest: train"),
        (["run.yml"], f"run.yml: unknown command; one of {', '.join(COMMANDS)}"),
        (["generate", "nomodel"], "nomodel: no such folder (seen from "),
        (["export", "nomodel", "--output", "out"], "nomodel: no such folder (seen from "),
        (["report", "nomodel"], "nomodel: no such folder (seen from "),
        (["critical-batch", "nomodel"], "nomodel: no such folder (seen from "),
        (
            ["train", *TINY_RUN, "load_parameters_path=nomodel"],
            "nomodel: no such folder (seen from ",
        ),
        (["train", "nowhere.yml"], "config file nowhere.yml: does not exist"),
        (["train", "a.yml", "b.yml"], "b.yml: only one config file is read (a.yml)"),
        (["train", "expansion_factor_real_data=0"], "expansion_factor_real_data=0: must be"),
        (
            ["train", "--simulate-devices", "0"],
            "--simulate-devices 0: must be a whole number from 1 on",
        ),
        (["train", "--json"], "--json: unknown flag"),
        (
            ["export", "run", "--output", "out", "--dtype", "bfloat"],
            "--dtype bfloat: must be one of float32, bfloat16, float16; works: --dtype bfloat16",
        ),
        (["compile", "--hlo", "gs://bucket/x"], "--hlo gs://bucket/x: must be"),
        (["eval", "run"], "eval: unknown command; nearest: evaluate"),
        (["finetune"], "finetune: unknown command; one of plan, "),
        (["plan", "--json=1"], "--json: takes no value"),
        (["plan", "--lay"], "--lay: unknown flag; nearest: --layout"),
        (["generate", "run", "--top_p=1"], "--top_p: unknown flag; nearest: --top-p"),
        (
            ["generate", "run", "--max-tokens", "3"],
            "--max-tokens: unknown flag; nearest: --max-new-tokens",
        ),
        (
            ["generate", "run", "--num-tokens", "3"],
            "--num-tokens: unknown flag; nearest: --max-new-tokens",
        ),
        (
            ["generate", "run", "--learning-rate", "3"],
            "--learning-rate: config keys are stated without dashes",
        ),
        (["report"], "RUN: must be given; works: maxbatch report runs/default"),
        (
            ["prepare", "--output", "out", "--workers", "0"],
            "--workers 0: must be a whole number from 1 to 1024; works: --",
        ),
        (
            ["prepare", "--output", "out", "--workers", "two"],
            "--workers two: must be a whole number from 1 to 1024",
        ),
        (
            ["prepare"],
            "--output or --verify: must be given; works: maxbatch prepare dataset_type=jsonl",
        ),
        (["data", "--stats", "--fingerprint"], "--fingerprint: must not be given beside --stats"),
        (["data", "steps=x"], "steps=x: must be a whole number"),
        (["plan", "run_dir=a\0b"], r"'run_dir=a\x00b': must be UTF-8 text without NUL characters"),
        (["generate", "runs/x", "--prompt", "caf\udce9"], r"'caf\udce9': must be UTF-8 text"),
        (["train", "\ud800.yml"], r"'\ud800.yml': must be UTF-8 text"),
        (["data\0"], r"'data\x00': must be UTF-8 text"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"maxbatch: error: {said}")


LONG = "x" * 5000


@pytest.mark.parametrize(
    "argv",
    [
        [LONG],
        ["train", LONG, LONG],
        ["train", f"--{LONG}"],
        ["train", f"--steps={LONG}"],
        ["train", "--simulate-devices", LONG],
        ["sweep", f"steps={LONG}", f"steps={LONG}"],
    ],
)
def test_a_long_argument_is_repeated_in_part(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main(argv) == 2
    assert len(capsys.readouterr().err) < 350


@pytest.mark.parametrize("command", ["plan", "--help"])
def test_output_onto_a_full_disk_is_one_line(command: str) -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "maxbatch", command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert run.returncode == 1
    *_, line = run.stderr.splitlines()
    assert (
        line
        == "maxbatch: error: no space left on the disk; free some and run the same command again"
    )
    assert "Traceback" not in run.stderr and "Exception ignored" not in run.stderr


def test_a_command_runs_without_standard_output() -> None:
    run = subprocess.run(
        ["sh", "-c", f"{shlex.quote(sys.executable)} -m maxbatch plan >&-"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.returncode == 0 and "Traceback" not in run.stderr


def fake_train(monkeypatch: pytest.MonkeyPatch, outcome: object) -> list[object]:
    seen: list[object] = []

    def train(config: object) -> object:
        seen.append(config)
        if isinstance(outcome, BaseException):
            raise outcome
        return types.SimpleNamespace(stopped_by=outcome)

    module = types.ModuleType("maxbatch.run.pretraining")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "maxbatch.run.pretraining", module)
    return seen


@pytest.mark.parametrize(
    ("outcome", "argv", "code"),
    [
        (None, [], 0),
        ("SIGTERM", [], 75),
        ("SIGTERM", ["enable_checkpointing=false"], 1),
        (ConfigError("two\nlines"), [], 2),
        (KeyboardInterrupt(), [], 1),
    ],
)
def test_exit_codes_say_how_training_ended(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: object,
    argv: list[str],
    code: int,
) -> None:
    fake_train(monkeypatch, outcome)
    assert main(["train", *argv]) == code
    assert capsys.readouterr().err.count("\n") <= 1


def test_ctrl_c_while_a_command_loads_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("maxbatch.cli.main", interrupted)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert command_main() == 1
    assert capsys.readouterr().err == "maxbatch: interrupted\n"


def test_an_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_train(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_simulated_devices_replace_a_count_and_keep_other_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    simulate_devices(4)
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[:2] == ["--xla_dump_to=x", "--xla_force_host_platform_device_count=4"]
    assert "--xla_force_host_platform_device_count=2" not in flags
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_the_package_resolves_its_names_and_no_others() -> None:
    assert {"BatchPlan", "RampupBatchManager", "load_config", "train", "ConfigError"} <= set(
        dir(maxbatch)
    )
    assert maxbatch.load_config.__module__ == "maxbatch.config.loading"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = maxbatch.nothing


def catches_sigterm(pid: int) -> bool:
    """Whether a process has a handler of its own for SIGTERM."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    except FileNotFoundError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.7, 1.2, 2.0])
def test_sigterm_while_a_command_starts_is_answered_by_an_exit_code(delay: float) -> None:
    process = start_anew(
        "train", *TINY_RUN, "run_dir=run", "steps=100000", "--simulate-devices", "2"
    )
    wait_for(lambda: catches_sigterm(process.pid), process)
    time.sleep(delay)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "command",
    [
        ("compile", *TINY_RUN, "run_dir=run"),
        ("prepare", *TINY_RUN, "dataset_type=python_stdlib", "--output", "tokens"),
        ("generate", "run", "--prompt", "a"),
        ("plan", *TINY_RUN),
        ("train", *TINY_RUN, "run_dir=run", "--simulate-devices", "4", "--simulate-hosts", "2"),
    ],
    ids=lambda command: command[0],
)
def test_sigterm_ends_every_command_and_its_children(command: tuple[str, ...]) -> None:
    process = start_anew(*command)
    wait_for(lambda: catches_sigterm(process.pid), process)
    time.sleep(0.5)
    process.terminate()
    output, _ = process.communicate(timeout=120)  # until every child has closed the pipe
    # Done, or refused, before it came; the same command continues a run.
    assert process.returncode in ((0, 75) if command[0] == "train" else (0, 1, 2)), output
    assert "Traceback" not in output


def test_sigterm_before_the_hosts_handle_signals_is_a_stop_on_request() -> None:
    process = start_anew(
        "train", *TINY_RUN, "run_dir=run", "--simulate-devices", "4", "--simulate-hosts", "2"
    )
    wait_for(lambda: len(children_of(process.pid)) == 2, process)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and "error" not in output, output


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--hosts=--"),
        ("generate", "~nobody-at-all/x"),
        ("report", "loop"),
        ("report", "loop/x"),
    ],
)
def test_values_that_lead_nowhere_are_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("loop").symlink_to("loop")
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize(("words", "code"), [("plan", 0), ("plan steps=x", 2)])
def test_a_service_may_close_the_standard_streams(closed: str, words: str, code: int) -> None:
    command = f"{shlex.quote(sys.executable)} -m maxbatch {words} {closed}"
    assert subprocess.run(command, shell=True, capture_output=True).returncode == code


def test_native_code_does_not_write_its_messages_into_files_of_ours(tmp_path: Path) -> None:
    lines = (
        "import os, subprocess, sys\nfrom maxbatch.__main__ import "
        "_open_closed_streams\n_open_closed_streams()\nfile = open(sys.argv[1], 'w')\nos.write(2, "
        "b'native')\nsubprocess.run(['sh', '-c', 'echo child >&2'])\nprint('printed', "
        "file=sys.stderr, flush=True)\n"
    )
    command = [sys.executable, "-c", lines, str(tmp_path / "metrics")]
    assert subprocess.run(f"{shlex.join(command)} 2>&-", shell=True).returncode == 0
    assert (tmp_path / "metrics").read_text() == ""


def test_a_removed_working_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["compile", "steps=1"]) == 2
    assert capsys.readouterr().err.startswith(
        "maxbatch: error: the working folder was removed; works: cd "
    )


def test_env_prints_the_versions_for_a_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_some=1")
    assert main(["env"]) == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"maxbatch", "python", "jax", "jaxlib", "flax", "numpy", "system"} <= found.keys()
    assert (found["maxbatch"], found["XLA_FLAGS"]) == (maxbatch.__version__, "--xla_some=1")


@pytest.mark.parametrize(
    "words, expected",
    [
        ("maxbatch critic", "critical-batch"),
        ("maxbatch train learning_rate_sca", "learning_rate_scaling="),
        ("maxbatch fit --topo", "--topology"),
        ("maxbatch report learning_rate_sca", ""),
    ],
)
def test_bash_completes_commands_flags_and_keys(
    words: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    asked = (
        f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _maxbatch; echo "
        "${COMPREPLY[@]}"
    )
    shell = subprocess.run(
        ["bash", "-c", f"source {tmp_path}/script; {asked}"], capture_output=True, text=True
    )
    assert shell.stdout.strip() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_every_command_and_key(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert (
        all(name in script for name in COMMANDS)
        and "learning_rate_scaling=" in script
        and "topology" in script
    )
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True).returncode == 0


def test_help_keeps_to_the_columns_that_are_stated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], *([name] for name in COMMANDS)):
        assert main([*words, "--help"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
