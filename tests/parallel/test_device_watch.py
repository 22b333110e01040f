"""CPU devices that hang end their process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
from maxbatch.parallel import device_watch
device_watch._POLL_S, device_watch._LIMIT_S, device_watch._LIMIT_OF_HOSTS_S = 0.1, 0.5, 60
device_watch.watch_cpu_devices()
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
    (tmp_path / "jax" / "__init__.py").write_text(
        FAKE.format(backend=backend, devices=devices, hosts=hosts)
    )
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
    assert len(lines) == code and all(
        "in a collective" in line and "PJRT_NPROC=" in line for line in lines
    )
