"""Training processes on the nodes of a Ray cluster, each the child of a task that waits for its
end.

The run folder has to be the same on all nodes: in an object store, or on a file system that they
share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from maxbatch.around.child_runs.training_process import TrainingExit, TrainingProcess
from maxbatch.system.errors import EXIT_FAILED, EXIT_PASSING_FAULT, EXIT_STOPPED
from maxbatch.system.processes.ray_cluster import Cancelled, RayCluster
from maxbatch.system.processes.worker_pool import WorkerEnded
from maxbatch.system.storage.locks import take_lock
from maxbatch.system.storage.storage import AnyPath, as_path, kept_here

_LOCK_S = 60.0  # wait for the process of a task whose node was taken for lost
_POLL_S = 0.1


class RemoteTrainingProcess:
    """A process on a node, with the interface of `TrainingProcess`; a lost node's is started again
    on another.
    """

    def __init__(self, cluster: RayCluster, run_dir: AnyPath, arguments: Sequence[str]) -> None:
        self._task = cluster.start(_train, str(run_dir), arguments)

    def poll(self) -> TrainingExit | None:
        """Returns how the process ended; None while it runs or waits for a node."""
        if not self._task.is_done():
            return None
        try:
            return self._task.result()
        except Cancelled:
            return TrainingExit(EXIT_STOPPED, "")
        except WorkerEnded as end:
            return TrainingExit(EXIT_FAILED, str(end))

    def terminate(self) -> None:
        self._task.interrupt()

    def close(self) -> None:
        self._task.kill()


def _train(run_dir: str, arguments: Sequence[str]) -> TrainingExit:
    """Trains a run in a child process, which ends with this one; KeyboardInterrupt asks it to save
    and stop.
    """
    folder = as_path(run_dir)
    lock = take_lock(kept_here(folder) / ".claim", _LOCK_S)
    if lock is None:
        return TrainingExit(
            EXIT_PASSING_FAULT, f"{run_dir}: a process on another node still trains in it"
        )
    with lock:
        process = TrainingProcess(lock, folder, arguments)
    try:
        while True:
            try:
                while (ended := process.poll()) is None:
                    time.sleep(_POLL_S)
                return ended
            except KeyboardInterrupt:
                process.terminate()
    finally:
        process.close()
