"""Files of one host's part of a local checkpoint: blocks of arrays, with positions and checksums; no JAX.

A block is a rectangle of an array, the shard of one device. Its name, such as `3:0-16,0-64`, gives the array's index in
the state, and the first and the last index, exclusive, of each dimension.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np

from maxbatch.runs.position import CheckpointRecord, DamagedError
from maxbatch.system import bounded
from maxbatch.system.atomic_files import writing_atomically
from maxbatch.system.fences import BUILDING
from maxbatch.system.storage import AnyPath, as_path, remove_tree

_JSON, _BLOCKS, _WHOLE = "state.json", "blocks.bin", "newest-whole"
_ALIGNED = 64  # bytes, so that blocks are read into whole cache lines
_THREADS = 4
_MOST_BYTES = 64 << 20  # of the JSON
_MOST_DIGITS = 20  # of a step

Spans = tuple[tuple[int, int], ...]


class ArrayForm(NamedTuple):
    """An array of the state."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Place(NamedTuple):
    """The place of a block in its file, and the checksum of its bytes."""

    offset: int
    checksum: int


class StoredPart(NamedTuple):
    """The part of a state that one host keeps."""

    folder: Path
    record: CheckpointRecord
    forms: tuple[ArrayForm, ...]
    places: Mapping[str, Place]  # by the name of the block

    def read(self, name: str) -> np.ndarray | None:
        """Reads a block; None if it is damaged."""
        array, spans = block_of(name)
        shape, dtype = sides(spans), np.dtype(self.forms[array].dtype)
        place, size = self.places[name], math.prod(shape) * dtype.itemsize
        try:
            content = np.fromfile(self.folder / _BLOCKS, np.uint8, size, offset=place.offset)
        except OSError:
            return None
        if len(content) != size or zlib.crc32(content.data) != place.checksum:
            return None
        return content.view(dtype).reshape(shape)


def run_name(run_dir: AnyPath) -> str:
    """Returns the name of the folder of a run's states."""
    return f"run-{hashlib.blake2b(str(run_dir.absolute()).encode(), digest_size=8).hexdigest()}"


def state_folders(folder: Path) -> Iterator[Path]:
    """Yields the folders of states in a run's folder, of this host and others that share the path."""
    for host in folder.glob("host-*"):
        yield from (state for state in host.iterdir() if state.name.isdecimal())


def note_whole(host: Path, step: int) -> None:
    """Records in a host's folder that all hosts of its run have a whole state together.

    The note is only for messages. On a full disk the previous note, of an older state, is kept.
    """
    with contextlib.suppress(OSError), writing_atomically(host / _WHOLE) as file:
        file.write(str(step).encode())


def forget_whole(folder: Path) -> None:
    """Removes the notes of `note_whole` from a run's folder, including those of lost hosts."""
    for note in folder.glob(f"host-*/{_WHOLE}"):
        note.unlink(missing_ok=True)


def saved_here(directory: str, run_dir: AnyPath) -> int | None:
    """Returns the newest step known to be whole in local checkpoints, or None.

    Folders of states are no proof: other hosts may not have written theirs, and a host that received its state from
    others has none.
    """
    folder = Path(str(as_path(directory))) / run_name(run_dir)
    steps = (bounded.read_text(note, str(note), most=_MOST_DIGITS) for note in folder.glob(f"host-*/{_WHOLE}"))
    return max((int(step) for step in steps if step.isdecimal()), default=None)


def block_name(array: int, spans: Spans) -> str:
    """Returns the name of a block."""
    return f"{array}:{','.join(f'{first}-{last}' for first, last in spans)}"


def block_of(name: str) -> tuple[int, Spans]:
    """Parses a block's name into array and rectangle; raises ValueError for other text."""
    array, _, rest = name.partition(":")
    spans = [one.partition("-") for one in rest.split(",")] if rest else []
    return int(array), tuple((int(first), int(last)) for first, _, last in spans)


def sides(spans: Spans) -> tuple[int, ...]:
    """Returns the shape of a rectangle."""
    return tuple(last - first for first, last in spans)


def bytes_of(block: np.ndarray) -> np.ndarray:
    """Returns the bytes of a block, uint8[bytes]."""
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)


def write_part(
    folder: Path, record: CheckpointRecord, forms: Sequence[ArrayForm], blocks: Mapping[str, np.ndarray]
) -> None:
    """Writes a host's part of a state atomically and durably.

    Raises:
      OSError: the write failed, for instance on a full disk; nothing is left.
    """
    building = folder.parent / f"{BUILDING}{secrets.token_hex(8)}"
    try:
        building.mkdir(parents=True)
        content = {
            "record": record.to_json(),
            "arrays": forms,
            "blocks": [[name, *place] for name, place in _write_blocks(building / _BLOCKS, blocks).items()],
        }
        with open(building / _JSON, "xb") as file:
            file.write(json.dumps(content | {"checksum": _checksum(content)}).encode())
            file.flush()
            os.fsync(file.fileno())
        remove_tree(folder)
        building.rename(folder)
    except BaseException:
        remove_tree(building)
        raise


def _write_blocks(path: Path, blocks: Mapping[str, np.ndarray]) -> dict[str, Place]:
    offsets, end = {}, 0
    for name, block in blocks.items():
        offsets[name] = end
        end += -(-block.nbytes // _ALIGNED) * _ALIGNED
    with open(path, "xb") as file, ThreadPoolExecutor(_THREADS) as threads:

        def write(name: str) -> Place:
            content = bytes_of(blocks[name]).data
            written = 0
            while written < len(content):  # the system writes at most 2 GB at a time
                written += os.pwrite(file.fileno(), content[written:], offsets[name] + written)
            return Place(offsets[name], zlib.crc32(content))

        places = dict(zip(blocks, threads.map(write, blocks), strict=True))
        os.fsync(file.fileno())
    return places


def read_part(folder: Path) -> StoredPart:
    """Reads a host's part of a state; blocks are checked when read.

    Raises:
      DamagedError: its JSON is missing or invalid.
    """
    try:
        content = bounded.read_json(folder / _JSON, str(folder / _JSON), most_bytes=_MOST_BYTES, finite=False)
        if content.pop("checksum") != _checksum(content):
            raise DamagedError("its JSON does not match its checksum")
        forms = tuple(ArrayForm(name, tuple(shape), dtype) for name, shape, dtype in content["arrays"])
        places = {name: Place(offset, checksum) for name, offset, checksum in content["blocks"]}
        return StoredPart(folder, CheckpointRecord.from_json(content["record"]), forms, places)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError("its JSON cannot be read") from None


def read_blocks(parts: Iterable[StoredPart], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Reads the blocks that have a sound copy in one of the parts."""

    def read(name: str) -> np.ndarray | None:
        copies = (part.read(name) for part in parts if name in part.places)
        return next((block for block in copies if block is not None), None)

    parts, names = list(parts), list(names)
    with ThreadPoolExecutor(_THREADS) as threads:
        found = zip(names, threads.map(read, names), strict=True)
        return {name: block for name, block in found if block is not None}


def missing_array(forms: Sequence[ArrayForm], names: Iterable[str]) -> str | None:
    """Returns the name of an array not covered by the blocks, or None."""
    covered = [0] * len(forms)
    for array, spans in map(block_of, names):
        covered[array] += math.prod(sides(spans))
    return next((form.name for form, size in zip(forms, covered, strict=True) if size != math.prod(form.shape)), None)


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
