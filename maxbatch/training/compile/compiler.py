"""One program compiled: the memory it lacks, and a second try with smaller fusions."""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

import jax

from maxbatch.training.compile.flags import VARIABLE

HBM = "hbm"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED, _AVAILABLE = (rf"(?P<{name}>[\d.]+[KMGT]?)B?" for name in ("needed", "available"))
# The wordings of the compilers for TPUs and GPUs; the first that matches counts.
_WANTED = (
    rf"Used {_NEEDED} of {_AVAILABLE} (?P<space>\w+)",
    rf"Scoped allocation with size {_NEEDED} and limit {_AVAILABLE} exceeded scoped (?P<space>\w+) limit",
    rf"\({_NEEDED}\) exceeds available (?P<space>HBM) \({_AVAILABLE}\)",
)

# Flags that make fusions larger, the dearest in on-chip memory first.
_FUSING = ("xla_tpu_enable_async_collective_fusion_fuse_all_reduce", "xla_tpu_enable_async_collective_fusion")


class Shortage(NamedTuple):
    """The memory that a program lacks, as the compiler's message names it."""

    space: str = HBM  # `hbm`, or memory of a core: `vmem`, `smem`
    needed: int | None = None  # bytes; None if the message does not name them
    available: int | None = None


LACKS_HBM = Shortage()


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether a compiler's error means that a program needs more memory than there is."""
    return "RESOURCE_EXHAUSTED" in str(error)


def shortage_in(message: str) -> Shortage:
    """Returns the memory that the compiler's message names as too small."""
    found = next(filter(None, (re.search(pattern, message) for pattern in _WANTED)), None)
    if found is None:
        named = re.search(r"in memory space (\w+)", message)
        return Shortage(named[1].lower() if named else HBM)
    return Shortage(found["space"].lower(), _num_bytes(found["needed"]), _num_bytes(found["available"]))


def _num_bytes(text: str) -> int:
    number = text.rstrip("KMGT")
    return round(float(number) * _UNITS[text[len(number) :]])


def compile_program(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program; if a fusion exceeds a core's memory, warns and compiles again without the flags that fuse.

    Raises:
      JaxRuntimeError: the compiler fails, also without these flags.
    """
    options: dict[str, bool | str] = {}
    while True:
        try:
            return lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            lacks = shortage_in(str(error))
            held = os.environ.get(VARIABLE, "").split()
            flag = next((flag for flag in _FUSING if flag not in options and f"--{flag}=true" in held), None)
            if not is_out_of_memory(error) or lacks.space == HBM or flag is None:
                raise
            options[flag] = "false"
            bytes_of = f"{lacks.needed} of {lacks.available} bytes of" if lacks.needed else "too much"
            print(
                f"maxbatch: warning: a fusion of this program needs {bytes_of} {lacks.space}; compiling it again with "
                f"--{flag}=false (stated in {VARIABLE} this takes no second compilation)",
                file=sys.stderr, flush=True,
            )  # fmt: skip
