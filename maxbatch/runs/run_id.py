"""The random id of a run, in `run.json` of its folder, and what its last session read.

Every state that the run writes anywhere carries it, so that a state of another run which had the same `run_dir` is not
taken for one of this run. A copy of the folder keeps the id: its states are those of the original.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping

from maxbatch.runs.json_file import checked
from maxbatch.system import bounded
from maxbatch.system.storage import AnyPath

RUN_FILE = "run.json"
_SHAPE = {"run_id": str, "is_older": bool, "start": str, "reads": {str: str}}
_ADDED: dict[str, object] = {"reads": {}}  # fields that files of older versions lack


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """The id of a run."""

    run_id: str
    is_older: bool  # whether the run had begun before it had an id; some of its states may then have none
    start: str  # the last start on several hosts, a random text
    reads: dict[str, str] = dataclasses.field(default_factory=dict)  # by the last session: hashes by name

    @classmethod
    def new(cls, is_older: bool) -> RunIdentity:
        """Returns the identity of a run that gets its id now."""
        return cls(secrets.token_hex(8), is_older, "")

    def started(self) -> RunIdentity:
        """Returns it as another start writes it."""
        return dataclasses.replace(self, start=secrets.token_hex(8))

    def reading(self, reads: Mapping[str, str]) -> RunIdentity:
        """Returns it for a session that reads contents, given by name, beside its training data."""
        hashes = {name: hashlib.sha256(content.encode()).hexdigest()[:16] for name, content in reads.items()}
        return dataclasses.replace(self, reads=hashes)

    def wrote(self, run_id: str | None) -> bool:
        """Returns whether a state with this id, or (None) without one, is of this run."""
        return run_id == self.run_id or (run_id is None and self.is_older)


def read_identity(run_dir: AnyPath) -> RunIdentity | None:
    """Returns what a run folder's `run.json` holds; None if it is missing or damaged.

    Raises:
      OSError: the system does not let it be read.
    """
    path = run_dir / RUN_FILE
    try:
        found = checked(_ADDED | bounded.read_json(path, str(path), finite=False), _SHAPE)
    except (FileNotFoundError, bounded.RefusedContent, ValueError, TypeError):
        return None
    return RunIdentity(**{name: found[name] for name in _SHAPE})
