"""A function on the hosts of a pod, without pytest."""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import cloudpickle

from maxbatch.testing.hosts import Hosts, Pool, Round, Shape, checked_timeout
from maxbatch.testing.messages import Call, Returned
from maxbatch.testing.pod import Pod, PodError, named

T = TypeVar("T")


def run(
    function: Callable[[Pod], T], *, devices: int, hosts: int = 1, timeout: float = 60.0
) -> list[T]:
    """Calls a function once on each host of a simulated pod, and returns the results by host.

    The hosts are processes, each with `devices / hosts` CPU devices and `jax.distributed`
    initialised. Later calls with the same shape reuse them; they end with this process. Each call
    has the caller's working folder and environment variables, except for variables that JAX reads
    at its start, which stay as in the first call. Output is printed after the call.

    Args:
      function: takes the `Pod`; sent by value (cloudpickle) if it is a closure, a lambda or from
        `__main__`.
      devices: number of devices of the pod.
      hosts: number of hosts; must divide the devices.
      timeout: seconds that the call may take.

    Raises:
      PodError: the function raised on a host, a host died, or the call took too long; the message
        has the host and its traceback, or the stack of every host that was still running.
      ValueError: the hosts do not divide the devices, or the timeout is no number above 0.
    """
    shape, timeout = Shape.of(devices, hosts), checked_timeout(timeout)
    message = cloudpickle.dumps(function)
    pod = _POOL.get(shape)
    if pod.started.failures:
        raise PodError(_told(pod.started, pod.output()))
    with tempfile.TemporaryDirectory(prefix="maxbatch-pod-") as folder:
        call = Call(message, Path(folder), os.getcwd(), dict(os.environ))
        outcome = pod.perform(
            call, time.monotonic() + timeout, f"after {timeout:g} s, the timeout of the call"
        )
    output = pod.output()
    if outcome.failures:
        pod.kill()
        raise PodError(_told(outcome, output))
    print(*output.values(), sep="", end="", file=sys.stdout, flush=True)
    # A host killed by the function has no result.
    return [
        pickle.loads(answer.value)
        for _, answer in sorted(outcome.answers.items())
        if isinstance(answer, Returned)
    ]


def _start(shape: Shape) -> Hosts:
    return Hosts(shape, None, Path(os.getcwd()))


def _told(outcome: Round, output: dict[int, str]) -> str:
    """Returns every failure with its hosts, then the output of each host."""
    groups: dict[str, list[int]] = {}
    for failure in outcome.failures:
        groups.setdefault(f"{failure.what or 'failed'}:\n{failure.text}".rstrip(":\n"), []).append(
            failure.host
        )
    lines = [f"{named(sorted(hosts))} {text}".rstrip() for text, hosts in groups.items()]
    return "\n".join(
        [*lines, *(f"output of host {host}:\n{text.rstrip()}" for host, text in output.items())]
    )


_POOL = Pool(_start)
atexit.register(_POOL.close)
