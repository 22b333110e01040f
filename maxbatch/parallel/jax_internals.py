"""JAX's private names, where it has no public ones; nothing else imports one, of any library.

`pyproject.toml` allows no JAX that is newer than those tested.
`tests/parallel/test_jax_internals.py` says what depends on a name that is gone;
`tests/run/compile/test_saved.py` loads saved programs.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.system.errors import one_line
from maxbatch.system.terminal.warning import note

# in which the first process has compiled a program, or the others compile it too
_LONGEST_COMPILATION_S = 120.0
_WAIT_MS = 500


def coordination() -> Any:
    """Returns the state of `jax.distributed`: the `client` of its key-value store, `process_id`,
    `num_processes` and `coordinator_address`, known before any device is touched.
    """
    from jax._src.distributed import global_state

    return global_state


def initialize_after(meet: Callable[[str, int, int, str | None], None], **arguments: Any) -> None:
    """Calls `jax.distributed.initialize`, and `meet` just before its service listens or its client
    connects.

    Args:
      meet: waits for all hosts; takes HOST:PORT of the first one, this host's index, the number of
        hosts, and on the first host the address to listen on. JAX may have found them in the
        environment of a cluster.
      arguments: of `jax.distributed.initialize`.
    """
    from jax._src import distributed

    module: Any = distributed
    library, state = module._jax, coordination()

    class Library:
        """JAX's native library."""

        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def get_distributed_runtime_service(self, bind: str, num_hosts: int, **more: Any) -> Any:
            meet(state.coordinator_address, 0, num_hosts, bind)
            return library.get_distributed_runtime_service(bind, num_hosts, **more)

        def get_distributed_runtime_client(self, address: str, host: int, **more: Any) -> Any:
            if host:
                meet(address, host, state.num_processes, None)
            return library.get_distributed_runtime_client(address, host, **more)

    # a warning about proxies, which are not used between hosts
    jax.config.update("jax_check_proxy_envs", False)
    module._jax = Library()
    try:
        jax.distributed.initialize(**arguments)
    finally:
        module._jax = library


@functools.cache
def replace_damaged_programs() -> None:
    """Has JAX replace a damaged entry of its persistent cache, as a kill while it is written leaves
    one.

    By itself JAX warns of the entry and compiles at every start, because it never writes over an
    entry.
    """
    from jax._src import compilation_cache

    read = compilation_cache.get_executable_and_time
    if getattr(read, "replaces_damaged", False):
        return

    @functools.wraps(read)
    def read_or_remove(
        cache_key: str, compile_options: Any, backend: Any, *rest: Any, **options: Any
    ) -> Any:
        try:
            return read(cache_key, compile_options, backend, *rest, **options)
        except Exception as error:  # of the decompression, or of the compiler
            cache: Any = compilation_cache._get_cache(backend)
            entry = cache.path / f"{cache_key}-cache"
            entry.unlink(missing_ok=True)
            note(f"{entry}: is damaged ({one_line(error, 120)}) and replaced")
            return None, None

    read_or_remove.replaces_damaged = True  # type: ignore[attr-defined]
    compilation_cache.get_executable_and_time = read_or_remove


def share_cached_cpu_programs(cpu: str, has_cache: bool) -> None:
    """Lets all processes of a run on CPUs take the programs that its first process caches, now or
    before.

    JAX lets only the first process write into the cache. The keys have a fingerprint of the
    topology, which on CPUs differs between processes, so the others would compile every program at
    every start. A process without a cache, or with one in another place than the first one's,
    compiles by itself. All processes call this once per run; a process may have several runs.

    Args:
      cpu: describes the CPU.
      has_cache: whether this process has a cache that it may share.
    """
    _FIRST_PROCESS.meet(_place_of_cache() if has_cache else "")
    if has_cache:
        _take_programs_of_the_first_process(cpu)


@functools.cache
def _take_programs_of_the_first_process(cpu: str) -> None:
    from jax._src import cache_key
    from jax._src import compiler as of_programs

    first, hash_topology = _FIRST_PROCESS, cache_key._hash_accelerator_config

    def hash_topology_or_cpu(hash_obj: Any, accelerators: np.ndarray) -> None:
        if first.shares_cache and accelerators.flat[0].platform == "cpu":
            hash_obj.update(cpu.encode())
        else:
            hash_topology(hash_obj, accelerators)

    cache_key._hash_accelerator_config = hash_topology_or_cpu
    compiler: Any = of_programs
    read, compile_and_write = compiler._cache_read, compiler._compile_and_write_cache

    def read_or_wait(
        name: str, key: str, options: Any, backend: Any, devices: Any, *more: Any
    ) -> Any:
        entry = read(name, key, options, backend, devices, *more)
        if not first.shares_cache or len({device.process_index for device in devices}) == 1:
            return entry
        first.tell("begun", key, _place_of_cache())
        if entry[0] is not None:
            first.tell("compiled", key)
        elif (
            first.told("begun", key) == _place_of_cache()
            and first.told("compiled", key) is not None
        ):
            entry = read(name, key, options, backend, devices, *more)
        return entry

    def compile_and_tell(*arguments: Any) -> Any:
        try:
            return compile_and_write(*arguments)
        finally:  # where it fails, the others find nothing in the cache, and compile
            if first.shares_cache:
                first.tell("compiled", arguments[-1])

    compiler._cache_read, compiler._compile_and_write_cache = read_or_wait, compile_and_tell


