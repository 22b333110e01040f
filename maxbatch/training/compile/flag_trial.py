"""A child process that loads the TPU compiler with the flags of `LIBTPU_INIT_ARGS`: `... flag_trial VERSION`.

libtpu ends a process with an unknown flag, and names the flag on standard error.
"""

from __future__ import annotations

import sys

import jax

from maxbatch.training.compile.target import find_target
from maxbatch.training.compile.topology import smallest_slice


def try_flags(version: str) -> None:
    """Compiles an addition for one device of a version; raises JaxRuntimeError if the compiler refuses a flag."""
    place = jax.sharding.SingleDeviceSharding(find_target(smallest_slice(version)).devices[0])
    jax.jit(lambda x: x + 1, in_shardings=place, out_shardings=place).lower(
        jax.ShapeDtypeStruct((8,), "int32")
    ).compile()


if __name__ == "__main__":
    try_flags(sys.argv[1])
