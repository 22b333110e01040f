"""What to compile for: this machine's devices, or those of a TPU topology that is not here.

A topology's devices come from the TPU compiler itself (libtpu), which needs no TPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from maxbatch.system.chips import TPUS, Chip, chip_of
from maxbatch.system.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    import jax

_LARGEST = 2**14  # chips, more than any slice has

# libtpu looks for the TPU that it runs on, in files, at the metadata server and in these variables; the values only
# have to be well-formed. Nothing is run on a device, so several processes may load it side by side.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# A v4 chip shows as one device, as on real slices, only if its two cores are asked to work as one.
_CHIP_CONFIG = {"v4": {"chip_config_name": "megacore"}}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
      name: what a person calls them.
      devices: all of them, over all slices.
      num_slices: slices that they span.
      num_hosts: processes that a run on them has.
      chip: its public figures, None where they are not known.
      memory_bytes: what a program may use of one device; None where nobody says.
      memory_source: where that number is from, for a person.
      is_here: whether the devices are this machine's own.
    """

    name: str
    devices: tuple[jax.Device, ...]
    num_slices: int
    num_hosts: int
    chip: Chip | None
    memory_bytes: int | None
    memory_source: str
    is_here: bool

    @property
    def facts(self) -> Mapping[str, object]:
        """What an executable for these devices depends on; JSON."""
        return {
            "platform": self.devices[0].platform,
            "device_kind": self.devices[0].device_kind,
            "devices": len(self.devices),
            "slices": self.num_slices,
            "hosts": self.num_hosts,
        }


def find_target(topology: str | None, num_slices: int = 1) -> Target:
    """Return the devices to compile for.

    Args:
      topology: `VERSION:XxY[xZ]` in chips of one slice, such as `v5p:4x4x4`; None: this machine's devices.
      num_slices: slices of that topology.

    Raises:
      ConfigError: there is no such topology; the message names the nearest that there is.
      TrainingError: the TPU compiler is not installed or cannot be loaded.
    """
    if topology is None:
        if num_slices > 1:
            raise ConfigError(f"--slices {num_slices}: slices are those of a topology; works: --slices 1")
        return here()
    name = checked_topology(topology)
    devices = _topology_devices(name, num_slices)
    chip = TPUS[name.split(":")[0]]
    hosts = len({device.process_index for device in devices})
    slices = f", {num_slices} slices" if num_slices > 1 else ""
    return Target(
        f"{name}{slices}",
        devices,
        num_slices,
        hosts,
        chip,
        chip.hbm_bytes,
        "the TPU compiler's",
        is_here=False,
    )


def here() -> Target:
    """Return this machine's own devices, and the memory that one of them has for a program."""
    import jax

    devices = tuple(jax.devices())
    first = devices[0]
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    stats = (first.memory_stats() or {}) if first.platform != "cpu" else {}
    chip = chip_of(first.device_kind)
    memory, source = stats.get("bytes_limit"), "what JAX may allocate of the device"
    if first.platform == "cpu":
        memory = host_memory() // len(devices)
        source = "the host's memory, shared by its CPU devices, since a CPU has no memory of its own"
    elif memory is None and chip is not None:
        memory, source = chip.hbm_bytes, "the TPU compiler's"
    kind = "CPU" if first.platform == "cpu" else first.device_kind
    name = f"this machine's {len(devices)} x {kind}"
    return Target(name, devices, slices, jax.process_count(), chip, memory, source, is_here=True)


def host_memory() -> int:
    """Return the bytes of main memory of this machine, or of its container where that has a limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def checked_topology(topology: str) -> str:
    """Return a topology's name as libtpu takes it, or raise ConfigError with the nearest that there is."""
    from maxbatch.config.values import nearest_name, shown

    version, _, layout = topology.strip().lower().partition(":")
    version = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x", "ironwood": "tpu7x"}.get(version, version)
    if version not in TPUS:
        nearest = nearest_name(version, TPUS) or "v5p"
        raise ConfigError(
            f"--topology {shown(topology)}: must be VERSION:XxY[xZ], of {', '.join(TPUS)}; "
            f"works: --topology {nearest}:{_nearest_layout(nearest, layout)}"
        )
    nearest_layout = _nearest_layout(version, layout)
    if layout != nearest_layout:
        rule = f"chips along {'three axes' if _axes(version) == 3 else 'two axes'}, in hosts of 2x2"
        raise ConfigError(
            f"--topology {shown(topology)}: must be {version}:{'XxYxZ'[: 2 * _axes(version) - 1]}, {rule}; "
            f"works: --topology {version}:{nearest_layout}"
        )
    return f"{version}:{layout}"


def _axes(version: str) -> int:
    return 2 if version in ("v5e", "v6e") else 3


def _nearest_layout(version: str, layout: str) -> str:
    """Return the layout itself where it is one of the version, else one near it."""
    sizes = [int(size) for size in re.findall(r"\d{1,6}", layout)] if re.search(r"\d", layout) else [2, 2]
    axes = _axes(version)
    sizes = [max(1, size) for size in sizes]
    if len(sizes) > axes:
        sizes = [*sizes[: axes - 1], math.prod(sizes[axes - 1 :])]
    sizes += [2] * (2 - len(sizes)) + [1] * (axes - max(2, len(sizes)))
    even = [max(2, 2 * round(size / 2)) for size in sizes[:2]]
    sizes = [*even, *sizes[2:]]
    while math.prod(sizes) > _LARGEST:
        largest = sizes.index(max(sizes))
        sizes[largest] = max(2, sizes[largest] // 2 // 2 * 2)
    return "x".join(map(str, sizes))


def _topology_devices(name: str, num_slices: int) -> tuple[jax.Device, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise TrainingError(
            f"--topology {name} needs the TPU compiler, which is not installed; run: pip install 'maxbatch[tpu]'"
        )
    for variable, value in _WITHOUT_TPU.items():
        os.environ.setdefault(variable, value)
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"  # the host's own work; the TPU is not here
    import jax
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(
            platform="tpu",
            topology_name=name,
            num_slices=num_slices,
            **_CHIP_CONFIG.get(name.split(":")[0], {}),
        )
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        message = " ".join(str(error).split())[:300]
        if "INVALID_ARGUMENT" in message:
            raise ConfigError(f"--topology {name}: the TPU compiler refuses it ({message})") from error
        raise TrainingError(f"the TPU compiler cannot be loaded: {message}") from error
    return tuple(description.devices)
