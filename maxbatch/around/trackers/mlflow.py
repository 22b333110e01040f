"""`mlflow`: MLflow."""

from __future__ import annotations

import os
import time
from types import ModuleType

from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.record.loggers import TrackedOutput, TrackedRun, Tracker, numbers_of

_FLUSH_S = 10.0
_MOST_IN_A_CALL = 100  # MLflow's limit per call of parameters or, in tens, metrics


class MLflow(TrackedOutput):
    """A run of MLflow at `MLFLOW_TRACKING_URI`, in the experiment `MLFLOW_EXPERIMENT_NAME`, else
    "maxbatch".
    """

    def __init__(self, mlflow: ModuleType, run: TrackedRun, run_id: str | None) -> None:
        from mlflow.entities import Metric as Point
        from mlflow.entities import Param

        self._point, self._client = Point, mlflow.MlflowClient()
        self.run_id = run_id or self._begin(run)
        params = [Param(name, str(value)[:6000]) for name, value in run.settings.items()]
        if run_id is None:
            for first in range(0, len(params), _MOST_IN_A_CALL):
                self._client.log_batch(self.run_id, params=params[first : first + _MOST_IN_A_CALL])
        self._waiting: list[object] = []
        self._flushed = time.monotonic()

    def _begin(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "maxbatch")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        return str(self._client.create_run(experiment_id, run_name=run.name).info.run_id)

    def append(self, record: Record) -> None:
        now = int(time.time() * 1000)
        self._waiting += [
            self._point(name, value, now, record[Metric.STEP]) for name, value in numbers_of(record)
        ]
        if len(self._waiting) > 5 * _MOST_IN_A_CALL or time.monotonic() - self._flushed > _FLUSH_S:
            self.sync()

    def sync(self) -> None:
        for first in range(0, len(self._waiting), 9 * _MOST_IN_A_CALL):
            self._client.log_batch(
                self.run_id, metrics=self._waiting[first : first + 9 * _MOST_IN_A_CALL]
            )
        self._waiting, self._flushed = [], time.monotonic()

    def close(self) -> None:
        self.sync()
        self._client.set_terminated(self.run_id)


TRACKER = Tracker(MLflow, "MLFLOW_TRACKING_URI=file:mlruns")
