"""How a run ended, in `outcome.json`. A run that has none did not end: it trains, was stopped or was killed."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from maxbatch.runs.json_file import checked, read_json, write_json
from maxbatch.system.storage import AnyPath

OUTCOME_FILE = "outcome.json"


class Status(StrEnum):
    """How a run ended.

    A run that diverges records it itself. For trials of a sweep and branches of `critical-batch`, the command that
    started them records every end.
    """

    DONE = "done"
    DIVERGED = "diverged"
    FAILED = "failed"
    PRUNED = "pruned"


class RecordedOutcome(NamedTuple):
    """What `outcome.json` holds; `reason` is one line, "" for a run that is done."""

    status: Status
    reason: str = ""


def write_outcome(run_dir: AnyPath, outcome: RecordedOutcome) -> None:
    """Records how a run ended."""
    write_json(run_dir / OUTCOME_FILE, outcome._asdict())


def read_outcome(run_dir: AnyPath) -> RecordedOutcome | None:
    """Returns how a run ended, None for one that did not."""

    def parse(found: dict[str, str]) -> RecordedOutcome:
        checked(found, {"status": str, "reason": str})
        return RecordedOutcome(Status(found["status"]), found["reason"])

    return read_json(run_dir / OUTCOME_FILE, "restore it, or remove it to train again", parse)
