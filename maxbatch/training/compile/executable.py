"""Compiled programs as bytes and back, without pickle.

The bytes are XLA's own format. Everything else that a call needs (argument trees, shapes, shardings, donation) comes
from lowering the program again, which takes seconds where compiling takes minutes.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def executable_bytes(compiled: jax.stages.Compiled) -> bytes:
    """Returns the executable of a compiled program in the compiler's own format."""
    executable: Any = compiled.runtime_executable()
    return executable.serialize()


def load_executable(content: bytes, lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
    """Returns the compiled program of an executable; nothing is compiled.

    Args:
      content: from `executable_bytes` of the same program.
      lowered: the program, lowered for the devices of the mesh. Its shardings are explicit, except for scalars.
      mesh: the devices.

    Raises:
      jax.errors.JaxRuntimeError: the bytes are not an executable for these devices.
    """
    # JAX has no public way to call an executable that it did not compile. This is the end of its own
    # `UnloadedMeshExecutable.from_hlo`, with the executable read where that function compiles it.
    from jax._src.interpreters import pxla

    lowering: Any = lowered._lowering
    facts = lowering.compile_args
    if facts["ordered_effects"] or facts["unordered_effects"] or facts["host_callbacks"] or facts["mut"]:
        raise ValueError("a program with side effects cannot be loaded")
    inputs, outputs = facts["global_in_avals"], facts["global_out_avals"]
    layouts = [(None,) * len(avals) for avals in (inputs, outputs)]  # the default ones
    executable = pxla.UnloadedMeshExecutable(
        xla_executable=facts["backend"].deserialize_executable(content, lowering._device_list),
        device_list=lowering._device_list,
        backend=facts["backend"],
        input_avals=inputs,
        input_shardings=_explicit(facts["in_shardings"], inputs, mesh),
        output_avals=outputs,
        output_shardings=_explicit(facts["out_shardings"], outputs, mesh),
        committed=facts["committed"],
        name=lowering._name,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=facts["keepalive"],
        host_callbacks=[],
        kept_var_idx=facts["kept_var_idx"],
        mut=None,
        xla_in_layouts=layouts[0],
        dispatch_in_layouts=layouts[0],
        xla_out_layouts=layouts[1],
        all_args_info=facts["all_args_info"],
        pgle_profiler=None,
    )
    return jax.stages.Compiled(
        executable.load(), lowering.const_args, lowered.args_info, lowered.out_tree, no_kwargs=True
    )


def _explicit(shardings: Any, avals: Any, mesh: Mesh) -> list[jax.sharding.Sharding]:
    """Returns the shardings with those of scalars, which may be left open, filled in."""
    filled = []
    for sharding, aval in zip(shardings, avals, strict=True):
        if not isinstance(sharding, jax.sharding.Sharding):
            if aval.ndim:
                raise ValueError(f"an array of shape {aval.shape} has no explicit sharding")
            sharding = NamedSharding(mesh, P())
        filled.append(sharding)
    return filled
