"""The flags of the TPU compiler: of the chip and the compiler, the user's own first, and nothing
without a TPU.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.cli import main
from maxbatch.config.config import Config
from maxbatch.parallel import hosts
from maxbatch.run.compile import flags
from maxbatch.run.compile.flags import (
    CHECKSUMS,
    INIT,
    VARIABLE,
    flags_in_force,
    flags_of,
    program_options,
    state_flags,
    text_of,
)
from maxbatch.run.compile.target import find_target
from maxbatch.system.hardware.chips import TPUS
from tests.helpers.command import maxbatch
from tests.helpers.tiny import TINY_RUN, tiny_config

FUSION = "--xla_tpu_enable_async_collective_fusion"
UNKNOWN = "--xla_tpu_of_no_compiler"
compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed"
)


@pytest.fixture(autouse=True)
def no_flags_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


@pytest.fixture
def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes every flag."""
    monkeypatch.setattr(flags, "_refused", lambda *_: {})
    monkeypatch.setattr(flags, "_try", lambda *_: None)


def devices_of(version: str) -> Any:
    return [SimpleNamespace(platform="tpu", device_kind=TPUS[version].kinds[0], process_index=0)]


def started(config: Config, version: str) -> Config:
    state_flags(config.libtpu_flags, config.data_cache_dir, version)
    return config.replaced(
        {"libtpu_flags": flags_in_force(config.libtpu_flags, devices_of(version))}
    )


@pytest.mark.parametrize("libtpu", ["0.0.42.1", "0.0.46", "0.0.52"])
@pytest.mark.parametrize("version", TPUS)
def test_auto_has_the_flags_of_the_chip_and_the_compiler_and_records_them(
    version: str, libtpu: str, takes_all: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flags, "_libtpu_name", lambda: libtpu)
    config = started(tiny_config(), version)
    assert config.libtpu_flags == text_of(flags_of(version)) and os.environ[VARIABLE] == ""
    options = program_options(config.libtpu_flags, devices_of(version))
    assert {f"--{name}": value for name, value in options.items()} == flags_of(version)
    has_sparse_cores = version in ("v5p", "v6e", "tpu7x")
    offloads = {name for name in options if "sparse_core_collective_offload" in name}
    assert bool(offloads) == has_sparse_cores
    assert (options.get("xla_enable_async_all_reduce") == "true") != has_sparse_cores
    fuses = FUSION.removeprefix("--") in options
    assert fuses == (version == "v5e" or libtpu == "0.0.42.1"), (
        "newer compilers refuse it elsewhere"
    )
    sums_inside = "xla_tpu_enable_async_collective_fusion_fuse_all_reduce" in options
    assert sums_inside == (version == "v5e"), (
        "a core of a v4 has too little vector memory for sums inside of products"
    )
    assert options["xla_jf_crs_combiner_threshold_in_bytes"] == "1048576", (
        "large sums are not joined into one"
    )
    memory = {"v4": None, "v6e": "65536" if libtpu == "0.0.42.1" else "98304"}
    assert options.get("xla_tpu_scoped_vmem_limit_kib") == memory.get(version, "65536"), (
        "in KiB, for one fusion"
    )


def test_flags_of_the_user_win_one_by_one(takes_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "--xla_tpu_scoped_vmem_limit_kib=98304 --xla_own=1")
    config = started(tiny_config(), "v5p")
    held = config.libtpu_flags.split()
    assert "--xla_tpu_scoped_vmem_limit_kib=98304" in held and "--xla_own=1" in held
    assert "--xla_tpu_scoped_vmem_limit_kib=65536" not in held
    options = program_options(config.libtpu_flags, devices_of("v5p"))
    assert options["xla_enable_async_all_gather"] == "true", "the others stay"
    assert not {"xla_tpu_scoped_vmem_limit_kib", "xla_own"} & options.keys(), (
        "libtpu reads these from the variable"
    )


@pytest.mark.parametrize("program", [INIT, CHECKSUMS])
def test_programs_without_collectives_worth_hiding_compile_without_the_flags_of_the_chip(
    program: str, takes_all: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = started(tiny_config(), "v6e")
    effort = {"xla_optimization_level": "EFFORT_O0"}
    few = {"xla_tpu_scoped_vmem_limit_kib": "4096", **effort}
    assert program_options(config.libtpu_flags, devices_of("v6e"), program) == few
    assert len(program_options(config.libtpu_flags, devices_of("v6e"), "eval-8")) > 10
    assert program_options("none", devices_of("v6e"), program) == {}
    monkeypatch.setenv(VARIABLE, "--xla_tpu_scoped_vmem_limit_kib=98304")
    assert program_options(config.libtpu_flags, devices_of("v6e"), program) == effort, (
        "flags of the user win"
    )


def test_the_recorded_flags_set_the_same_again(
    takes_all: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = started(
        tiny_config("libtpu_flags=--xla_own=1 --xla_enable_async_all_gather=true"), "v6e"
    )
    assert os.environ[VARIABLE] == "--xla_own=1", "flags of ours are options of each program"
    for config in (tiny_config(), once):
        monkeypatch.setenv(VARIABLE, "--xla_other=2" if config is not once else "--xla_own=1")
        first = started(config, "v6e")
        again = started(load_config(overrides=[f"libtpu_flags={first.libtpu_flags}"]), "v6e")
        assert again.libtpu_flags == first.libtpu_flags
        options = (program_options(one.libtpu_flags, devices_of("v6e")) for one in (first, again))
        assert next(options) == next(options)


def test_what_jax_adds_is_not_recorded(takes_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "--xla_tpu_use_enhanced_launch_barrier=true")
    assert started(tiny_config(), "v5p").libtpu_flags == text_of(flags_of("v5p"))
    assert "--xla_tpu_use_enhanced_launch_barrier=true" in os.environ[VARIABLE]


def test_none_sets_nothing(takes_all: None) -> None:
    config = started(tiny_config("libtpu_flags=none"), "v5p")
    assert (config.libtpu_flags, os.environ[VARIABLE]) == ("none", "")
    assert program_options("none", devices_of("v5p")) == {}


def test_without_a_tpu_nothing_is_set() -> None:
    state_flags("auto", "")
    cpu: Any = [SimpleNamespace(platform="cpu")]
    assert flags_in_force("auto", cpu) == "auto"
    assert os.environ[VARIABLE] == "" and program_options("--xla_a=1", cpu) == {}


def test_what_is_no_flag_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"libtpu_flags=fast: must be .*; works: libtpu_flags=auto"
    ):
        tiny_config("libtpu_flags=fast")


def test_a_flag_that_one_host_drops_is_dropped_on_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped = "--xla_enable_async_all_gather"
    monkeypatch.setattr(flags, "_refused", lambda *_: {})
    monkeypatch.setattr(
        hosts, "gather", lambda value: [value, [dropped] if isinstance(value, list) else value]
    )
    assert dropped not in flags_in_force("auto", devices_of("v5p"))
    assert dropped in capsys.readouterr().err


def test_hosts_with_other_flags_are_refused(
    takes_all: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hosts, "gather", lambda value: [value, [] if isinstance(value, list) else "--xla_own=1"]
    )
    with pytest.raises(
        ConfigError, match="libtpu_flags: must be the same on all hosts, and host 1 has --xla_own=1"
    ):
        flags_in_force("auto", devices_of("v5p"))


@compiler
@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize("version", TPUS)
def test_a_flag_of_ours_that_the_compiler_refuses_is_dropped_with_one_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = flags_of(version)
    monkeypatch.setattr(flags, "flags_of", lambda _: wanted | {UNKNOWN: "true"})
    target = find_target(f"{version}:{'2x2' if version in ('v5e', 'v6e') else '2x2x1'}")
    assert flags_in_force("auto", target.devices) == text_of(wanted)
    lines = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("maxbatch: warning")
    ]
    assert len(lines) == 1 and f"does not take {UNKNOWN}=true for a {version}" in lines[0]


@compiler
@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "rl", "compile", "fit"])
@pytest.mark.parametrize("source", ["libtpu_flags", VARIABLE])
def test_a_flag_of_the_user_that_the_compiler_refuses_is_named_before_anything_is_written(
    command: str, source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = []
    if source == VARIABLE:
        monkeypatch.setenv(VARIABLE, f"{UNKNOWN}=1")
    else:
        key = [f"libtpu_flags={UNKNOWN}=1"]
    monkeypatch.setattr(flags, "tpu_version_here", lambda: "v5p")
    topology = ["--topology", "v5p:2x2x1"] * (command in ("compile", "fit"))
    rl = ["dataset_type=arithmetic", "batch_size=2", "num_generations=2"] * (command == "rl")
    assert main([command, *TINY_RUN, *rl, *key, "run_dir=run", *topology]) == 2
    said = capsys.readouterr().err
    assert (
        f"maxbatch: error: {source}: the TPU compiler" in said
        and f"does not take {UNKNOWN} for a v5p" in said
    )
    assert not Path("run").exists()


@compiler
@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.skipif(flags._libtpu() < flags._FUSES_ONLY_ON_V5E, reason="older compilers take it")
def test_a_flag_of_the_user_that_the_compiler_calls_dangerous_is_refused() -> None:
    """In a process of its own, since the compiler reads these flags once."""
    stated = (
        f"libtpu_flags={FUSION}=true {FUSION}_fuse_all_gather=true "
        "--xla_enable_async_all_gather=true"
    )
    done = maxbatch("compile", *TINY_RUN, stated, "run_dir=run", "--topology", "v5p:2x2x1")
    assert done.returncode == 2 and not Path("run").exists()
    assert (
        f"libtpu_flags: the TPU compiler (libtpu {flags._libtpu_name()}) does not take {FUSION} "
        "for a v5p" in done.stderr
    )
