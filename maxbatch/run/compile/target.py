"""The devices to compile for: this machine's, or a TPU topology elsewhere.

The TPU compiler (libtpu) describes the devices of a topology; it needs no TPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxbatch.plan.survival import Machine
from maxbatch.run.compile.topology import Slice, parse_slice
from maxbatch.system.errors import ConfigError, TrainingError, one_line
from maxbatch.system.hardware.chips import TPUS, Chip, chip_of
from maxbatch.system.processes.stopping import keep_signals

if TYPE_CHECKING:
    import jax

_MOST_CHIPS = 2**16  # over all slices; the compiler describes them in a second

_BY_COMPILER = "the TPU compiler's"  # source of a memory size

# libtpu looks for its own TPU in files, at the metadata server and in these variables; their values
# only have to be well-formed. Nothing runs on a device, so several processes may load it at once.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# Variables that libtpu reads as the shape of its slice, whoever set them. They would contradict
# `--topology`, and a value that libtpu cannot parse ends the process.
_FORMS = ("ALT", "CHIPS_PER_HOST_BOUNDS", "HOST_BOUNDS", "WRAP")
_OF_ANOTHER_SLICE = (
    *_FORMS,
    *(
        f"TPU_{form}"
        for form in (
            "CHIPS_PER_HOST_BOUNDS",
            "HOST_BOUNDS",
            "TOPOLOGY",
            "TOPOLOGY_ALT",
            "TOPOLOGY_WRAP",
        )
    ),
    *(f"TPU_{form}" for form in ("CHIPS_PER_PROCESS_BOUNDS", "PROCESS_BOUNDS", "MEGACORE")),
    *(f"TPU_VISIBLE_{devices}" for devices in ("CHIPS", "DEVICES", "DEVICE_PATHS")),
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices to compile for."""

    name: str  # for users
    devices: tuple[jax.Device, ...]  # over all slices
    chip: Chip | None  # public figures of a device; None if unknown
    memory_bytes: int | None  # of one device, for a program; None if unknown
    memory_source: str  # source of that number, for users

    @property
    def num_hosts(self) -> int:
        """The number of processes of a run on them."""
        return len({device.process_index for device in self.devices})


def device_facts(devices: Sequence[jax.Device]) -> dict[str, object]:
    """Returns device facts that determine compiled programs, for JSON."""
    return {
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "slices": len({getattr(device, "slice_index", 0) for device in devices}),
        "hosts": len({device.process_index for device in devices}),
    }


def machine_name(devices: Sequence[jax.Device]) -> str:
    """Returns a name for devices by their numbers, for the folder of a smaller machine's
    programs.
    """
    slices, hosts = (
        {getattr(device, name, 0) for device in devices}
        for name in ("slice_index", "process_index")
    )
    return Machine(len(devices), len(hosts), len(slices)).name


def find_target(topology: str | None, num_slices: int = 1) -> Target:
    """Returns the slices of a topology (`VERSION:XxY[xZ]` in chips, such as `v5p:4x4x4`); None:
    this machine.

    Raises:
      ConfigError: there is no such topology, or too many slices; the message names the nearest that
        works.
      TrainingError: the TPU compiler is not installed or cannot be loaded.
    """
    if topology is None:
        if num_slices > 1:
            raise ConfigError(f"--slices {num_slices}: needs --topology; works: --slices 1")
        return here()
    sold = parse_slice(topology)
    chips = sold.num_chips
    if num_slices * chips > _MOST_CHIPS:
        raise ConfigError(
            f"--slices {num_slices}: slices of {chips} chips must have at most {_MOST_CHIPS:,} "
            f"chips together; works: --slices {_MOST_CHIPS // chips}"
        )
    devices, chip = _slice_devices(sold, num_slices), TPUS[sold.version]
    shown_name = f"{sold}, {num_slices} slices" if num_slices > 1 else str(sold)
    return Target(shown_name, devices, chip, chip.hbm_bytes, _BY_COMPILER)


def here() -> Target:
    """Returns this machine's devices, with a device's memory for a program."""
    import jax

    devices = tuple(jax.devices())
    kind, chip = devices[0].device_kind, chip_of(devices[0].device_kind)
    memory: int | None
    if devices[0].platform == "cpu":
        kind, memory = "CPU", host_memory() // len(devices)
        source = (
            "the host's memory, shared by its CPU devices, since a CPU has no memory of its own"
        )
    else:
        stats = devices[0].memory_stats() or {}
        memory, source = stats.get("bytes_limit"), "the device's memory that JAX may allocate"
        if memory is None and chip is not None:
            memory, source = chip.hbm_bytes, _BY_COMPILER
    return Target(f"this machine's {len(devices)} x {kind}", devices, chip, memory, source)


def host_memory() -> int:
    """Returns the main memory of this machine in bytes, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def _slice_devices(sold: Slice, num_slices: int) -> tuple[jax.Device, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise TrainingError(
            f"--topology {sold} needs the TPU compiler, which is not installed; run: pip install "
            "'maxbatch[tpu]'"
        )
    for variable in _OF_ANOTHER_SLICE:
        os.environ.pop(variable, None)
    os.environ.update(_WITHOUT_TPU)
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"  # for the host's own work
    import jax
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(
            str(sold), "tpu", num_slices=num_slices, **sold.options
        )
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        message = one_line(error, 300)
        if "INVALID_ARGUMENT" in message:
            raise ConfigError(
                f"--topology {sold}: the TPU compiler refuses it ({message})"
            ) from error
        raise TrainingError(f"the TPU compiler cannot be loaded: {message}") from error
    keep_signals()
    return tuple(description.devices)
