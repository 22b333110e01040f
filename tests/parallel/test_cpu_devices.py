"""CPU devices of a process: threads for all of their collectives, and an end if they hang all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.parallel.cpu_devices import give_cpu_devices_threads, make_cpu_devices

COUNT = "--xla_force_host_platform_device_count"


@pytest.fixture(autouse=True)
def no_devices_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "PJRT_NPROC", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")


def flags() -> list[str]:
    return os.environ["XLA_FLAGS"].split()


@pytest.mark.parametrize(("num_devices", "threads"), [(2, 8), (8, 32), (80, 256)])
def test_simulated_devices_have_threads_for_all_their_collectives(num_devices: int, threads: int) -> None:
    make_cpu_devices(num_devices)
    assert os.environ["PJRT_NPROC"] == str(threads)
    assert f"{COUNT}={num_devices}" in flags()
    assert "--xla_cpu_enable_concurrency_optimized_scheduler=false" in flags()


def test_devices_of_the_users_xla_flags_have_them_in_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x {COUNT}=4")
    assert main(["--version"]) == 0
    assert os.environ["PJRT_NPROC"] == "16" and flags()[:2] == ["--xla_dump_to=x", f"{COUNT}=4"]


def test_the_only_device_of_a_run_is_left_as_it_is_and_that_of_a_host_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
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


# JAX as the watching thread sees it: a call in its package that does not return.
FAKE = """
import hashlib, time
def default_backend(): return {backend!r}
def device_count(): return {devices}
class distributed:
    def is_initialized(): return {hosts}
def wait(): time.sleep(3)
def wait_for_core():
    time.process_time = lambda: 0.0  # it would compute, if others left it a core
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
"""
WATCHED = """
from maxbatch.parallel import cpu_devices
cpu_devices._POLL_S, cpu_devices._LIMIT_S, cpu_devices._LIMIT_OF_HOSTS_S = 0.1, 0.5, 60
cpu_devices.watch_cpu_devices()
import jax
jax.{waits}()
"""


@pytest.mark.runs
@pytest.mark.parametrize(
    ("backend", "devices", "hosts", "waits", "code"),
    [
        ("cpu", 2, False, "wait", 1),
        ("tpu", 2, False, "wait", 0),
        ("cpu", 2, True, "wait", 0),
        ("cpu", 1, False, "wait", 0),
        ("cpu", 2, False, "wait_for_core", 0),
    ],
)
def test_devices_that_wait_for_each_other_for_ever_end_the_process_and_those_that_wait_for_a_core_do_not(
    tmp_path: Path, backend: str, devices: int, hosts: bool, waits: str, code: int
) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(FAKE.format(backend=backend, devices=devices, hosts=hosts))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(waits=waits)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == code and all("in a collective" in line and "PJRT_NPROC=" in line for line in lines)
