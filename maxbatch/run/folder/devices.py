"""The devices that a run trained on, in `devices.json`: one entry per change."""

from __future__ import annotations

import dataclasses
from typing import Any

from maxbatch.run.folder.json_file import checked, read_json, write_json
from maxbatch.system.storage.storage import AnyPath

DEVICES_FILE = "devices.json"


@dataclasses.dataclass(frozen=True)
class DevicesUsed:
    """The devices that a run trained on from one update on."""

    first_step: int  # the first update on them, from 1
    device_kind: str  # JAX's name of one of them, such as `TPU v5p`
    num_devices: int  # of all hosts
    num_hosts: int
    num_slices: int  # of a TPU; 1 on other devices
    mesh: dict[str, int]  # axis to size


_SHAPE = {field.name: int for field in dataclasses.fields(DevicesUsed)} | {
    "device_kind": str,
    "mesh": {str: int},
}


def record_devices(run_dir: AnyPath, devices: DevicesUsed) -> None:
    """Adds the devices of a starting session; drops entries of updates that will be trained
    again.
    """
    history = [entry for entry in read_devices(run_dir) if entry.first_step < devices.first_step]
    if (
        not history
        or dataclasses.replace(devices, first_step=history[-1].first_step) != history[-1]
    ):
        history.append(devices)
    write_json(run_dir / DEVICES_FILE, [dataclasses.asdict(entry) for entry in history])


def read_devices(run_dir: AnyPath) -> list[DevicesUsed]:
    """Returns the devices that a run trained on, oldest first; none if the run recorded none."""

    def parse(entries: object) -> list[DevicesUsed]:
        sessions: list[dict[str, Any]] = checked(entries, [_SHAPE])
        return [DevicesUsed(**{name: entry[name] for name in _SHAPE}) for entry in sessions]

    return read_json(run_dir / DEVICES_FILE, "restore it, or remove it", parse) or []
