"""Folders of local checkpoints: a run's, a host's, a state's; no JAX."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxbatch.run.folder.position import CheckpointRecord, DamagedError
from maxbatch.run.weights.shard_files import (
    DAMAGED,
    ArrayForm,
    StoredArrays,
    index_of,
    read_index,
    write_blocks,
)
from maxbatch.system.errors import reading
from maxbatch.system.storage import bounded
from maxbatch.system.storage.atomic_files import writing_atomically
from maxbatch.system.storage.fences import BUILDING
from maxbatch.system.storage.storage import AnyPath, as_path, remove_tree

_INDEX, _DATA, _WHOLE = "state.json", "blocks", "newest-whole"
_MOST_DIGITS = 20  # of a step


class StoredPart(NamedTuple):
    """The part of a state that one host keeps."""

    record: CheckpointRecord
    arrays: StoredArrays


class LostState(NamedTuple):
    """A local checkpoint of a run that cannot be used."""

    step: int
    why: str


def run_name(run_dir: AnyPath) -> str:
    """Returns the name of the folder of a run's states."""
    return f"run-{hashlib.blake2b(str(run_dir.absolute()).encode(), digest_size=8).hexdigest()}"


def state_folders(folder: Path) -> Iterator[Path]:
    """Yields the folders of states in a run's folder, of this host and others that share the
    path.
    """
    for host in folder.glob("host-*"):
        with reading(host):
            try:
                states = [state for state in host.iterdir() if state.name.isdecimal()]
            except OSError as error:
                if error.errno not in DAMAGED:
                    raise
                continue  # a dangling link, or a file: that host has no states here
        yield from states


def note_whole(host: Path, step: int) -> None:
    """Records in a host's folder that all hosts of its run have a whole state together.

    The note is only for messages. On a full disk the previous note, of an older state, is kept.
    """
    with contextlib.suppress(OSError), writing_atomically(host / _WHOLE) as file:
        file.write(str(step).encode())


def forget_whole(folder: Path) -> None:
    """Removes the notes of `note_whole` from a run's folder, including those of lost hosts."""
    for note in folder.glob(f"host-*/{_WHOLE}"):
        # a folder of this name is no note
        with contextlib.suppress(IsADirectoryError, PermissionError):
            note.unlink(missing_ok=True)


def saved_here(directory: str, run_dir: AnyPath) -> int | None:
    """Returns the newest step known to be whole in local checkpoints, or None.

    Folders of states are no proof: other hosts may not have written theirs, and a host that
    received its state from others has none.
    """
    folder = Path(str(as_path(directory))) / run_name(run_dir)
    steps = (_noted(note) for note in folder.glob(f"host-*/{_WHOLE}"))
    return max((int(step) for step in steps if step.isdecimal()), default=None)


def _noted(note: Path) -> str:
    """Returns the text of a note of `note_whole`; none if it is damaged, or no file."""
    try:
        return bounded.read_text(note, str(note), most=_MOST_DIGITS)
    except (OSError, bounded.RefusedContent):
        return ""


def write_part(
    folder: Path,
    record: CheckpointRecord,
    forms: Sequence[ArrayForm],
    blocks: Mapping[str, np.ndarray],
) -> None:
    """Writes a host's part of a state atomically and durably.

    Raises:
      OSError: the write failed, for instance on a full disk; nothing is left.
    """
    building = folder.parent / f"{BUILDING}{secrets.token_hex(8)}"
    try:
        files = write_blocks(building, _DATA, blocks)
        with open(building / _INDEX, "xb") as file:
            file.write(index_of(forms, files, record=record.to_json()))
            file.flush()
            os.fsync(file.fileno())
        remove_tree(folder)
        building.rename(folder)
    except BaseException:
        remove_tree(building)
        raise


def read_part(folder: Path) -> StoredPart:
    """Reads a host's part of a state; blocks are checked when read.

    Raises:
      DamagedError: its JSON is missing or invalid.
    """
    try:
        arrays, content = read_index(folder / _INDEX)
        return StoredPart(CheckpointRecord.from_json(content["record"]), arrays)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError("its JSON cannot be read") from None
