"""A host that dies ends the others within `heartbeat_timeout_s`, which name it: real processes,
real collectives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from maxbatch.parallel import deaths, heartbeats
from maxbatch.parallel.deaths import death_of, silence_of
from maxbatch.parallel.heartbeats import backstop_of
from maxbatch.system.hardware.cpu_devices import variables_of_host
from maxbatch.system.processes.ports import free_port
from tests.helpers.command import environment, start
from tests.helpers.processes import children_of, wait_for
from tests.helpers.tiny import ONE_LAYER, TINY_RUN

TIMEOUT_S = 30
SMALLEST = (*TINY_RUN, ONE_LAYER)

# A run that never ends, of which step 12 is saved.
IDLE = """
import sys, time
from pathlib import Path
from maxbatch.parallel.hosts import together
from maxbatch.system.errors import report
with together(report, int(sys.argv[1]), 300, lambda: 12):
    Path(sys.argv[2]).touch()
    time.sleep(600)
"""


def start_hosts(folder: Path, *command: str) -> list[subprocess.Popen[str]]:
    """Starts three hosts as a cluster does, without a parent that watches them; `HOST` is replaced
    by their index.
    """
    port = free_port()
    hosts = []
    for index in range(3):
        variables = environment() | variables_of_host(port, 3, index) | {"JAX_PLATFORMS": "cpu"}
        words = [sys.executable, *(word.replace("HOST", str(index)) for word in command)]
        with (folder / f"errors{index}").open("w") as errors:
            hosts.append(
                subprocess.Popen(
                    words,
                    env=variables,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            )
    return hosts


def lose(
    folder: Path,
    hosts: list[subprocess.Popen[str]],
    ready: list[Path],
    victim: int,
    how: signal.Signals,
) -> str:
    """Ends a host once all are ready; returns the error that every other one ended with, in time
    and with code 75.
    """
    try:
        wait_for(
            lambda: (
                all(path.exists() for path in ready)
                or any(host.poll() is not None for host in hosts)
            )
        )
        assert all(host.poll() is None for host in hosts), (folder / "errors0").read_text()
        started = time.monotonic()
        os.kill(hosts[victim].pid, how)
        others = [index for index in range(3) if index != victim]
        codes = [hosts[index].wait(timeout=4 * TIMEOUT_S) for index in others]
        took_s = time.monotonic() - started
        found = [(folder / f"errors{index}").read_text() for index in others]
        assert codes == [75, 75], found
        assert took_s < TIMEOUT_S
        said = {text.strip().splitlines()[-1].split(" for ")[0].split(";")[0] for text in found}
        assert len(said) == 1 and all(
            "is saved, and the same command continues" in text for text in found
        ), found
        return said.pop()
    finally:
        for host in hosts:
            host.kill()
            host.wait()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("victim", "how", "said"),
    [
        (2, signal.SIGKILL, "host 2 of 3 has died: no heartbeat"),
        (0, signal.SIGKILL, "host 0 of 3 has died: it has closed its connections"),
        (1, signal.SIGSTOP, "host 1 of 3 has died: no heartbeat"),
        (0, signal.SIGSTOP, "host 0 of 3 has died: it has not answered"),
    ],
)
def test_a_dead_host_is_named_and_ends_the_others_in_time(
    tmp_path: Path, victim: int, how: signal.Signals, said: str
) -> None:
    hosts = start_hosts(tmp_path, "-c", IDLE, str(TIMEOUT_S), str(tmp_path / "readyHOST"))
    ready = [tmp_path / f"ready{index}" for index in range(3)]
    assert lose(tmp_path, hosts, ready, victim, how) == f"maxbatch: error: {said}"


@pytest.mark.processes
def test_hosts_that_are_all_stopped_and_continued_go_on(tmp_path: Path) -> None:
    """As by Ctrl-Z and `fg`: all stop for longer than the timeout, but no host is silent while
    others watch.
    """
    hosts = start_hosts(tmp_path, "-c", IDLE, "10", str(tmp_path / "readyHOST"))
    try:
        ready = [tmp_path / f"ready{index}" for index in range(3)]
        wait_for(lambda: all(path.exists() for path in ready))
        for how, seconds in ((signal.SIGSTOP, 12), (signal.SIGCONT, 4)):
            for host in hosts:
                os.kill(host.pid, how)
            time.sleep(seconds)
        assert [host.poll() for host in hosts] == [None] * 3, (tmp_path / "errors1").read_text()
    finally:
        for host in hosts:
            host.kill()
            host.wait()


@pytest.mark.processes
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_a_simulated_host_that_is_stopped_ends_the_command_as_a_dead_one_does(
    tmp_path: Path, victims: tuple[int, ...]
) -> None:
    keys = (
        f"run_dir={tmp_path / 'run'}",
        "steps=100000",
        "checkpoint_period=2",
        "heartbeat_timeout_s=10",
    )
    process = start("train", *SMALLEST, *keys, "--simulate-hosts", "2")
    try:
        wait_for(lambda: (tmp_path / "run" / "checkpoints" / "2").exists(), process)
        hosts = sorted(children_of(process.pid))  # in the order in which they were started
        for victim in victims:
            os.kill(hosts[victim], signal.SIGSTOP)
        output, _ = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 75
    assert (
        f"maxbatch: error: host {victims[0]} of 2 has died: " in output
        and output.count("error") == 1
    )
    assert "is saved, and the same command continues" in output


@pytest.mark.processes
def test_a_host_that_dies_in_mid_update_is_named_by_those_that_compute_with_it(
    tmp_path: Path,
) -> None:
    """Their collectives fail at once, and they wait for the heartbeats to tell why."""
    keys = (
        f"run_dir={tmp_path / 'run'}",
        "steps=100000",
        "checkpoint_period=2",
        f"heartbeat_timeout_s={TIMEOUT_S}",
    )
    hosts = start_hosts(tmp_path, "-m", "maxbatch", "train", *SMALLEST, *keys)
    said = lose(tmp_path, hosts, [tmp_path / "run" / "checkpoints" / "2"], 2, signal.SIGKILL)
    assert said == "maxbatch: error: host 2 of 3 has died: no heartbeat"


def test_a_silence_leaves_time_to_end_and_jaxs_own_heartbeats_come_later() -> None:
    for timeout_s in (10, 15, 30, 300):
        assert timeout_s / 2 <= silence_of(timeout_s) <= timeout_s - 5
        assert backstop_of(timeout_s) > timeout_s


class Left(BaseException):
    """The end of the process."""


@pytest.mark.parametrize(("code", "is_refusal"), [(1, False), (2, True)])
def test_the_first_host_records_that_another_one_failed(
    code: int, is_refusal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Store:
        def key_value_set(self, *_: object, **__: object) -> None:
            pass

        def key_value_dir_get(self, _: str) -> list[tuple[str, str]]:
            return []

        def key_value_try_get(self, _: str) -> str:
            return json.dumps({"host": 1, "message": "its disk is full", "code": code})

    def left(code: int, is_first: bool) -> NoReturn:
        raise Left

    ends: list[tuple[str, bool]] = []
    monkeypatch.setattr(deaths, "_ON_END", [])
    monkeypatch.setattr(
        heartbeats, "coordination", lambda: SimpleNamespace(process_id=0, num_processes=2)
    )
    monkeypatch.setattr(heartbeats, "leave", left)
    monkeypatch.setattr(heartbeats, "POLL_S", 0.01)
    deaths.on_end(lambda cause, is_refusal: ends.append((cause, is_refusal)))
    with pytest.raises(Left):
        heartbeats.Heartbeats(Store(), "here:1", TIMEOUT_S, lambda: None)._talk()
    assert ends == [("host 1 failed", is_refusal)]


def test_the_exit_code_depends_on_a_checkpoint() -> None:
    said = "host 1 of 4 has died; step 12 is saved, and the same command continues"
    assert death_of(1, 4, "has died", lambda: 12) == (said, 75)
    assert death_of(1, 4, "has died", lambda: None) == ("host 1 of 4 has died; nothing is saved", 1)

    def gone() -> int:
        raise OSError("the store is gone")

    unknown = "host 1 of 4 has died; the last saved step cannot be read: the store is gone"
    assert death_of(1, 4, "has died", gone) == (unknown, 1)
