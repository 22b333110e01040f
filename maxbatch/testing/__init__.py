"""Pods for tests: functions run on several simulated hosts of CPU devices, with `jax.distributed`
initialised.

With pytest, `@pytest.mark.pod(devices=8, hosts=4)` runs a test on each of 4 processes of 2 devices,
and the fixture `pod` is the test's `Pod`. Without pytest, `run` does the same for a function.
Nothing here knows a trainer. Importing this package loads nothing, because every pytest session
imports it if maxbatch is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxbatch.testing.pod import Pod, PodError
    from maxbatch.testing.running import run

__all__ = ["Pod", "PodError", "run"]

_HOME = {
    "Pod": "maxbatch.testing.pod",
    "PodError": "maxbatch.testing.pod",
    "run": "maxbatch.testing.running",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'maxbatch.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
