"""Functions on the hosts of a pod, without pytest."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from maxbatch.testing import Pod, PodError, run
from tests.helpers.command import environment

pytestmark = pytest.mark.processes


def devices_of(pod: Pod) -> tuple[int, int, int]:
    import jax

    return pod.host, jax.local_device_count(), jax.device_count()


def test_a_function_a_closure_and_a_lambda_return_by_host(capfd: pytest.CaptureFixture[str]) -> None:
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
    with pytest.raises(PodError, match=r"(?s)^host 1 ended with exit code 3\nhost 0 ran:\n.*in ending"):
        run(ending, devices=2, hosts=2)
    with pytest.raises(PodError, match=r"(?s)^host 0 still ran after 2 s, the timeout of the call:\n.*in hanging"):

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


def test_a_call_has_the_folder_and_the_variables_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_AN_EARLIER_CALLER", "1")
    run(devices_of, devices=2, hosts=2)
    monkeypatch.delenv("OF_AN_EARLIER_CALLER")
    monkeypatch.setenv("OF_THE_CALLER", "2")
    monkeypatch.chdir(tmp_path)
    found = run(lambda pod: (os.getcwd(), {k: v for k, v in os.environ.items() if k[:3] == "OF_"}), devices=2, hosts=2)
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
        [sys.executable, "script.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.stdout == "[0, 2]\n", done.stderr


def test_hosts_that_do_not_divide_the_devices_are_refused() -> None:
    with pytest.raises(
        ValueError, match=re.escape("devices=4, hosts=3: the hosts must divide the devices; works: hosts=2")
    ):
        run(devices_of, devices=4, hosts=3)