def _place_of_cache() -> str:
    return f"{platform.node()}:{jax.config.values['jax_compilation_cache_dir']}"


class _FirstProcess:
    """The first process's reports: programs that it looks for, and those it compiled or found."""

    def __init__(self) -> None:
        self.shares_cache = False  # this process has its cache in the same place
        self._said: set[str] = set()
        self._num_meetings = 0
        self._is_silent = False

    def meet(self, place: str) -> None:
        """Compares the places of the caches; "" is that of no cache."""
        # Keys name the folder of the cache, so a process that waits in another folder for a program
        # would wait for nothing.
        self._num_meetings += 1
        meeting = f"of run {self._num_meetings}"
        self.tell("place", meeting, place)
        self.shares_cache = self.told("place", meeting) in (None, place) and bool(place)

    def tell(self, event: str, program: str, value: str = "") -> None:
        """Publishes an event of a program, with a value, if this is the first process."""
        name, state = f"maxbatch/{event}/{program}", coordination()
        if state.process_id == 0 and name not in self._said:
            self._said.add(name)
            state.client.key_value_set(name, value)

    def told(self, event: str, program: str) -> str | None:
        """Waits for an event of a program in the first process; returns its value, or None if this
        is the first process, or the first one has no cache or dies.
        """
        state, until = coordination(), time.monotonic() + _LONGEST_COMPILATION_S
        while not (state.process_id == 0 or self._is_silent):
            try:
                # In short waits, between which signals are handled.
                value: str = state.client.blocking_key_value_get(
                    f"maxbatch/{event}/{program}", _WAIT_MS
                )
                return value
            except jax.errors.JaxRuntimeError as error:
                self._is_silent = "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() >= until
        return None


_FIRST_PROCESS = _FirstProcess()


def load_executable(content: bytes, lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
    """Builds a program from an executable; its shardings on the mesh are explicit, except for
    scalars.
    """
    facts = _facts(lowered)
    return _loaded(
        content,
        lowered,
        _lowering(lowered)._device_list,
        _explicit(facts["in_shardings"], facts["global_in_avals"], mesh),
        _explicit(facts["out_shardings"], facts["global_out_avals"], mesh),
    )


def load_on_device(
    content: bytes, lowered: jax.stages.Lowered, device: jax.Device
) -> jax.stages.Compiled:
    """Builds a program for one device from the executable of a program for another one."""
    from jax._src import compiler

    facts, place = _facts(lowered), jax.sharding.SingleDeviceSharding(device)
    inputs, outputs = (
        [place] * len(facts[avals]) for avals in ("global_in_avals", "global_out_avals")
    )
    devices: Any = place
    # otherwise the executable runs on the device that it was compiled for
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]])
    )
    return _loaded(
        content, lowered, devices._internal_device_list, inputs, outputs, compile_options=options
    )


def _lowering(lowered: jax.stages.Lowered) -> Any:
    return lowered._lowering


def _facts(lowered: jax.stages.Lowered) -> Any:
    return _lowering(lowered).compile_args


def _loaded(
    content: bytes,
    lowered: jax.stages.Lowered,
    devices: Any,
    in_shardings: Sequence[jax.sharding.Sharding],
    out_shardings: Sequence[jax.sharding.Sharding],
    **options: Any,
) -> jax.stages.Compiled:
    """Builds a program from an executable for a list of devices.

    JAX has no public way to call an executable that it did not compile. This follows the end of its
    `UnloadedMeshExecutable.from_hlo`, but reads the executable instead of compiling it.
    """
    from jax._src.interpreters import pxla

    lowering, facts = _lowering(lowered), _facts(lowered)
    effects = {
        name: facts[name]
        for name in ("ordered_effects", "unordered_effects", "host_callbacks", "mut")
    }
    if any(effects.values()):
        raise ValueError("a program with side effects cannot be loaded")
    inputs, outputs = facts["global_in_avals"], facts["global_out_avals"]
    layouts = [(None,) * len(avals) for avals in (inputs, outputs)]  # defaults
    executable = pxla.UnloadedMeshExecutable(
        xla_executable=facts["backend"].deserialize_executable(content, devices, **options),
        device_list=devices,
        input_avals=inputs,
        input_shardings=in_shardings,
        output_avals=outputs,
        output_shardings=out_shardings,
        name=lowering._name,
        xla_in_layouts=layouts[0],
        dispatch_in_layouts=layouts[0],
        xla_out_layouts=layouts[1],
        pgle_profiler=None,
        **{
            name: facts[name]
            for name in ("backend", "committed", "keepalive", "kept_var_idx", "all_args_info")
        },
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
    return [
        sharding if isinstance(sharding, jax.sharding.Sharding) else scalar
        for sharding in shardings
    ]
