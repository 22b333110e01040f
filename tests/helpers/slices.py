"""CPU devices that pass for slices of a TPU."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

# 8 devices in slices of 4: this mesh fits them only where the planner knows that they are slices.
TWO_SLICES = ("ici_fsdp_parallelism=4", "dcn_data_parallelism=-1")


def pretend_slices(monkeypatch: pytest.MonkeyPatch, devices_per_slice: int) -> None:
    """Makes `maxbatch.parallel.mesh` see the CPU devices as slices of so many."""

    def attribute(device: jax.Device, name: str, default: Any) -> Any:
        return (
            device.id // devices_per_slice
            if name == "slice_index"
            else getattr(device, name, default)
        )

    def hybrid(
        ici: tuple[int, ...], dcn: tuple[int, ...], devices: list[jax.Device], **_: bool
    ) -> np.ndarray:
        return np.asarray(devices).reshape(np.multiply(ici, dcn))

    monkeypatch.setattr("maxbatch.parallel.mesh.getattr", attribute, raising=False)
    monkeypatch.setattr("maxbatch.parallel.mesh.mesh_utils.create_hybrid_device_mesh", hybrid)
