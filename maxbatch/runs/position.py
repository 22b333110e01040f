"""The JSON of a checkpoint: where the run stands, what it belongs to, and a checksum over itself; no JAX."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any, NamedTuple

from maxbatch.runs.metrics import samples_seen_at
from maxbatch.runs.noise_scale import NoiseScale
from maxbatch.system.errors import cannot_read
from maxbatch.system.remote_path import RemotePath
from maxbatch.system.storage import AnyPath, subfolders

_OWN_CHECKSUM = "json_checksum"
COMMITTED_FILE = "commit_success.txt"  # which Orbax writes last where folders cannot be renamed


class Position(NamedTuple):
    """Where a run stands: Python numbers, since 32-bit counters overflow at 2.1 billion tokens."""

    step: int = 0  # completed updates
    samples_seen: int = 0  # rows of the stream that were trained on
    skipped_updates: int = 0  # of the completed updates, those skipped as non-finite
    consecutive_skips: int = 0  # of those, the ones in a row at the end
    noise_scale: NoiseScale = NoiseScale()  # what was measured of the gradients' noise so far


class CheckpointRecord(NamedTuple):
    """What the JSON of a checkpoint says."""

    position: Position
    identity: dict[str, dict[str, Any]]  # what a run must agree with to resume it, in parts: "data" and "model"
    checksum: int  # of the arrays, 32 bits
    hosts: tuple[int, int]  # hosts of the run that wrote it, and those of them that loaded data

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object, which carries a checksum over itself."""
        saved = self._asdict() | {"position": self.position._asdict()}
        return saved | {_OWN_CHECKSUM: _checksum(saved)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> CheckpointRecord:
        """Returns the record that a JSON object holds; fields that a later version added are ignored.

        Raises:
          AttributeError, KeyError, TypeError, ValueError: it is no such object, or a value is out of its range.
        """
        step, samples_seen, skipped, in_a_row = (_whole(saved["position"][name]) for name in Position._fields[:4])
        trace, square, mass = map(_finite, saved["position"]["noise_scale"])
        position = Position(step, samples_seen, skipped, in_a_row, NoiseScale(trace, square, mass))
        num_hosts, num_loading_hosts = map(_whole, saved["hosts"])
        if not (
            in_a_row <= skipped <= step
            and 1 <= num_loading_hosts <= num_hosts
            and _whole(saved["checksum"]) < 2**32
            and all(isinstance(saved["identity"][part], dict) for part in ("data", "model"))
        ):
            raise ValueError("out of range")
        return cls(position, saved["identity"], saved["checksum"], (num_hosts, num_loading_hosts))


class DamagedError(Exception):
    """A checkpoint that cannot be trusted; the message is the reason."""


def read_record(run_dir: AnyPath, step: int) -> CheckpointRecord:
    """Returns what the JSON of a checkpoint says, once nothing contradicts it.

    A checkpoint whose checksum over its JSON holds is believed. One of an older version has none; it must agree with
    the metrics of its step, if there are any.

    Raises:
      DamagedError: the JSON is missing, or cannot be trusted.
      ConfigError: the system does not let it be read.
    """
    path = run_dir / "checkpoints" / str(step) / "position" / "metadata"
    try:
        saved: Any = json.loads(_content(path))
        own = saved.pop(_OWN_CHECKSUM, None)
        if _checksum(saved) != own and not (own is None and saved.keys() == set(CheckpointRecord._fields)):
            raise DamagedError("its JSON does not match its checksum")
        record = CheckpointRecord.from_json(saved)
    except OSError as error:
        raise cannot_read(path, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError("its JSON is not that of a checkpoint") from None
    if record.position.step != step:
        raise DamagedError(f"it says that it is of step {record.position.step}")
    if own is None:
        recorded = samples_seen_at(run_dir, step)
        if recorded and record.position.samples_seen not in recorded:
            raise DamagedError(f"metrics.jsonl says samples_seen {recorded[0]}, it says {record.position.samples_seen}")
    return record


def committed_steps(run_dir: AnyPath) -> list[int]:
    """Returns the steps of the checkpoints, newest first; the name of a half-written one is no number."""
    folder = run_dir / "checkpoints"
    try:
        names = subfolders(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise cannot_read(folder, error) from None
    steps = sorted((int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)), reverse=True)
    return [step for step in steps if is_committed(folder / str(step))]


def is_committed(checkpoint: AnyPath) -> bool:
    """Returns whether a folder named by a step is a whole checkpoint: on a disk always, since it was renamed there."""
    return not isinstance(checkpoint, RemotePath) or (checkpoint / COMMITTED_FILE).is_file()


def _content(path: AnyPath) -> str:
    if isinstance(path, RemotePath):
        try:
            return path.read_text()
        except FileNotFoundError:
            return "null"
    return path.read_bytes().decode() if path.is_file() else "null"


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a whole number")
    return value


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _checksum(saved: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()
