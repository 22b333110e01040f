"""JAX's private names, where it has no public ones; nothing else imports one, of any library.

`pyproject.toml` allows no JAX that is newer than those tested. `tests/parallel/test_jax_internals.py` says what depends
on a name that is gone; `tests/training/compile/test_saved.py` loads saved programs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def coordination() -> Any:
    """Returns the state of `jax.distributed`: the `client` of its key-value store, `process_id`, `num_processes` and
    `coordinator_address`, known before any device is touched.
    """
    from jax._src.distributed import global_state

    return global_state


@functools.cache
def share_cached_cpu_programs(cpu: str) -> None:
    """Lets all processes of a run on CPUs find the programs that its first process caches; `cpu` describes the CPU.

    JAX lets only the first process write into the cache. The keys have a fingerprint of the topology, which on CPUs
    differs between processes, so the others would compile every program at every start.
    """
    from jax._src import cache_key

    hash_topology = cache_key._hash_accelerator_config

    def hash_topology_or_cpu(hash_obj: Any, accelerators: np.ndarray) -> None:
        if accelerators.flat[0].platform == "cpu":
            hash_obj.update(cpu.encode())
        else:
            hash_topology(hash_obj, accelerators)

    cache_key._hash_accelerator_config = hash_topology_or_cpu


def load_executable(content: bytes, lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
    """Builds a program from an executable; its shardings on the mesh are explicit, except for scalars.

    JAX has no public way to call an executable that it did not compile. This follows the end of its
    `UnloadedMeshExecutable.from_hlo`, but reads the executable instead of compiling it.
    """
    from jax._src.interpreters import pxla

    lowering: Any = lowered._lowering
    facts = lowering.compile_args
    effects = {name: facts[name] for name in ("ordered_effects", "unordered_effects", "host_callbacks", "mut")}
    if any(effects.values()):
        raise ValueError("a program with side effects cannot be loaded")
    inputs, outputs = facts["global_in_avals"], facts["global_out_avals"]
    layouts = [(None,) * len(avals) for avals in (inputs, outputs)]  # defaults
    executable = pxla.UnloadedMeshExecutable(
        xla_executable=facts["backend"].deserialize_executable(content, lowering._device_list),
        device_list=lowering._device_list,
        input_avals=inputs,
        input_shardings=_explicit(facts["in_shardings"], inputs, mesh),
        output_avals=outputs,
        output_shardings=_explicit(facts["out_shardings"], outputs, mesh),
        name=lowering._name,
        xla_in_layouts=layouts[0],
        dispatch_in_layouts=layouts[0],
        xla_out_layouts=layouts[1],
        pgle_profiler=None,
        **{name: facts[name] for name in ("backend", "committed", "keepalive", "kept_var_idx", "all_args_info")},
        **effects,
    )
    return jax.stages.Compiled(
        executable.load(), lowering.const_args, lowered.args_info, lowered.out_tree, no_kwargs=True
    )


def _explicit(
    shardings: Sequence[object], avals: Sequence[jax.core.ShapedArray], mesh: Mesh
) -> list[jax.sharding.Sharding]:
    """Returns the shardings, with missing ones of scalars filled in."""
    are_open = [not isinstance(sharding, jax.sharding.Sharding) for sharding in shardings]
    if any(is_open and aval.ndim for is_open, aval in zip(are_open, avals, strict=True)):
        raise ValueError("an array of the program has no explicit sharding")
    scalar = NamedSharding(mesh, P())
    return [sharding if isinstance(sharding, jax.sharding.Sharding) else scalar for sharding in shardings]
