"""Simulated machines have a limit that a flag beyond it names."""

from __future__ import annotations

import socket

import pytest

from maxbatch.cli import main
from maxbatch.commands import simulation
from maxbatch.commands.simulation import free_port
from tests.helpers.tiny import TINY_RUN


@pytest.mark.parametrize(
    "command", [("train", *TINY_RUN), ("compile", *TINY_RUN), ("fit", *TINY_RUN)], ids=lambda words: words[0]
)
def test_more_devices_than_a_process_can_run_are_one_line(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--simulate-devices", "100000"]) == 2
    assert capsys.readouterr().err == (
        "maxbatch: error: --simulate-devices 100000: must be at most 2048; works: --simulate-devices 2048\n"
    )


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        (("--simulate-hosts", "100000"), "--simulate-devices 2048"),
        (("--simulate-devices", "1000", "--simulate-hosts", "1000"), "--simulate-hosts 64"),
    ],
)
def test_more_hosts_than_a_machine_can_run_are_one_line(
    flags: tuple[str, ...], limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *TINY_RUN, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"works: {limit}")


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        listener.listen()
        taken, free = listener.getsockname()[1], free_port()
        monkeypatch.setattr(simulation._CHANCE, "sample", lambda *_: [taken, free])
        assert free_port() == free
