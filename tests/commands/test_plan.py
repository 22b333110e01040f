"""`maxbatch plan`: what it prints, what it says of bad input, and that it loads no JAX to say
it.
"""

from __future__ import annotations

import itertools
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxbatch import BatchPlan, ConfigError, load_config
from maxbatch.cli import main
from maxbatch.data.stream.stream import open_stream

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore", "tensorboardX")
# the last finds plugins of JAX beside libtpu, in a third of a plan's time
LOOKED_FOR = {*HEAVY, "importlib.metadata"}
RAMP = (
    "enable_rampup_batch_size=true",
    "per_device_batch_size_increment=4",
    "gradient_accumulation_steps=2",
)


def plan_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def error_line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    if "--json" in argv:
        assert json.loads(captured.out).keys() == {"error", "exit_code"}
    else:
        assert captured.out == ""
    assert captured.err.startswith("maxbatch: error: ")
    return captured.err.removeprefix("maxbatch: error: ").rstrip("\n")


def test_json_is_the_plan_and_holds_every_name_of_the_contract(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_json(capsys, *RAMP, "--devices", "8", "--hosts", "2", "--samples-per-epoch", "1000")
    config = load_config(overrides=RAMP)
    of_batch = BatchPlan.from_config(
        config, num_devices=8, num_hosts=2, samples_per_epoch=1000
    ).to_dict()
    of_model = {
        "num_parameters": 821_376,
        "num_active_parameters": 821_376,
        "flops_per_token": 5_707_776,
    }
    of_model["mfu_peak"] = None  # of an unknown chip
    assert plan == of_batch | of_model
    assert set(plan) >= {
        "micro_batch_size_to_train_on",
        "global_batch_size_to_train_on",
        "per_replica_batch_size",
        "global_batch_size_to_load",
        "num_loading_hosts",
        "num_pipeline_stages",
        "pipeline_microbatch_size",
        "batch_shards",
        "num_devices",
        "num_hosts",
        "per_device_batch_size",
        "gradient_accumulation_steps",
        "expansion_factor_real_data",
        "num_pipeline_microbatches",
        "tokens_per_step",
        "total_steps",
        "total_samples",
        "rampup_end_step",
        "rampup_end_sample",
        "stages",
        "eval_batch_size",
        "samples_per_epoch",
        "steps_per_epoch",
        "epochs",
        "warnings",
    }


def test_epochs_come_from_the_flag_or_are_null(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Text that nobody has tokenised yet: its epochs are unknown here.
    (tmp_path / "a.txt").write_text("text")
    data = ("dataset_type=text", f"dataset_path={tmp_path / 'a.txt'}", "num_epochs=3")
    unknown = plan_json(capsys, *data)
    assert (
        unknown["steps_per_epoch"] is unknown["total_steps"] is unknown["samples_per_epoch"] is None
    )
    known = plan_json(capsys, *data, "--samples-per-epoch", "100")
    assert (known["steps_per_epoch"], known["total_samples"], known["total_steps"]) == (7, 300, 19)
    assert main(["plan", *data]) == 0


def test_epochs_beside_another_length_that_agrees_are_planned(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    data = ("dataset_type=text", f"dataset_path={tmp_path / 'a.txt'}", "num_epochs=3")
    assert main(["plan", *data, "steps=18", "--samples-per-epoch", "96"]) == 0


@pytest.mark.parametrize("data", [["dataset_path=/not/here"], []])
def test_a_dataset_that_is_not_here_is_no_obstacle(
    capsys: pytest.CaptureFixture[str], data: list[str]
) -> None:
    plan = plan_json(capsys, "dataset_type=text", "steps=10", *data)
    assert (plan["total_samples"], plan["epochs"]) == (160, None)


def test_a_path_that_nothing_reads_is_refused_as_training_refuses_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = ("dataset_type=synthetic", "dataset_path=gs://x")
    message = error_line(capsys, *data)
    assert (
        message
        == "dataset_path=gs://x: dataset_type=synthetic reads no path; works: dataset_path=''"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_stream(load_config(overrides=data))
    assert main(["plan", *data, "dataset_path="]) == 0


def test_without_devices_it_says_that_it_plans_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json"]) == 0
    captured = capsys.readouterr()
    assert "planned for 1 device and 1 host" in captured.err
    assert json.loads(captured.out)["num_devices"] == 1
    assert main(["plan", "--devices", "1", "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_a_run_that_ends_inside_its_ramp_is_planned_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *RAMP, "steps=3", "--devices", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert "warning: the run ends inside its ramp" in captured.err
    assert json.loads(captured.out)["warnings"] != []


def test_the_text_holds_each_number_under_its_name_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *RAMP, "--devices", "8", "learning_rate_scaling=sqrt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "256 samples per update = 16 per device x 8 devices x 2 accumulation steps; 65,536 tokens; "
        "ramped from 64 in 4 stages"
    )
    numbers = {words[0]: words[1] for line in lines if len(words := line.split()) > 1}
    assert numbers["global_batch_size_to_train_on"] == "256"
    assert numbers["total_samples"] == "50,304"
    stages = [line.split() for line in lines if line.lstrip()[:1].isdigit()][1:]
    assert [row[9] for row in stages] == ["64", "128", "192", "256"]


def test_the_layout_draws_axolotls_example(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "plan",
        "per_device_batch_size=3",
        "gradient_accumulation_steps=2",
        "--devices",
        "3",
        "--layout",
    ]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[-4]
        == "micro-batch 0 accumulates gradients, micro-batch 1 adds its own and applies the update"
    )
    assert [line.split() for line in lines[-2:]] == [
        ["0", "stream[s+0:s+9]", "S1-S3", "S4-S6", "S7-S9"],
        ["1", "stream[s+9:s+18]", "S10-S12", "S13-S15", "S16-S18"],
    ]
    layout = plan_json(capsys, *argv[1:])["layout"]
    assert layout == [[[0, 3], [3, 6], [6, 9]], [[9, 12], [12, 15], [15, 18]]]


def test_a_layout_of_thousands_of_devices_shows_the_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [
        "plan",
        "gradient_accumulation_steps=100",
        "--devices",
        "10240",
        "ici_tensor_parallelism=4",
        "--layout",
    ]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert (
        "micro-batches 0 to 98 accumulate gradients, micro-batch 99 adds its own and applies the "
        "update" in out
    )
    assert "devices 0-3" in out and "devices 10236-10239" in out and "..." in out
    assert out.splitlines()[-1].split()[0] == "99"
    assert f"-S{10240 * 16 * 100}" in out


def test_a_long_schedule_is_abridged(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = " ".join(f"{i * 100}:{i + 1}" for i in range(200))
    assert main(["plan", f"batch_size_schedule={schedule}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 100 and lines[-1].split()[0] == "199"


@pytest.mark.parametrize(
    "argv",
    [
        ["train_micro_batch_size=453284", "batch_size=2147483649"],
        ["batch_size=9223372036854775783", "num_generations=9223372036854775783"],
        ["global_batch_size=1099511627689", "per_device_batch_size=1048577"],
        ["num_pipeline_repeats=4611686018427387847", "base_num_decoder_layers=1048573"],
        ["base_num_decoder_layers=1000000000"],
    ],
)
def test_numbers_of_any_size_are_answered_at_once(argv: list[str]) -> None:
    started = time.process_time()
    main(["plan", *argv, "--devices", "2147483629", "--hosts", "2147483629", "--json"])
    assert time.process_time() - started < 5


def test_a_long_value_is_not_repeated_whole(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = " ".join(f"{i}:{i + 3}" for i in range(3000))
    for argv in (
        [f"batch_size_schedule={schedule}"],
        [f"batch_size_schedule={schedule}", "global_batch_size=8"],
    ):
        line = error_line(capsys, *argv, "--devices", "4")
        assert (
            len(line) < 700
            and schedule[:60] in line
            and schedule[:90] not in line.partition("works")[0]
        )


def test_files_overrides_and_flags_mix_freely(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run.yml"
    run.write_text("steps: 7\nlog_period: 3\n")
    words = (
        ["--devices", "4"],
        [str(run)],
        ["per_device_batch_size=2"],
        ["expansion_factor_real_data=-1"],
    )
    plans = [
        plan_json(capsys, *itertools.chain.from_iterable(order))
        for order in (words, words[::-1], words[2:] + words[:2])
    ]
    assert plans[0] == plans[1] == plans[2]
    assert (plans[0]["total_steps"], plans[0]["global_batch_size_to_train_on"]) == (7, 8)


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("flags", [[], ["--json"], ["--layout"], ["--words"]])
def test_a_plan_for_ten_thousand_devices_never_loads_jax(flags: list[str]) -> None:
    argv = [
        "plan",
        "model_name=llama3-405b",
        "global_batch_size=20480",
        "--devices",
        "10240",
        "--hosts",
        "2560",
    ]
    loaded = run_python(
        "import os, sys; os.environ.pop('JAX_PLATFORMS', None); from maxbatch.cli import main\n"
        f"assert main({[*argv, *flags]!r}) == 0\n"
        f"print('\\nloaded', sorted({LOOKED_FOR!r} & set(sys.modules)), 'rich' in sys.modules)"
    ).splitlines()[-1]
    assert loaded == f"loaded [] {flags != ['--json']}"


def test_importing_the_package_loads_none_of_its_parts() -> None:
    heavy = (*HEAVY, "numpy", "yaml", "ml_collections", "rich")
    assert (
        run_python(f"import sys, maxbatch; print(set({heavy!r}) & set(sys.modules))").strip()
        == "set()"
    )


def test_a_plan_answers_within_a_few_times_an_import_of_numpy() -> None:
    def seconds(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    plan = ("-m", "maxbatch", "plan", "--devices", "10240", "per_device_batch_size=2", "--json")
    bare = min(seconds("-c", "import numpy") for _ in range(3))
    assert min(seconds(*plan) for _ in range(3)) < 5 * bare


def test_a_reader_that_leaves_is_no_failure() -> None:
    code = (
        "import os, sys; from maxbatch.cli import main; r, w = os.pipe(); os.close(r); os.dup2(w, "
        "1);sys.exit(main(sys.argv[1:]))"
    )
    for flags in (["--json"], ["--layout"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "plan", *flags], stderr=subprocess.PIPE, text=True
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr
