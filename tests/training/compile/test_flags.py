"""The flags of the TPU compiler: set for the chip, the user's own first, and nothing without a TPU."""

from __future__ import annotations

import os

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.system.chips import TPUS
from maxbatch.training.compile.flags import VARIABLE, flags_of, with_flags
from tests.helpers.tiny import tiny_config


@pytest.fixture(autouse=True)
def no_flags_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


@pytest.mark.parametrize("version", TPUS)
def test_auto_sets_the_flags_of_the_chip_and_records_them(version: str) -> None:
    config = with_flags(tiny_config(), version)
    assert os.environ[VARIABLE] == config.libtpu_flags == flags_of(version)
    held = config.libtpu_flags.split()
    has_sparse_cores = version in ("v5p", "v6e", "tpu7x")
    assert ("--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true" in held) == has_sparse_cores
    assert ("--xla_enable_async_all_reduce=true" in held) != has_sparse_cores
    sums_inside = "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true" in held
    assert sums_inside == (version == "v5e"), "a core of a v4 has too little vector memory for sums inside of products"
    assert "--xla_jf_crs_combiner_threshold_in_bytes=1048576" in held, "large sums are not joined into one"


def test_flags_of_the_user_win_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "--xla_tpu_scoped_vmem_limit_kib=98304 --xla_own=1")
    held = with_flags(tiny_config(), "v5p").libtpu_flags.split()
    assert "--xla_tpu_scoped_vmem_limit_kib=98304" in held and "--xla_own=1" in held
    assert "--xla_tpu_scoped_vmem_limit_kib=65536" not in held
    assert "--xla_enable_async_all_gather=true" in held, "the others stay"


def test_the_recorded_flags_set_the_same_again() -> None:
    once = with_flags(tiny_config(), "v6e")
    assert with_flags(once, "v6e").libtpu_flags == once.libtpu_flags
    again = load_config(overrides=[f"libtpu_flags={once.libtpu_flags}"])
    assert with_flags(again, "v5p").libtpu_flags == once.libtpu_flags


def test_what_jax_adds_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "--xla_tpu_use_enhanced_launch_barrier=true")
    assert with_flags(tiny_config(), "v5p").libtpu_flags == flags_of("v5p")
    assert "--xla_tpu_use_enhanced_launch_barrier=true" in os.environ[VARIABLE]


def test_none_sets_nothing() -> None:
    config = with_flags(tiny_config("libtpu_flags=none"), "v5p")
    assert (config.libtpu_flags, os.environ[VARIABLE]) == ("none", "")


def test_without_a_tpu_nothing_is_set() -> None:
    config = tiny_config()
    assert with_flags(config) is config and config.libtpu_flags == "auto"
    assert os.environ[VARIABLE] == ""


def test_what_is_no_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"libtpu_flags=fast: must be .*; works: libtpu_flags=auto"):
        tiny_config("libtpu_flags=fast")
