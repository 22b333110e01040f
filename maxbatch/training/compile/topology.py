"""TPU slices on sale, in libtpu's terms. No JAX.

A slice is `VERSION:XxY[xZ]`, in chips. Wrap-around links, chips per host and JAX devices per chip are options of
libtpu, and its defaults match no slice on sale. Sources of the rules: MaxText's table of slices
(`accelerator_to_spec_map.py` in https://github.com/AI-Hypercomputer/maxtext) and each version's page under
https://docs.cloud.google.com/tpu/docs.
"""

from __future__ import annotations

import dataclasses
import math
import re

from maxbatch.config.values import nearest_name, shown
from maxbatch.system.chips import TPUS
from maxbatch.system.errors import ConfigError

_LARGEST = 2**14  # chips of a slice, above any on sale
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x", "ironwood": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class _Version:
    """The slices of a TPU version."""

    axes: int  # of its network
    wraps_from: int  # chips; an axis of a multiple of this length has wrap-around links
    wraps_whole: bool  # whether links wrap only if all axes are multiples: cubes of 4x4x4 joined by switches
    chip_config: str  # libtpu's name for the devices of a chip
    has_single_chip: bool = False  # whether a slice of one chip is sold


_VERSIONS = {
    # A chip's two cores are one device; `dense` leaves programs 1 GiB more.
    "v4": _Version(3, 4, True, "megacore_dense"),
    "v5e": _Version(2, 16, False, "default", has_single_chip=True),
    "v5p": _Version(3, 4, True, "megacore"),
    "v6e": _Version(2, 16, False, "default", has_single_chip=True),
    "tpu7x": _Version(3, 4, True, "default", has_single_chip=True),  # each core is a device
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of a TPU version."""

    version: str
    layout: tuple[int, ...]  # chips along each axis

    def __str__(self) -> str:
        return f"{self.version}:{'x'.join(map(str, self.layout))}"

    @property
    def num_chips(self) -> int:
        return math.prod(self.layout)

    @property
    def wrap(self) -> tuple[bool, bool, bool]:
        """Whether links wrap around, for each of three axes."""
        version = _VERSIONS[self.version]
        long = [size % version.wraps_from == 0 for size in self.layout]
        if version.wraps_whole:
            long = [all(long)] * len(long)
        x, y, z = (*long, False)[:3]
        return x, y, z

    @property
    def options(self) -> dict[str, object]:
        """Keyword arguments of `get_topology_desc` for the slice on sale."""
        chips_per_host = (1, 1, 1) if self.num_chips == 1 else (2, 2, 1)
        return {
            "chip_config_name": _VERSIONS[self.version].chip_config,
            "wrap": self.wrap,
            "chips_per_host_bounds": chips_per_host,
        }


def smallest_slice(version: str) -> str:
    """Returns the name of a version's slice of one host."""
    return str(Slice(version, _nearest_layout(version, "2x2")))


def parse_slice(topology: str) -> Slice:
    """Parses a slice such as `v5p:4x4x4`; raises ConfigError with the nearest name."""
    version, _, layout = topology.strip().lower().partition(":")
    version = _ALIASES.get(version, version)
    if version not in _VERSIONS:
        nearest = nearest_name(version, TPUS) or "v5p"
        raise ConfigError(
            f"--topology {shown(topology)}: must be VERSION:XxY[xZ], of {', '.join(TPUS)}; "
            f"works: --topology {Slice(nearest, _nearest_layout(nearest, layout))}"
        )
    axes, nearest_layout = _VERSIONS[version].axes, _nearest_layout(version, layout)
    found = Slice(version, nearest_layout)
    if str(found) != f"{version}:{layout}":
        rule = f"chips along {'three axes' if axes == 3 else 'two axes'}, in hosts of 2x2"
        raise ConfigError(
            f"--topology {shown(topology)}: must be {version}:{'XxYxZ'[: 2 * axes - 1]}, {rule}; "
            f"works: --topology {found}"
        )
    return found


def _nearest_layout(version: str, layout: str) -> tuple[int, ...]:
    """Returns the layout if the version has it, or else a near one."""
    sizes = [int(size) for size in re.findall(r"\d{1,6}", layout)] if re.search(r"\d", layout) else [2, 2]
    axes = _VERSIONS[version].axes
    if sizes == [1] * axes and _VERSIONS[version].has_single_chip:
        return tuple(sizes)
    sizes = [max(1, size) for size in sizes]
    if len(sizes) > axes:
        sizes = [*sizes[: axes - 1], math.prod(sizes[axes - 1 :])]
    sizes += [2] * (2 - len(sizes)) + [1] * (axes - max(2, len(sizes)))
    sizes[:2] = [max(2, 2 * round(size / 2)) for size in sizes[:2]]
    while math.prod(sizes) > _LARGEST:
        largest = sizes.index(max(sizes))
        sizes[largest] = max(2, sizes[largest] // 2 // 2 * 2)
    return tuple(sizes)
