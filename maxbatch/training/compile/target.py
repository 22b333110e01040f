"""The devices to compile for: this machine's own, or those of a TPU topology that is not here.

The TPU compiler (libtpu) describes the devices of a topology; it needs no TPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxbatch.system.chips import TPUS, Chip, chip_of
from maxbatch.system.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    import jax

_LARGEST = 2**14  # chips of a slice, more than any has
_MOST_CHIPS = 2**16  # of all slices together; describing them takes the compiler a second

_BY_COMPILER = "the TPU compiler's"  # source of a memory size

# libtpu looks for its own TPU in files, at the metadata server and in these variables, whose values only have to be
# well-formed. Nothing runs on a device, so several processes may load it at the same time.
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
    """The devices to compile for."""

    name: str  # for a person
    devices: tuple[jax.Device, ...]  # over all slices
    chip: Chip | None  # public figures of a device; None if they are not known
    memory_bytes: int | None  # of one device, for a program; None if unknown
    memory_source: str  # of that number, for a person

    @property
    def num_hosts(self) -> int:
        """The processes of a run on them."""
        return len({device.process_index for device in self.devices})


def device_facts(devices: Sequence[jax.Device]) -> dict[str, object]:
    """Returns the facts of devices that compiled programs depend on, for JSON."""
    return {
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "slices": len({getattr(device, "slice_index", 0) for device in devices}),
        "hosts": len({device.process_index for device in devices}),
    }


def find_target(topology: str | None, num_slices: int = 1) -> Target:
    """Returns the slices of a topology (`VERSION:XxY[xZ]` in chips, such as `v5p:4x4x4`); None: this machine.

    Raises:
      ConfigError: there is no such topology, or it has too many slices; the message names the nearest that works.
      TrainingError: the TPU compiler is not installed or cannot be loaded.
    """
    if topology is None:
        if num_slices > 1:
            raise ConfigError(f"--slices {num_slices}: slices are those of a topology; works: --slices 1")
        return here()
    name = checked_topology(topology)
    version, _, layout = name.partition(":")
    chips = math.prod(map(int, layout.split("x")))
    if num_slices * chips > _MOST_CHIPS:
        raise ConfigError(
            f"--slices {num_slices}: slices of {chips} chips must have at most {_MOST_CHIPS:,} chips together; "
            f"works: --slices {_MOST_CHIPS // chips}"
        )
    devices, chip = _topology_devices(name, num_slices), TPUS[version]
    shown_name = f"{name}, {num_slices} slices" if num_slices > 1 else name
    return Target(shown_name, devices, chip, chip.hbm_bytes, _BY_COMPILER)


def here() -> Target:
    """Returns this machine's own devices, with the memory that one of them has for a program."""
    import jax

    devices = tuple(jax.devices())
    kind, chip = devices[0].device_kind, chip_of(devices[0].device_kind)
    memory: int | None
    if devices[0].platform == "cpu":
        kind, memory = "CPU", host_memory() // len(devices)
        source = "the host's memory, shared by its CPU devices, since a CPU has no memory of its own"
    else:
        stats = devices[0].memory_stats() or {}
        memory, source = stats.get("bytes_limit"), "what JAX may allocate of the device"
        if memory is None and chip is not None:
            memory, source = chip.hbm_bytes, _BY_COMPILER
    return Target(f"this machine's {len(devices)} x {kind}", devices, chip, memory, source)


def host_memory() -> int:
    """Returns the bytes of main memory of this machine, or of its container if that has a limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def checked_topology(topology: str) -> str:
    """Returns a topology's name as libtpu takes it; raises ConfigError with the nearest name if there is none."""
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
    """Returns the layout itself if the version has it, else one near it."""
    sizes = [int(size) for size in re.findall(r"\d{1,6}", layout)] if re.search(r"\d", layout) else [2, 2]
    axes = _axes(version)
    sizes = [max(1, size) for size in sizes]
    if len(sizes) > axes:
        sizes = [*sizes[: axes - 1], math.prod(sizes[axes - 1 :])]
    sizes += [2] * (2 - len(sizes)) + [1] * (axes - max(2, len(sizes)))
    sizes[:2] = [max(2, 2 * round(size / 2)) for size in sizes[:2]]
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
        os.environ["JAX_PLATFORMS"] = "cpu"  # for the host's own work
    import jax
    from jax.experimental import topologies

    try:
        options = _CHIP_CONFIG.get(name.split(":")[0], {})
        description = topologies.get_topology_desc(name, "tpu", num_slices=num_slices, **options)
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        message = " ".join(str(error).split())[:300]
        if "INVALID_ARGUMENT" in message:
            raise ConfigError(f"--topology {name}: the TPU compiler refuses it ({message})") from error
        raise TrainingError(f"the TPU compiler cannot be loaded: {message}") from error
    return tuple(description.devices)
