"""CPU devices of a process have threads for all of their collectives."""

from __future__ import annotations

import os

import pytest

from maxbatch.cli import main
from maxbatch.system.hardware.cpu_devices import give_cpu_devices_threads, make_cpu_devices

COUNT = "--xla_force_host_platform_device_count"


@pytest.fixture(autouse=True)
def no_devices_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "PJRT_NPROC", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")


def flags() -> list[str]:
    return os.environ["XLA_FLAGS"].split()


@pytest.mark.parametrize(("num_devices", "threads"), [(2, 8), (8, 32), (80, 256)])
def test_simulated_devices_have_threads_for_all_their_collectives(
    num_devices: int, threads: int
) -> None:
    make_cpu_devices(num_devices)
    assert os.environ["PJRT_NPROC"] == str(threads)
    assert f"{COUNT}={num_devices}" in flags()
    assert "--xla_cpu_enable_concurrency_optimized_scheduler=false" in flags()


def test_devices_of_the_users_xla_flags_have_them_in_every_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x {COUNT}=4")
    assert main(["--version"]) == 0
    assert os.environ["PJRT_NPROC"] == "16" and flags()[:2] == ["--xla_dump_to=x", f"{COUNT}=4"]


def test_the_only_device_of_a_run_is_left_as_it_is_and_that_of_a_host_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_cpu_devices(1)
    assert os.environ["PJRT_NPROC"] == "" and flags() == [f"{COUNT}=1"]
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    make_cpu_devices(1)
    assert os.environ["PJRT_NPROC"] == "4"


def test_what_the_user_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = "--xla_cpu_enable_concurrency_optimized_scheduler=true"
    monkeypatch.setenv("XLA_FLAGS", f"{COUNT}=2 {own}")
    monkeypatch.setenv("PJRT_NPROC", "200")
    give_cpu_devices_threads()
    assert os.environ["PJRT_NPROC"] == "200"
    assert [flag for flag in flags() if flag.startswith(own[:-5])] == [own]
