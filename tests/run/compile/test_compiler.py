"""A refusal names the missing memory; too large fusions are compiled smaller, with a message."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxbatch.cli import main
from maxbatch.run.compile import compiler
from maxbatch.run.compile.compiler import Shortage, compile_program, jit_with, shortage_in
from maxbatch.run.compile.flags import VARIABLE
from maxbatch.system.terminal.warning import warn_once
from tests.helpers.tiny import TINY_RUN

MIB = 2**20
FUSING = "xla_tpu_enable_async_collective_fusion_fuse_all_reduce"
VMEM = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for "
    "%fusion. Scoped allocation with size 16.50M and limit 16.00M exceeded scoped vmem limit by "
    "512.0K."
)
HBM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm."


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    warn_once.cache_clear()


class Lowered:
    """A program that compiles once a flag is off."""

    def __init__(self, message: str) -> None:
        self.message, self.asked = message, list[dict[str, Any] | None]()

    def compile(self, compiler_options: dict[str, Any] | None = None) -> str:
        self.asked.append(dict(compiler_options) if compiler_options else None)
        if not compiler_options:
            raise jax.errors.JaxRuntimeError(self.message)
        return "compiled"


@pytest.mark.parametrize(
    ("message", "shortage"),
    [
        (VMEM, Shortage("vmem", int(16.5 * MIB), 16 * MIB)),
        (
            "Ran out of memory in memory space smem. Used 1.50M of 1.00M smem.",
            Shortage("smem", int(1.5 * MIB), MIB),
        ),
        ("Ran out of memory in memory space vmem.", Shortage("vmem", None, None)),
        ("out of memory", Shortage("hbm", None, None)),
    ],
)
def test_a_shortage_names_its_memory(message: str, shortage: Shortage) -> None:
    assert shortage_in(message) == shortage


def test_fusions_that_exceed_a_core_are_compiled_smaller_and_the_flag_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, f"--{FUSING}=true")
    lowered: Any = Lowered(VMEM)
    assert compile_program(lowered) == "compiled"
    assert lowered.asked == [None, {FUSING: "false"}]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--{FUSING}=false" in line and "vmem" in line and str(16 * MIB) in line


class Refusing:
    """A compiler that does not take some options."""

    def __init__(self, *refused: str) -> None:
        self.refused, self.asked = refused, list[dict[str, Any] | None]()

    def compile(self, compiler_options: dict[str, Any] | None = None) -> str:
        self.asked.append(dict(compiler_options) if compiler_options else None)
        if named := [name for name in self.refused if name in (compiler_options or {})]:
            raise jax.errors.JaxRuntimeError(
                f"FAILED_PRECONDITION: Please disable it with {named[0]}=false"
            )
        return "compiled"


def test_options_that_the_compiler_refuses_are_dropped_with_one_warning_for_all_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {FUSING: "true", "xla_other": "1"}
    for _ in range(2):
        lowered: Any = Refusing(FUSING)
        assert compile_program(lowered, options) == "compiled"
        assert lowered.asked == [options, {"xla_other": "1"}]
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("maxbatch: warning: ") and f"--{FUSING}" in line and "xla_other" not in line
    )


def test_an_error_that_names_no_option_is_the_programs_own_once_it_has_none() -> None:
    lowered: Any = Lowered("INTERNAL: failed")
    lowered.compile = partial(_fail, lowered)
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_program(lowered, {"xla_other": "1"})
    assert lowered.asked == [{"xla_other": "1"}, None]


def _fail(lowered: Lowered, compiler_options: dict[str, Any] | None = None) -> str:
    lowered.asked.append(dict(compiler_options) if compiler_options else None)
    raise jax.errors.JaxRuntimeError(lowered.message)


@pytest.mark.parametrize(("message", "flags"), [(HBM, f"--{FUSING}=true"), (VMEM, "")])
def test_what_smaller_fusions_do_not_help_is_not_compiled_twice(
    message: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, flags)
    lowered: Any = Lowered(message)
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_program(lowered)
    assert lowered.asked == [None]


def test_compile_names_another_memory_than_hbm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(lowered: jax.stages.Lowered, options: object) -> None:
        raise jax.errors.JaxRuntimeError(VMEM)

    monkeypatch.setattr("maxbatch.run.compile.memory.compile_program", refuse)
    assert main(["compile", *TINY_RUN, "run_dir=run", "--json"]) == 1
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert record["lacks"] == {"space": "vmem", "needed": int(16.5 * MIB), "available": 16 * MIB}
    assert record["hbm_bytes_needed"] is None
    assert f"({int(16.5 * MIB)} bytes) of vmem" in said.err and f"({16 * MIB} bytes)" in said.err


def test_a_jitted_function_goes_on_without_an_option_that_the_compiler_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the real compiler of this machine, which knows no options of a TPU's."""
    add = jit_with({"xla_tpu_of_no_compiler": "true"})(jnp.add, donate_argnums=0)
    for rows in (2, 3, 2):
        total = jnp.ones(rows)
        assert add(total, jnp.ones(rows)).tolist() == [2.0] * rows and total.is_deleted()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("maxbatch: warning: ") and "--xla_tpu_of_no_compiler" in line


def test_a_jitted_function_compiles_once_for_each_kind_of_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options, compiled = {"xla_cpu_enable_fast_math": "false"}, list[Any]()

    def compile_counted(lowered: jax.stages.Lowered, stated: dict[str, str]) -> jax.stages.Compiled:
        compiled.append(stated)
        return compile_program(lowered, stated)

    monkeypatch.setattr(compiler, "compile_program", compile_counted)
    add = jit_with(options)(jnp.add)
    for value in (jnp.ones(2), jnp.zeros(2), jnp.ones(3), jnp.ones(2, jnp.int32), jnp.zeros(3)):
        add(value, value)
    assert compiled == [options] * 3
    assert jit_with({}) is jax.jit
