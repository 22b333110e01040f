"""`maxbatch compile`: a run's programs ahead of time; `train` loads them and compiles nothing."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from maxbatch.cli import main
from maxbatch.run.compile.target import Target, here
from maxbatch.run.pretraining import train
from maxbatch.system.errors import ConfigError
from tests.helpers.tiny import ONE_LAYER, TINY_RUN, one_layer_config, read_metrics

RAMP = (
    "enable_rampup_batch_size=true",
    "per_device_batch_size_start=1",
    "per_device_batch_size_increment=1",
    "per_device_batch_size=3",
    "global_rampup_samples=64",
    "steps=10",
    "checkpoint_period=5",
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    # a program that came from the persistent cache cannot be saved, and a command is a new process
    jax.clear_caches()
    assert main(["compile", *TINY_RUN, ONE_LAYER, *RAMP, "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def backend_compiles() -> Iterator[collections.Counter[str]]:
    """Counts the XLA compilations of every thread, by the name of the function."""
    counted: collections.Counter[str] = collections.Counter()

    def on_event(event: str, seconds: float, **facts: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counted[str(facts.get("fun_name"))] += 1

    jax.monitoring.register_event_duration_secs_listener(on_event)
    yield counted
    jax.monitoring.unregister_event_duration_listener(on_event)


@pytest.mark.runs
def test_a_ramp_that_was_compiled_ahead_compiles_nothing(
    compiled: Path, backend_compiles: collections.Counter[str]
) -> None:
    jax.clear_caches()  # what other tests compiled must not help
    train(
        one_layer_config(
            *RAMP, "run_dir=ahead", f"compiled_dir={compiled}", "compilation_cache_dir=none"
        )
    )
    assert not backend_compiles
    ahead = read_metrics("ahead")
    assert ahead[-1]["compiles"] == 0
    assert {line["stage"] for line in ahead} == {0, 1, 2}
    train(one_layer_config(*RAMP, "run_dir=plain"))
    plain = read_metrics("plain")
    assert [line["data_fingerprint"] for line in ahead] == [
        line["data_fingerprint"] for line in plain
    ]
    assert [line["loss"] for line in ahead] == pytest.approx(
        [line["loss"] for line in plain], rel=1e-5
    )


@pytest.mark.runs
def test_a_resume_inside_the_ramp_compiles_nothing_either(
    compiled: Path, backend_compiles: collections.Counter[str]
) -> None:
    keys = (*RAMP, "run_dir=resumed", f"compiled_dir={compiled}", "compilation_cache_dir=none")
    train(one_layer_config(*keys))
    Path("resumed/checkpoints/10").rename("resumed/later")
    jax.clear_caches()
    train(one_layer_config(*keys))
    metrics = read_metrics("resumed")
    assert [line["step"] for line in metrics] == list(range(1, 11))
    assert metrics[-1]["compiles"] == 0
    assert not backend_compiles


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("base_mlp_dim=96", "base_mlp_dim: 64 there, 96 here"),
        ("per_device_batch_size=4", "per_device_batch_size: 3 there, 4 here"),
        ("dtype=bfloat16", "dtype: float32 there, bfloat16 here"),
    ],
)
def test_another_config_is_refused_with_the_difference(
    compiled: Path, changed: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        train(one_layer_config(*RAMP, changed, f"compiled_dir={compiled}"))


@pytest.mark.runs
def test_what_no_program_depends_on_may_change(compiled: Path) -> None:
    keys = ("learning_rate=1e-4", "data_shuffle_seed=3", "log_period=5", "run_dir=other")
    train(one_layer_config(*RAMP, *keys, f"compiled_dir={compiled}"))


@pytest.mark.parametrize(("part", "key"), [("versions", "jax"), ("devices", "devices")])
def test_another_version_or_machine_is_refused_with_the_difference(
    compiled: Path, tmp_path: Path, part: str, key: str
) -> None:
    manifest = json.loads((compiled / "manifest.json").read_text())
    manifest[part][key] = 99
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=f"{key}: 99 there, "):
        train(one_layer_config(*RAMP, f"compiled_dir={tmp_path}"))


@pytest.mark.parametrize("number", [1, 99])
def test_a_folder_of_another_format_is_refused_in_one_line(
    compiled: Path, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((compiled / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(
        json.dumps({**manifest, "format": number, "shapes": None})
    )
    assert main(["train", *TINY_RUN, ONE_LAYER, *RAMP, f"compiled_dir={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"format {number}" in line and "compile again" in line


class RunsCode:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (Path("code-ran"), "")


def test_a_crafted_folder_whose_programs_are_pickles_runs_nothing(
    compiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((compiled / "manifest.json").read_text())
    pickled = pickle.dumps(RunsCode())
    for name in manifest["programs"]:
        (tmp_path / f"{name}.bin").write_bytes(pickled)
        manifest["programs"][name] = hashlib.sha256(pickled).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert main(["train", *TINY_RUN, ONE_LAYER, *RAMP, f"compiled_dir={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not an executable for these devices" in line
    assert not Path("code-ran").exists()
    pickle.loads(pickled)
    assert Path("code-ran").exists(), "unpickled, it would have run"


def test_a_step_of_more_rows_than_the_run_has_is_refused(compiled: Path, tmp_path: Path) -> None:
    manifest = json.loads((compiled / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"shapes": [[10**9, 10**9]]}))
    with pytest.raises(ConfigError, match="states a step of 1000000000000000000 rows"):
        train(one_layer_config(*RAMP, f"compiled_dir={tmp_path}"))


def test_a_damaged_program_is_refused(compiled: Path, tmp_path: Path) -> None:
    for path in compiled.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = next(tmp_path.glob("step-*.bin"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is damaged"):
        train(one_layer_config(*RAMP, f"compiled_dir={tmp_path}"))


def test_what_does_not_fit_exits_with_1_and_the_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def target(topology: str | None, num_slices: int = 1) -> Target:
        return dataclasses.replace(here(), memory_bytes=10_000)

    monkeypatch.setattr("maxbatch.commands.compile.find_target", target)
    assert main(["compile", *TINY_RUN, ONE_LAYER, "--output", "out", "--json"]) == 1
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["hbm_bytes_needed"] > record["hbm_bytes_available"] == 10_000
    assert str(record["hbm_bytes_needed"]) in captured.err
    assert record["argument_bytes"] > record["alias_bytes"] > 0 and record["temp_bytes"] > 0
    assert not Path("out").exists()


@pytest.mark.runs
def test_json_has_the_largest_step_and_every_program(
    compiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *TINY_RUN, ONE_LAYER, "--output", "out", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["programs"]) == {path.stem for path in Path("out").glob("*.bin")}
    for key in (
        "argument_bytes",
        "temp_bytes",
        "alias_bytes",
        "hbm_bytes_needed",
        "hbm_bytes_available",
    ):
        assert isinstance(record[key], int)


@pytest.mark.runs
def test_a_cpu_has_no_clock_and_its_hlo_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["compile", *TINY_RUN, ONE_LAYER, "--output", "out", "--hlo", "texts", "--json"]) == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert {path.stem for path in Path("texts").glob("*.hlo")} == set(record["programs"])
    for figures in (record, *record["programs"].values()):
        for key in (
            "compute_cycles",
            "kernel_cycles",
            "hidden_collective_bytes",
            "exposed_collective_bytes",
            "modelled_step_s",
            "modelled_tokens_per_second_per_device",
            "modelled_mfu",
        ):
            assert figures[key] is None


@pytest.mark.parametrize("command", ["train", "compile", "fit"])
def test_attention_that_the_devices_cannot_do_is_refused_before_data_are_opened(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxbatch.run.pretraining.open_stream", None)
    assert main([command, *TINY_RUN, ONE_LAYER, "attention=cudnn"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "maxbatch: error: attention=cudnn: must run on NVIDIA GPUs, and the devices are cpu; "
        "works: attention=auto (here dot_product)"
    ]
