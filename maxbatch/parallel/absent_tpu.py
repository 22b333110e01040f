"""Finds this machine's TPU chips, and keeps JAX from starting a TPU library where there are
none.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

# PCI device ids of TPU chips, as JAX knows them (`jax/_src/hardware_utils.py`).
_GOOGLE = "0x1ae0"
_PCI_IDS = {
    "0x0027": "v3",
    "0x0056": "plc",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
}
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def tpu_version_here() -> str | None:
    """Returns the version of this machine's TPU chips; None if it has none, or JAX is kept from
    them.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return None
    ids = (_pci_id(vendor.parent) for vendor in _PCI_DEVICES.glob("*/vendor"))
    return next((_PCI_IDS[pci_id] for pci_id in ids if pci_id in _PCI_IDS), None)


def _pci_id(device: Path) -> str:
    """Returns the id of a Google device; an empty text for any other device."""
    try:
        vendor, number = ((device / name).read_text().strip() for name in ("vendor", "device"))
    except OSError:
        return ""
    return number if vendor == _GOOGLE else ""


def leave_out_absent_tpu() -> None:
    """Lets JAX start on the CPU alone where libtpu is installed (extra `tpu`) and the machine has
    no accelerator.

    JAX would start libtpu, which looks for a TPU and prints errors. The user's settings stay
    (`JAX_PLATFORMS`, `JAX_FORCE_TPU_INIT`), and so do plugins of other accelerators. Must come
    before JAX starts its backends.
    """
    if os.environ.get("JAX_PLATFORMS") or "JAX_FORCE_TPU_INIT" in os.environ:
        return
    if (
        importlib.util.find_spec("libtpu") is None
        or tpu_version_here() is not None
        or _has_plugins()
    ):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax = sys.modules.get("jax")
    if jax is not None and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")


def _has_plugins() -> bool:
    import importlib.metadata

    is_package = importlib.util.find_spec("jax_plugins") is not None
    return is_package or bool(importlib.metadata.entry_points(group="jax_plugins"))
