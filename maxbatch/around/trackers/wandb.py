"""`wandb`: Weights & Biases."""

from __future__ import annotations

import os
import uuid
from types import ModuleType

from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.record.loggers import TrackedOutput, TrackedRun, Tracker, numbers_of
from maxbatch.system.storage.storage import is_remote


class Wandb(TrackedOutput):
    """A run of Weights & Biases; with `WANDB_MODE=offline` it stays on this machine until `wandb
    sync`.

    Its project is `WANDB_PROJECT`, else "maxbatch".
    """

    def __init__(self, wandb: ModuleType, run: TrackedRun, run_id: str | None) -> None:
        self.run_id = run_id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "maxbatch"),
            name=run.name,
            id=self.run_id,
            config=run.settings,
            dir=None if is_remote(run.run_dir) else run.run_dir,
            resume="allow",
        )

    def append(self, record: Record) -> None:
        """Logs the numbers of a record; W&B skips steps repeated by a resume."""
        self._run.log(dict(numbers_of(record)), step=record[Metric.STEP])

    def close(self) -> None:
        """Waits until all records are sent or written."""
        self._run.finish()


TRACKER = Tracker(Wandb, "WANDB_MODE=offline, or `wandb login`")
