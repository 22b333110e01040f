"""The devices that a run trained on, in `devices.json`: one entry for each time that they changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.errors import ConfigError

_FILE = "devices.json"


@dataclasses.dataclass(frozen=True)
class DevicesUsed:
    """The devices that a run trained on from one update on.

    Attributes:
      first_step: the first update on them, from 1.
      device_kind: what JAX calls one of them, such as `TPU v5p`.
      num_devices: devices of all hosts.
      num_hosts: processes.
      num_slices: TPU slices, 1 on other devices.
      mesh: mesh axis to size.
    """

    first_step: int
    device_kind: str
    num_devices: int
    num_hosts: int
    num_slices: int
    mesh: dict[str, int]


def record_devices(run_dir: Path, devices: DevicesUsed) -> None:
    """Adds the devices of a session that starts; entries of updates that will be redone are dropped.

    Raises:
      ConfigError: the file cannot be read or written.
    """
    history = [entry for entry in read_devices(run_dir) if entry.first_step < devices.first_step]
    if not history or dataclasses.replace(devices, first_step=history[-1].first_step) != history[-1]:
        history.append(devices)
    entries = [dataclasses.asdict(entry) for entry in history]
    write_atomically(run_dir / _FILE, json.dumps(entries, indent=1) + "\n")


def read_devices(run_dir: Path) -> list[DevicesUsed]:
    """Returns what a run trained on, the oldest first; nothing for a run that recorded none.

    Raises:
      ConfigError: the file cannot be read.
    """
    path = run_dir / _FILE
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in dataclasses.fields(DevicesUsed)]
        return [DevicesUsed(**{name: entry[name] for name in names}) for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error!r}); restore it, or remove it") from None
