"""A machine in numbers, and the machines that remain when slices or hosts are lost."""

from __future__ import annotations

from typing import NamedTuple

from maxbatch.plan.mesh_shape import check_divides
from maxbatch.system.errors import ConfigError


class Machine(NamedTuple):
    """The devices of a run in numbers."""

    num_devices: int
    num_hosts: int = 1
    num_slices: int = 1

    @property
    def unit(self) -> str:
        """The unit of loss: a slice or, on a single slice, a host."""
        return "slices" if self.num_slices > 1 else "hosts"

    @property
    def num_units(self) -> int:
        """Slices or, on a single slice, hosts."""
        return self.num_slices if self.num_slices > 1 else self.num_hosts

    @property
    def name(self) -> str:
        """A name for the folder of its programs."""
        return f"slices-{self.num_slices}-hosts-{self.num_hosts}-devices-{self.num_devices}"

    def without(self, lost: int) -> Machine:
        """Returns the machine without `lost` of its slices or hosts."""
        units, remaining = self.num_units, self.num_units - lost
        return Machine(
            self.num_devices // units * remaining,
            self.num_hosts // units * remaining,
            remaining if self.num_slices > 1 else 1,
        )


def smaller_machines(machine: Machine, survive: int) -> list[Machine]:
    """Returns a machine, and the machines without 1 to `survive` of its slices or hosts.

    Raises:
      ConfigError: nothing would be left, or the slices or hosts are not alike.
    """
    units = machine.num_units
    if units == 1:
        raise ConfigError(
            f"--survive {survive}: counts slices (hosts, if there is one slice), and this machine "
            "has one of each; works: --slices 4, or --hosts 4"
        )
    if survive >= units:
        raise ConfigError(
            f"--survive {survive}: must be less than the {units} {machine.unit}; "
            f"works: --survive {units - 1}"
        )
    check_divides(f"--{machine.unit} ", units, machine.num_devices)
    if machine.num_hosts % units:
        raise ConfigError(
            f"--survive {survive}: needs slices of equally many hosts, and {machine.num_hosts} "
            f"hosts are not divisible by {units} slices; works: --hosts {units}"
        )
    return [machine.without(lost) for lost in range(survive + 1)]
