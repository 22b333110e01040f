"""Your own logger, which writes the record of each update to a CSV file, and your own data, a
function of the index.

python examples/own_logger.py
"""

from __future__ import annotations

import csv
import sys
from typing import Any

import numpy as np

import maxbatch

CONFIG = ["max_target_length=32", "vocab_size=64", "steps=5", "base_emb_dim=32", "head_dim=8"]
FIELDS = ("step", "samples_seen", "global_batch_size", "loss", "learning_rate", "data_fingerprint")


class Table(maxbatch.Output):
    """Writes records to a CSV file."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115  until close()
        self._rows = csv.DictWriter(self._file, FIELDS, extrasaction="ignore")
        self._rows.writeheader()

    def append(self, record: dict[str, Any]) -> None:
        """Takes the record of one update."""
        self._rows.writerow(record)

    def sync(self) -> None:
        """Flushes: a checkpoint commits only after its rows."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Counting:
    """Rows that count on from a random token: sample i depends on i alone, so that any position can
    be read again.
    """

    def __init__(self) -> None:
        # a checkpoint resumes only with an equal one
        self.identity = {"data": "counting", "version": 1}

    def __getitem__(self, index: int) -> np.ndarray:
        return (np.random.default_rng(index).integers(64) + np.arange(32)) % 64


def main(run_dir: str = "runs/own-logger") -> maxbatch.Outcome:
    """Trains the config's own model on counting rows; leaves `RUN_DIR.csv`."""
    config = maxbatch.load_config(overrides=[*CONFIG, f"run_dir={run_dir}"])
    return maxbatch.train(config, stream=Counting(), outputs=[Table(f"{run_dir}.csv")])


if __name__ == "__main__":
    main(*sys.argv[1:2])
