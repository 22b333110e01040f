"""Proxies that the environment names, and connections that must not use them."""

from __future__ import annotations

import os

_VARIABLE = "no_grpc_proxy"


def leave_out_proxies(host: str) -> None:
    """Lets gRPC, over which the hosts talk, connect to a host directly, whatever proxies the
    environment names.

    gRPC reads `no_grpc_proxy`, and if it is not set `no_proxy`; other clients read neither or
    `no_proxy` alone.
    """
    names = (_VARIABLE, "no_proxy", "NO_PROXY")
    known = next((os.environ[name] for name in names if os.environ.get(name)), "")
    os.environ[_VARIABLE] = ",".join(dict.fromkeys([*filter(None, known.split(",")), host]))
