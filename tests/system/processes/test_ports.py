"""Free ports of loopback."""

from __future__ import annotations

import socket

import pytest

from maxbatch.system.processes import ports


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        listener.listen()
        taken, free = listener.getsockname()[1], ports.free_port()
        monkeypatch.setattr(ports._CHANCE, "sample", lambda *_: [taken, free])
        assert ports.free_port() == free
