"""Ports of this machine for servers that are about to start."""

from __future__ import annotations

import random
import socket

# Below the ports that systems give to connections, of which one could take it before the server does.
_PORTS = range(20_000, 32_000)
_CHANCE = random.SystemRandom()  # no two processes draw the same, whatever their seeds


def free_port() -> int:
    """Returns a port of the loopback that nothing listens on."""
    for port in (*_CHANCE.sample(_PORTS, 100), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port))
            except OSError:
                continue
            _, found = probe.getsockname()
            return int(found)
    raise OSError("no port is free")
