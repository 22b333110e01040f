"""All settings of JAX count for a comparison of hosts, except those that are known to be
harmless.
"""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from maxbatch.parallel.jax_settings import settings_in_force


def test_every_setting_counts_but_those_of_messages_caches_and_places() -> None:
    found = settings_in_force("cpu")
    assert len(found) > len(jax.config.values) / 2
    for name in (
        "JAX_RANDOM_SEED_OFFSET",
        "JAX_USE_SHARDY_PARTITIONER",
        "JAX_ENABLE_X64",
        "JAX_SOFTMAX_CUSTOM_JVP",
    ):
        assert name in found
    assert not {
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PLATFORMS",
        "JAX_LOG_COMPILES",
        "JAX_NUM_CPU_DEVICES",
    } & set(found)


def test_a_variable_that_no_loaded_module_has_read_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_OF_SOME_LATER_MODULE", "1")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    found = settings_in_force("cpu")
    assert found["JAX_OF_SOME_LATER_MODULE"] == "1" and "JAX_PROCESS_ID" not in found


def test_flags_count_by_the_value_in_force_in_any_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def flags(text: str) -> str:
        monkeypatch.setenv("XLA_FLAGS", text)
        return settings_in_force("cpu")["XLA_FLAGS"]

    assert flags("--b=1 --a=2 --xla_dump_to=/x") == flags("--a=3 --a=2 --b=1") == "--a=2 --b=1"
    assert flags("--a=2 --a=3") != flags("--a=3 --a=2")
    (tmp_path / "flags").write_text("--b=1\n--a=2\n")
    assert flags(str(tmp_path / "flags")) == "--a=2 --b=1"


def test_only_tpus_read_the_flags_of_their_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=1")
    assert settings_in_force("tpu")["LIBTPU_INIT_ARGS"] == "--xla_tpu_a=1"
    assert "LIBTPU_INIT_ARGS" not in settings_in_force("cpu")
