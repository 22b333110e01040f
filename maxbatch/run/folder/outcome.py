"""The end of a run, in `outcome.json`. A run without the file trains, was stopped or was killed."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from maxbatch.run.folder.json_file import checked, read_json, write_json
from maxbatch.system.storage.storage import AnyPath

OUTCOME_FILE = "outcome.json"


class Status(StrEnum):
    """How a run ended.

    A diverging run records that itself. Trials of a sweep and branches of `critical-batch` are
    recorded by the command that started them.
    """

    DONE = "done"
    DIVERGED = "diverged"
    FAILED = "failed"
    PRUNED = "pruned"


class RecordedOutcome(NamedTuple):
    """The content of `outcome.json`; `reason` is one line, "" for a run that is done."""

    status: Status
    reason: str = ""


def write_outcome(run_dir: AnyPath, outcome: RecordedOutcome) -> None:
    """Records how a run ended.

    Raises:
      ConfigError: the file cannot be written.
      TrainingError: the disk is full.
    """
    write_json(run_dir / OUTCOME_FILE, outcome._asdict())


def read_outcome(run_dir: AnyPath) -> RecordedOutcome | None:
    """Returns how a run ended; None if it has not ended."""

    def parse(fields: dict[str, str]) -> RecordedOutcome:
        checked(fields, {"status": str, "reason": str})
        return RecordedOutcome(Status(fields["status"]), fields["reason"])

    return read_json(run_dir / OUTCOME_FILE, "restore it, or remove it to train again", parse)
