"""The item `ahead` of a checkpoint: what its task keeps for batches that are sampled and not yet
trained on.
"""

from __future__ import annotations

import hashlib

from maxbatch.run.folder.old_forms import refuse_old_ahead
from maxbatch.run.folder.position import CheckpointRecord
from maxbatch.system.errors import reading
from maxbatch.system.storage.storage import AnyPath

AHEAD_FILE = "ahead/batches"


def ahead_hash(content: bytes) -> str:
    """Returns the hash of the item that a checkpoint's record states."""
    return hashlib.sha256(content).hexdigest()


def read_ahead(checkpoint: AnyPath, record: CheckpointRecord) -> tuple[bytes | None, str | None]:
    """Reads the item of a checkpoint; returns it, or its damage.

    Raises:
      ConfigError: the system denies reading it, or it is in an old form.
    """
    if record.ahead is None:
        return None, None
    file = checkpoint / AHEAD_FILE
    with reading(file):
        try:
            ahead = file.read_bytes()
        except FileNotFoundError:
            refuse_old_ahead(file.parent)
            ahead = b""
    if ahead_hash(ahead) != record.ahead:
        return None, "what it holds for the batches ahead does not match its checksum"
    return ahead, None
