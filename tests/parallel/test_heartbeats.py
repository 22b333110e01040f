"""A host that dies ends the others within `heartbeat_timeout_s`, which name it: real processes, real collectives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxbatch.commands.simulation import free_port
from maxbatch.parallel.heartbeats import backstop_of, death_of, silence_of
from tests.helpers.command import environment
from tests.helpers.processes import wait_for
from tests.helpers.tiny import TINY_RUN

TIMEOUT_S = 30


def start_hosts(run_dir: Path, num_hosts: int) -> list[subprocess.Popen[str]]:
    """Starts the hosts of a run as a cluster does, without a parent that watches them."""
    keys = (f"run_dir={run_dir}", "steps=100000", "checkpoint_period=2", f"heartbeat_timeout_s={TIMEOUT_S}")
    cluster = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(num_hosts),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    command = [sys.executable, "-m", "maxbatch", "train", *TINY_RUN, *keys]
    hosts = []
    for index in range(num_hosts):
        variables = environment() | cluster | {"JAX_PROCESS_ID": str(index)}
        with (run_dir.parent / f"host{index}.txt").open("w") as errors:
            hosts.append(
                subprocess.Popen(
                    command,
                    env=variables,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            )
    return hosts


@pytest.mark.processes
@pytest.mark.parametrize(
    ("victim", "how", "said"),
    [
        (2, signal.SIGKILL, "host 2 of 3 has died: no heartbeat for "),
        (0, signal.SIGKILL, "host 0 of 3 has died: "),
        (1, signal.SIGSTOP, "host 1 of 3 has died: no heartbeat for "),
        (0, signal.SIGSTOP, "host 0 of 3 has died: it has not answered for "),
    ],
)
def test_a_dead_host_is_named_and_ends_the_others_in_time(
    tmp_path: Path, victim: int, how: signal.Signals, said: str
) -> None:
    hosts = start_hosts(tmp_path / "run", 3)
    try:
        wait_for(lambda: (tmp_path / "run" / "checkpoints" / "2").exists() or hosts[0].poll() is not None)
        assert hosts[0].poll() is None, (tmp_path / "host0.txt").read_text()
        started = time.monotonic()
        os.kill(hosts[victim].pid, how)
        for index, host in enumerate(hosts):
            if index != victim:
                host.wait(timeout=4 * TIMEOUT_S)
                errors = (tmp_path / f"host{index}.txt").read_text()
                assert host.returncode == 75, errors
                assert said in errors and "is saved, and the same command continues" in errors, errors
        assert time.monotonic() - started < TIMEOUT_S + 5, "5 s for a machine with other work"
    finally:
        for host in hosts:
            host.kill()
            host.wait()


def test_a_silence_leaves_time_to_end_and_jaxs_own_heartbeats_come_later() -> None:
    for timeout_s in (10, 15, 30, 300):
        assert timeout_s / 2 <= silence_of(timeout_s) <= timeout_s - 5
        assert backstop_of(timeout_s) > timeout_s


def test_the_exit_code_depends_on_a_checkpoint() -> None:
    assert death_of(1, 4, "has died", lambda: 12) == (
        "host 1 of 4 has died; step 12 is saved, and the same command continues", 75
    )  # fmt: skip
    assert death_of(1, 4, "has died", lambda: None) == ("host 1 of 4 has died; nothing is saved", 1)

    def gone() -> int:
        raise OSError("the store is gone")

    assert death_of(1, 4, "has died", gone)[1] == 1
