"""The devices that a run recorded: one entry for each time that they changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from maxbatch.run.folder.devices import DevicesUsed, read_devices, record_devices

FOUR = DevicesUsed(1, "TPU v5p", 4, 1, 1, {"data": 1, "fsdp": 4})
EIGHT = DevicesUsed(11, "TPU v5p", 8, 2, 1, {"data": 2, "fsdp": 4})


def test_devices_are_recorded_where_they_change(tmp_path: Path) -> None:
    assert read_devices(tmp_path) == []
    for devices in (FOUR, dataclasses.replace(FOUR, first_step=6), EIGHT):
        record_devices(tmp_path, devices)
    assert read_devices(tmp_path) == [FOUR, EIGHT]


def test_devices_of_updates_that_are_redone_are_dropped(tmp_path: Path) -> None:
    record_devices(tmp_path, FOUR)
    record_devices(tmp_path, EIGHT)
    again = dataclasses.replace(FOUR, first_step=8)
    record_devices(tmp_path, again)
    assert read_devices(tmp_path) == [FOUR]
    record_devices(tmp_path, dataclasses.replace(EIGHT, first_step=1))
    assert read_devices(tmp_path) == [dataclasses.replace(EIGHT, first_step=1)]
