"""Runs in every Python process of a run that a test holds: once it has recorded update HOLD_AFTER,
it waits until the file HOLD is gone. So the run is still there, whatever the machine does, when the
test kills or stops it.
"""

from __future__ import annotations

import os
import time
from typing import Any

from maxbatch.run.folder.metrics_log import MetricsLog

_append = MetricsLog.append


def _append_and_wait(self: MetricsLog, record: dict[str, Any]) -> None:
    _append(self, record)
    if record["step"] == int(os.environ["HOLD_AFTER"]):
        while os.path.exists(os.environ["HOLD"]):
            time.sleep(0.02)


MetricsLog.append = _append_and_wait  # type: ignore[method-assign]
