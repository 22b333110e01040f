"""Free ports of loopback."""

from __future__ import annotations

import random
import socket

# Below the ports of outgoing connections, which could take the port before the server does.
_PORTS = range(20_000, 32_000)
_CHANCE = random.SystemRandom()  # so that no two processes draw the same, whatever their seeds


def free_port() -> int:
    """Returns a loopback port on which nothing listens."""
    for port in (*_CHANCE.sample(_PORTS, 100), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port))
            except OSError:
                continue
            _, bound_port = probe.getsockname()
            return int(bound_port)
    raise OSError("no port is free")
