"""Functions on the hosts of a pod, without pytest."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxbatch.testing import Pod, PodError, run
from tests.helpers.command import environment

pytestmark = pytest.mark.processes


def devices_of(pod: Pod) -> tuple[int, int, int]:
    import jax

    return pod.host, jax.local_device_count(), jax.device_count()


def test_a_function_a_closure_and_a_lambda_return_by_host(
    capfd: pytest.CaptureFixture[str],
) -> None:
    factor = 7

    def printing(pod: Pod) -> int:
        print("host", pod.host)
        return factor * pod.host

    assert run(devices_of, devices=4, hosts=2) == [(0, 2, 4), (1, 2, 4)]
    started = time.monotonic()
    assert run(printing, devices=4, hosts=2) == [0, 7]
    assert run(lambda pod: pod.host + factor, devices=4, hosts=2) == [7, 8]
    assert time.monotonic() - started < 1
    assert capfd.readouterr().out == "host 0\nhost 1\n"


def test_a_function_that_raises_dies_or_hangs_is_told_with_its_host() -> None:
    def raising(pod: Pod) -> None:
        raise ValueError("wrong")

    def ending(pod: Pod) -> None:
        if pod.host == 1:
            os._exit(3)
        pod.barrier()

    with pytest.raises(PodError, match=r"(?s)^hosts 0, 1 failed:\nTraceback.*ValueError: wrong"):
        run(raising, devices=2, hosts=2)
    with pytest.raises(
        PodError, match=r"(?s)^host 1 ended with exit code 3\nhost 0 ran:\n.*in ending"
    ):
        run(ending, devices=2, hosts=2)
    with pytest.raises(
        PodError, match=r"(?s)^host 0 still ran after 2 s, the timeout of the call:\n.*in hanging"
    ):

        def hanging(pod: Pod) -> None:
            time.sleep(600)

        run(hanging, devices=1, timeout=2)


def test_hosts_that_died_in_between_are_replaced() -> None:
    def process_of(pod: Pod) -> int:
        return os.getpid()

    first, second = run(process_of, devices=2, hosts=2)
    os.kill(second, signal.SIGKILL)
    os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)
    assert not {first, second} & set(run(process_of, devices=2, hosts=2))


def test_a_call_has_the_folder_and_the_variables_of_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_AN_EARLIER_CALLER", "1")
    run(devices_of, devices=2, hosts=2)
    monkeypatch.delenv("OF_AN_EARLIER_CALLER")
    monkeypatch.setenv("OF_THE_CALLER", "2")
    monkeypatch.chdir(tmp_path)
    found = run(
        lambda pod: (os.getcwd(), {k: v for k, v in os.environ.items() if k[:3] == "OF_"}),
        devices=2,
        hosts=2,
    )
    assert found == [(str(tmp_path), {"OF_THE_CALLER": "2"})] * 2


def test_a_script_may_run_its_own_functions(tmp_path: Path) -> None:
    script = """
        from maxbatch.testing import run

        def double(pod):
            return 2 * pod.host

        if __name__ == "__main__":
            print(run(double, devices=2, hosts=2))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[0, 2]\n", done.stderr


def test_hosts_that_do_not_divide_the_devices_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=re.escape("devices=4, hosts=3: the hosts must divide the devices; works: hosts=2"),
    ):
        run(devices_of, devices=4, hosts=3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"devices": 2.0}, "devices=2.0: must be a whole number; works: devices=2"),
        ({"devices": "2"}, "devices='2': must be a whole number"),
        ({"devices": 2, "hosts": True}, "hosts=True: must be a whole number"),
        (
            {"devices": 2, "timeout": "5"},
            "timeout='5': must be a number of seconds above 0; works: timeout=60",
        ),
        ({"devices": 2, "timeout": None}, "timeout=None: must be a number"),
        ({"devices": 2, "timeout": math.nan}, "timeout=nan: must be a number"),
        ({"devices": 2, "timeout": 0}, "timeout=0: must be a number"),
    ],
)
def test_numbers_that_are_none_are_one_line(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        run(lambda pod: pod.host, **arguments)


def test_a_host_that_is_stopped_beside_a_large_message_ends_the_test_at_its_timeout() -> None:
    def stopping(pod: Pod) -> None:
        # whose hashes are more than a connection holds
        values = {str(i): np.full(8, i) for i in range(20_000)}
        if pod.host == 0:
            pod.stop(1, 1000)
        pod.same(values)

    started = time.monotonic()
    with pytest.raises(PodError, match="host 1 was stopped"):
        run(stopping, devices=2, hosts=2, timeout=15)
    assert time.monotonic() - started < 60


def test_a_child_that_a_function_forks_does_not_answer_in_its_hosts_place() -> None:
    def forking(pod: Pod) -> int:
        child = os.fork()
        if child == 0:
            return 0
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        raise ValueError("of the host itself")

    with pytest.raises(PodError, match="of the host itself"):
        run(forking, devices=2, hosts=2)


class Plain:
    """An object whose `repr` has its address."""

    def __init__(self, value: object) -> None:
        self.value = value


def test_texts_and_objects_are_compared_by_what_they_hold() -> None:
    def comparing(pod: Pod) -> list[str]:
        pod.same(
            {
                "text": "a" * 1000,
                "object": Plain({"b", "a", "c"}),
                "function": comparing,
                "bytes": b"1",
            }
        )
        problems = []
        for value in ("x" * 500 + str(pod.host), Plain(pod.host), "1" if pod.host else 1):
            try:
                pod.same(value)
            except AssertionError as error:
                problems.append(str(error).splitlines()[1])
        return problems

    text, plain, kinds = run(comparing, devices=2, hosts=2)[0]
    assert "x0' (503 characters) on host 0 | ..." in text and len(text) < 300
    assert plain == "x: Plain(value=0) on host 0 | Plain(value=1) on host 1"
    assert "on host 0 | str on host 1" in kinds
