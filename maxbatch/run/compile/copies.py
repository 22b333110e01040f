"""A program for one device, compiled once for all devices of a host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from maxbatch.parallel.jax_internals import load_on_device
from maxbatch.run.compile.background import MakeExecutable
from maxbatch.run.compile.cache import without_persistent_cache


def executables(
    make: MakeExecutable,
    name: str,
    lower: Callable[[], jax.stages.Lowered],
    devices: Sequence[jax.Device],
) -> dict[jax.Device, jax.stages.Compiled]:
    """Compiles a program for the first device and loads it on the others.

    Args:
      make: compiles a program.
      lower: lowers it for the first device.
    """
    first, *others = devices
    lowered = lower()
    if not others:
        return {first: make(name, lambda: lowered)}
    # a program that JAX read from its cache does not serialise completely on CPUs
    with without_persistent_cache():
        compiled = make(name, lambda: lowered)
    executable = compiled.runtime_executable()
    assert executable is not None, "a compiled program has an executable"
    content = executable.serialize()
    return {first: compiled} | {d: load_on_device(content, lowered, d) for d in others}
