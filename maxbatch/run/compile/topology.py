"""TPU slices on sale, in libtpu's terms. No JAX.

A slice is `VERSION:XxY[xZ]`, in chips, or Google's name of it, `VERSION-N`, in TensorCores (v4,
v5p, tpu7x) or chips (v5e, v6e). Wrap-around links, chips per host and JAX devices per chip are
options of libtpu, and its defaults match no slice on sale. Sources of the rules: MaxText's table of
slices (`accelerator_to_spec_map.py` in https://github.com/AI-Hypercomputer/maxtext) and each
version's page under https://docs.cloud.google.com/tpu/docs.
"""

from __future__ import annotations

import dataclasses
import math
import re

from maxbatch.config.values import first_of, nearest_name, shown
from maxbatch.system.errors import ConfigError
from maxbatch.system.hardware.chips import TPUS
from maxbatch.system.terminal.folding import counted
from maxbatch.system.terminal.warning import note

_LARGEST = 2**14  # chips of a slice, above any on sale
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x", "ironwood": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class _Version:
    """The slices of a TPU version."""

    axes: int  # of its network
    wraps_from: int  # chips; an axis of a multiple of this length has wrap-around links
    # whether links wrap only if all axes are multiples: cubes of 4x4x4 joined by switches
    wraps_whole: bool
    chip_config: str  # libtpu's name for the devices of a chip
    cores: int  # TensorCores per chip, which Google's names count; 1: they count chips
    # sizes of the slices with a name, in cubes of 4x4x4; none of a network of two axes
    cubes: tuple[int, ...]
    has_single_chip: bool = False  # whether a slice of one chip is sold
    devices: int = 1  # JAX devices of a chip


def _cube_like(number: int) -> tuple[int, int, int]:
    """Returns the three factors a <= b <= c of a number that are most alike: the default shape of
    a slice of that many cubes.
    """
    pairs = [(a, b) for a in range(1, number + 1) if number % a == 0 for b in range(a, number + 1)]
    triples = [
        (a, b, number // a // b)
        for a, b in pairs
        if number % (a * b) == 0 and number // a // b >= b
    ]
    return min(triples, key=lambda triple: triple[::-1])


# The named slices of v5p and tpu7x up to 6,144 chips: at most 61 cubes along an axis.
_CUBES_TO_96 = tuple(n for n in range(1, 97) if _cube_like(n)[-1] <= 61)
_VERSIONS = {
    # A chip's two cores are one device; `dense` leaves programs 1 GiB more.
    "v4": _Version(3, 4, True, "megacore_dense", 2, (1, 2, 3, 4, 8, 12, 16, 32)),
    "v5e": _Version(2, 16, False, "default", 1, (), has_single_chip=True),
    "v5p": _Version(3, 4, True, "megacore", 2, (*_CUBES_TO_96, 108, 140)),
    "v6e": _Version(2, 16, False, "default", 1, (), has_single_chip=True),
    "tpu7x": _Version(  # each core is a device
        3,
        4,
        True,
        "default",
        2,
        (*_CUBES_TO_96, 108, 128, 140, 144),
        has_single_chip=True,
        devices=2,
    ),
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
        """Chips of the slice."""
        return math.prod(self.layout)

    @property
    def num_devices(self) -> int:
        """JAX devices of the slice."""
        return self.num_chips * _VERSIONS[self.version].devices

    @property
    def num_hosts(self) -> int:
        """Hosts of the slice, each with 2x2 chips, or with the only one."""
        return -(-self.num_chips // 4)

    def in_words(self) -> str:
        """Returns its shape and its chips: "v5p:4x4x4, 64 chips (128 TensorCores)"."""
        cores = _VERSIONS[self.version].cores
        of_cores = f" ({self.num_chips * cores:,} TensorCores)" if cores > 1 else ""
        return f"{self}, {counted(self.num_chips, 'chip')}{of_cores}"

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
    """Parses a slice such as `v5p:4x4x4` or `v5p-128`; raises ConfigError with the nearest name."""
    if is_googles_name(topology):
        return _named_slice(topology)
    version, _, layout = topology.strip().lower().partition(":")
    version = _ALIASES.get(version, version)
    if version not in _VERSIONS:
        nearest = nearest_name(version, TPUS) or "v5p"
        raise ConfigError(
            f"--topology {shown(topology)}: must be VERSION:XxY[xZ], of {', '.join(TPUS)}; "
            f"works: --topology {Slice(nearest, _nearest_layout(nearest, layout))}"
        )
    axes, nearest_layout = _VERSIONS[version].axes, _nearest_layout(version, layout)
    rounded = Slice(version, nearest_layout)
    if str(rounded) != f"{version}:{layout}":
        rule = f"chips along {'three axes' if axes == 3 else 'two axes'}, in hosts of 2x2"
        raise ConfigError(
            f"--topology {shown(topology)}: must be {version}:{'XxYxZ'[: 2 * axes - 1]}, {rule}; "
            f"works: --topology {rounded}"
        )
    return rounded


def stated_slice(topology: str) -> Slice:
    """Returns the slice of `--topology`; notes the shape of one that Google names."""
    sold = parse_slice(topology)
    if is_googles_name(topology):
        note(f"--topology {shown(topology)} is {sold.in_words()}")
    return sold


def is_googles_name(topology: str) -> bool:
    """Returns whether a topology is stated by its number of TensorCores or chips, as in
    `v5p-128`.
    """
    version, dash, number = topology.strip().lower().partition("-")
    return _ALIASES.get(version, version) in _VERSIONS and bool(dash) and number.isdecimal()


def _named_slice(name: str) -> Slice:
    """Returns the slice of Google's name, in its default shape; raises ConfigError with the nearest
    name.
    """
    family, _, text = name.strip().lower().partition("-")
    version = _ALIASES.get(family, family)
    cores, number = _VERSIONS[version].cores, int(text[:9])
    layouts = {math.prod(layout) * cores: layout for layout in _default_layouts(version)}
    if len(text) > 9 or number not in layouts:
        nearest = min(layouts, key=lambda known: abs(known - number))
        unit = "TensorCores" if cores > 1 else "chips"
        sizes = [str(known) for known in layouts]
        known = first_of(sizes, 8) + (f", the last {sizes[-1]}" if len(sizes) > 8 else "")
        raise ConfigError(
            f"--topology {shown(name)}: no {version} slice of {shown(text)} {unit} is sold; there "
            f"are {known}; works: --topology {family}-{nearest}"
        )
    return Slice(version, layouts[number])


def _default_layouts(version: str) -> list[tuple[int, ...]]:
    """Returns the shapes of the named slices, from the smallest: those most like a cube, or a
    square.
    """
    sold = _VERSIONS[version]
    if sold.axes == 2:
        return [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
    single = [(1, 1, 1)] if sold.has_single_chip else []
    of_cubes = [tuple(4 * factor for factor in _cube_like(cubes)) for cubes in sold.cubes]
    return [*single, (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), *of_cubes]


def _nearest_layout(version: str, layout: str) -> tuple[int, ...]:
    """Returns the layout if the version has it, or else a near one."""
    sizes = (
        [int(size) for size in re.findall(r"\d{1,6}", layout)]
        if re.search(r"\d", layout)
        else [2, 2]
    )
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
