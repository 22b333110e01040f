"""Emulators of object stores as processes of their own, each behind the tests' proxy; once for a
whole session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from maxbatch.system.processes.ports import free_port

_TOP = Path(__file__).parents[2]
_SERVERS = {
    "gs": (
        "gcp_storage_emulator",
        ("-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--in-memory", "-q"),
    ),
    "s3": ("moto", ("-m", "moto.server", "-H", "127.0.0.1")),
}
SCHEMES = tuple(_SERVERS)
LEASE_WRITES = r"^(PUT|POST) .*\.lease"  # of a proxy's plan
_buckets = itertools.count()


@dataclasses.dataclass
class Store:
    """One emulated store, as clients see it: through the proxy."""

    scheme: str
    port: int  # of the proxy
    emulator: int  # the port of the emulator itself
    _newest: str = ""  # name of the bucket that was made last

    @property
    def environment(self) -> dict[str, str]:
        """What a user would set, and nothing else."""
        url = f"http://127.0.0.1:{self.port}"
        if self.scheme == "gs":
            return {"STORAGE_EMULATOR_HOST": url}
        keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
        return {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1", **keys}

    def bucket(self) -> str:
        """Makes a bucket and returns its URL."""
        name = f"bucket-{os.getpid()}-{next(_buckets)}"
        if self.scheme == "gs":
            status, _ = self._ask(
                "POST", "/storage/v1/b?project=test", json.dumps({"name": name}).encode()
            )
        else:
            status, _ = self._ask("PUT", f"/{name}", b"", {"x-amz-date": "20260101T000000Z"})
        assert status == 200, status
        self._newest = name
        return f"{self.scheme}://{name}"

    def plan(self, **fields: Any) -> None:
        """Plans the fate of requests from now on; without fields all succeed.

        Failures that are counted (`at_most`) are those of the newest bucket.
        """
        fields |= {"bucket": self._newest} if "at_most" in fields else {}
        assert self._ask("POST", "/__plan__", json.dumps(fields).encode())[0] == 200

    @contextlib.contextmanager
    def failing(self, **fields: Any) -> Iterator[None]:
        """Lets requests fail by plan for the length of a block."""
        self.plan(**fields)
        try:
            yield
        finally:
            self.plan()

    def forget(self) -> None:
        """Resets the counts."""
        self._ask("DELETE", "/__log__")

    def requests(self) -> list[list[Any]]:
        """Returns the requests to the newest bucket since `forget`: [seconds, method, path, bytes,
        status].

        Those to other buckets are left out: a lease that an earlier test did not give back may
        still be renewed.
        """
        return [
            request
            for request in json.loads(self._ask("GET", "/__log__")[1])
            if self._newest in request[2]
        ]

    def _ask(
        self, method: str, path: str, body: bytes = b"", headers: Any = None
    ) -> tuple[int, bytes]:
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        ) as connection:
            connection.request(method, path, body, headers or {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()


def on(scheme: str) -> pytest.MarkDecorator:
    """Runs a test of `store` on one of them: its promise is not a driver's, and others hold it on
    the other.
    """
    return pytest.mark.parametrize("store", [scheme], indirect=True)


@contextlib.contextmanager
def serving(scheme: str) -> Iterator[Store]:
    """Starts the emulator of a store and its proxy, and sets the environment that clients read."""
    package, arguments = _SERVERS[scheme]
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    upstream, port = free_port(), free_port()
    flag = ("--port", str(upstream)) if scheme == "gs" else ("-p", str(upstream))
    proxy = ("-m", "tests.helpers.store_proxy", str(port), f"http://127.0.0.1:{upstream}")
    started = [
        subprocess.Popen(
            [sys.executable, *a], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=_TOP
        )
        for a in ((*arguments, *flag), proxy)
    ]
    store = Store(scheme, port, upstream)
    try:
        for one in (upstream, port):
            _wait_for(one)
        with mock.patch.dict(os.environ, store.environment):
            yield store
    finally:
        for process in started:
            process.kill()
            process.wait()


def _wait_for(port: int) -> None:
    end = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert time.monotonic() < end, "the emulator does not start"
        time.sleep(0.05)
