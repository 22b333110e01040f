"""The random id of a run, in `run.json` of its folder, and what its last session read.

Every state that the run writes carries it, so that the state of another run with the same `run_dir`
is not mistaken for one of this run. A copy of the folder keeps the id, because its states are the
original's. If `run.json` is lost, the next start takes the id from the newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping
from typing import TypedDict

from maxbatch.run.folder.json_file import checked
from maxbatch.system.storage import bounded
from maxbatch.system.storage.storage import AnyPath

RUN_FILE = "run.json"
_SHAPE = {
    "run_id": str,
    "is_older": bool,
    "start": str,
    "reads": {str: str},
    "software": {str: str},
}


class ForkedFrom(TypedDict):
    """The state that a fork began with."""

    run: str  # the folder of its run, at that time
    run_id: str | None  # None: of a run that was made before runs had ids
    step: int


_FORK_SHAPE = {"run": str, "run_id": str | None, "step": int}


def forked_from(value: object) -> ForkedFrom | None:
    """Returns the origin that a JSON value states, or None; raises TypeError for another form."""
    if value is None:
        return None
    origin: ForkedFrom = checked(value, _FORK_SHAPE)
    return {"run": origin["run"], "run_id": origin["run_id"], "step": origin["step"]}


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """The id of a run."""

    run_id: str
    # whether the run had begun before it had an id; some of its states may then have none
    is_older: bool
    start: str  # the last start on several hosts, a random text
    # by the last session: hashes by name
    reads: dict[str, str] = dataclasses.field(default_factory=dict)
    # its versions and settings, by name
    software: dict[str, str] = dataclasses.field(default_factory=dict)
    forked_from: ForkedFrom | None = None  # None: the run is no fork

    @classmethod
    def new(cls, is_older: bool, forked_from: ForkedFrom | None = None) -> RunIdentity:
        """Returns the identity of a new run, or of one of an older version that had no id."""
        return cls(secrets.token_hex(8), is_older, "", forked_from=forked_from)

    def started(self) -> RunIdentity:
        """Returns the identity with the mark of another start."""
        return dataclasses.replace(self, start=secrets.token_hex(8))

    def reading(self, reads: Mapping[str, str]) -> RunIdentity:
        """Returns the identity with the contents, by name, that a session reads beside its training
        data.
        """
        hashes = {
            name: hashlib.sha256(content.encode()).hexdigest()[:16]
            for name, content in reads.items()
        }
        return dataclasses.replace(self, reads=hashes)

    def running(self, software: Mapping[str, str]) -> RunIdentity:
        """Returns the identity with the versions and settings, by name, under which a session
        runs.
        """
        return dataclasses.replace(self, software=dict(software))

    def wrote(self, run_id: str | None) -> bool:
        """Returns whether a state with this id (None: without one) belongs to this run."""
        return run_id == self.run_id or (run_id is None and self.is_older)


def read_identity(run_dir: AnyPath) -> RunIdentity | None:
    """Returns the content of a run folder's `run.json`; None if it is missing or damaged.

    Raises:
      OSError: the system denies reading it.
    """
    path = run_dir / RUN_FILE
    try:
        fields = checked(bounded.read_json(path, str(path), finite=False), _SHAPE)
        fork = forked_from(fields.get("forked_from"))
    except (FileNotFoundError, bounded.RefusedContent, ValueError, TypeError):
        return None
    return RunIdentity(**{name: fields[name] for name in _SHAPE}, forked_from=fork)
