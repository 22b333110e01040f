"""The log of the state's hashes, with `reproducible_sums`."""

from __future__ import annotations

import numpy as np

from maxbatch.parallel.hosts import is_first
from maxbatch.run.folder.hashes_file import HASHES_FILE, ArrayHashes
from maxbatch.run.folder.metrics_log import StepLog
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.update.reproducible.hashes import StateHasher


class HashesLog:
    """A line of `hashes.jsonl` per update, written by the first host: the hash of every array.

    Drops lines of updates after `step`, which will be redone.

    Attributes:
      last: the hashes of the last update; empty before the first.
    """

    def __init__(self, folder: RunFolder, hasher: StateHasher, step: int) -> None:
        self._hasher = hasher
        self.last: ArrayHashes = {}
        self._log = StepLog(folder, HASHES_FILE, step) if is_first() else None

    def append(self, step: int, lanes_NxAx2: np.ndarray) -> str:
        """Adds the hashes after an update; returns that of the whole state, 16 hex digits.

        Raises:
          TrainingError: copies of an array differ.
        """
        hashes = self._hasher.read(lanes_NxAx2, step)
        self.last = hashes.of_arrays
        if self._log is not None:
            self._log.append({"step": step, "hashes": dict(self.last)})
        return hashes.of_state

    def sync(self) -> None:
        """Waits until every line so far is on disk, or in the store."""
        if self._log is not None:
            self._log.sync()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
