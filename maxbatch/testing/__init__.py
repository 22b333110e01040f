"""Pods for tests: functions run on several simulated hosts of CPU devices, `jax.distributed` initialised.

With pytest, `@pytest.mark.pod(devices=8, hosts=4)` runs a test on each of 4 processes of 2 devices, and the fixture
`pod` is the `Pod` of a test. Without it, `run` does the same for a function. Nothing here knows a trainer.
"""

from __future__ import annotations

from maxbatch.testing.pod import Pod, PodError
from maxbatch.testing.running import run

__all__ = ["Pod", "PodError", "run"]
