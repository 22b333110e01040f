"""Flags of the TPU compiler, by chip and libtpu, and trials of their support.

Our flags are options per program: the compiler's error names an unsupported one, and one process
can compile for several chips. The user's flags are in `LIBTPU_INIT_ARGS`, which libtpu reads once,
on loading. An unknown flag there ends the process, so a child process tries them first. Programs
depend on the flags, so `train`, `rl`, `compile`, `fit` and `plan --survive` use the same flags.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from maxbatch.config.values import shown
from maxbatch.data.store.cache_folder import cache_file, keep, recall
from maxbatch.parallel.absent_tpu import tpu_version_here
from maxbatch.system.errors import ConfigError
from maxbatch.system.hardware.chips import TPUS, chip_of

if TYPE_CHECKING:
    import jax

VARIABLE = "LIBTPU_INIT_ARGS"
AUTO, NONE = "auto", "none"

# Collectives overlap computation where they can; by default they block it. Asynchronous exchanges
# of tokens leave 0.04 instead of 0.14 GB exposed, at the same cycles and 7% more temporaries (2
# layers of 8 experts of 1,024 x 1,024 over 4 devices, 2 rows of 1,024 tokens each, v5p:2x2x1,
# libtpu 0.0.46).
_ASYNC = {
    "--xla_enable_async_all_gather": "true",
    "--xla_tpu_enable_async_all_to_all": "true",
    "--xla_tpu_overlap_compute_collective_tc": "true",
    "--xla_tpu_enable_data_parallel_all_reduce_opt": "true",
    "--xla_tpu_data_parallel_opt_different_sized_ops": "true",
}
# Continuation fusion: gathers of weights run inside products. From libtpu 0.0.46 on the compiler
# refuses it except on v5e: "incorrect results, hang, SDC".
_GATHERS_IN_PRODUCTS = {
    "--xla_tpu_enable_async_collective_fusion": "true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
}
_FUSES_ONLY_ON_V5E = (0, 0, 46)
# Keep large sums of gradients apart; a joined one could only start after the last gradient.
_SUMS_APART = {"--xla_jf_crs_combiner_threshold_in_bytes": "1048576"}
# SparseCores run collectives beside the TensorCores' products. The common part of MaxText's recipes
# (https://github.com/AI-Hypercomputer/maxtext, `benchmarks/xla_flags_library.py`).
_SPARSE_CORES = {
    "--xla_tpu_use_tc_device_shape_on_sc": "true",
    "--xla_sc_enable_instruction_fusion": "false",
    "--xla_sc_disable_megacore_partitioning": "true",
}
_OFFLOAD = "--xla_tpu_enable_sparse_core_collective_offload_"
# Sums of gradients run while the backward pass of other layers runs.
_SUMS_ON_SPARSE_CORES = (
    {
        f"{_OFFLOAD}all_reduce": "true",
        "--xla_tpu_enable_all_reduce_offload_tracing": "true",
    }
    | _SPARSE_CORES
    | _SUMS_APART
)
# So do gathers of weights, also those over two and three dimensions of the torus: of the 54 GB that
# an update of llama2-7b sends on a v5p:4x4x4 (4 rows of 4,096 tokens, remat minimal, libtpu 0.0.46)
# 1.05 GB are exposed, the sum of the last projection's gradient, in as many cycles (2.919e9) as
# with the gathers exposed. Without the flags for two and three dimensions 4.0 of the 5.9 GB of 4
# layers are exposed, without any 5.9.
_GATHERS_ON_SPARSE_CORES = {
    f"{_OFFLOAD}all_gather": "true",
    "--xla_tpu_enable_all_gather_offload_tracing": "true",
    f"{_OFFLOAD}2d_all_gather": "true",
}
# on chips whose torus has three dimensions
_GATHERS_OVER_THREE_AXES = {f"{_OFFLOAD}3d_all_gather": "true"}
# Without SparseCores each sum runs inside the next gradient's product; the sum of a layer's last
# product is exposed.
_SUMS_BESIDE_PRODUCTS = {"--xla_enable_async_all_reduce": "true"} | _SUMS_APART
_SUMS_IN_PRODUCTS = {
    "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true"
} | _SUMS_BESIDE_PRODUCTS
# Vector memory for one fusion. The default of 16 MiB cuts products into small blocks, which costs a
# quarter more cycles. A v4's core has 16 MiB in all, too little for a sum inside a wide product.
_SCOPED_VMEM = {"--xla_tpu_scoped_vmem_limit_kib": "65536"}
# A v6e's core has 128 MiB. With 96 of them an update of llama2-7b took 1.201e9 cycles in place of
# 1.249e9 (4 rows of 2,048 tokens, remat full, v6e:16x16, libtpu 0.0.46). MaxText's recipes for v6e
# have the same.
_MORE_SCOPED_VMEM = {"--xla_tpu_scoped_vmem_limit_kib": "98304"}

_ON_SPARSE_CORES = _ASYNC | _GATHERS_ON_SPARSE_CORES | _SUMS_ON_SPARSE_CORES | _SCOPED_VMEM
_IN_PRODUCTS = _ASYNC | _GATHERS_IN_PRODUCTS
_FLAGS = {
    "v4": _ASYNC | _SUMS_BESIDE_PRODUCTS,
    "v5e": _IN_PRODUCTS | _SUMS_IN_PRODUCTS | _SCOPED_VMEM,
    "v5p": _ON_SPARSE_CORES | _GATHERS_OVER_THREE_AXES,
    "v6e": _ON_SPARSE_CORES | _MORE_SCOPED_VMEM,
    "tpu7x": _ON_SPARSE_CORES | _GATHERS_OVER_THREE_AXES,
}
# Differences for a libtpu that fuses on every chip.
_FLAGS_BEFORE = {
    "v4": _IN_PRODUCTS | _SUMS_BESIDE_PRODUCTS,
    "v5p": _IN_PRODUCTS | _SUMS_ON_SPARSE_CORES | _SCOPED_VMEM,
    "v6e": _IN_PRODUCTS | _SUMS_ON_SPARSE_CORES | _SCOPED_VMEM,
    "tpu7x": _IN_PRODUCTS | _SUMS_ON_SPARSE_CORES | _SCOPED_VMEM,
}

# Programs that run once, or once a checkpoint, without collectives worth hiding. Our flags would
# double or treble their compilation. Small blocks of vector memory and the least effort shorten it
# instead, by a third or more, in the same memory: the memory of a device bounds their speed.
INIT, CHECKSUMS = "init", "checksums"
_QUICKLY_COMPILED = frozenset({INIT, CHECKSUMS})
_LITTLE_EFFORT = {
    "--xla_tpu_scoped_vmem_limit_kib": "4096",
    "--xla_optimization_level": "EFFORT_O0",
}

# at import on a TPU machine; shapes no program
_ADDED_BY_JAX = "--xla_tpu_use_enhanced_launch_barrier"
_LONGEST_TRIAL_S = 120


def flags_of(version: str) -> dict[str, str]:
    """Returns the flags for a TPU version and the installed libtpu, by name."""
    fuses = _libtpu() < _FUSES_ONLY_ON_V5E
    return _FLAGS_BEFORE.get(version, _FLAGS[version]) if fuses else _FLAGS[version]


def _libtpu() -> tuple[int, ...]:
    """Returns the installed libtpu's version; if unknown, a version above all others."""
    numbers = re.findall(r"\d+", _libtpu_name())
    return tuple(map(int, numbers[:3])) or (sys.maxsize,)


def state_flags(libtpu_flags: str, cache_dir: str, version: str | None = None) -> None:
    """Sets the user's own flags for this process; `LIBTPU_INIT_ARGS` overrides `libtpu_flags`.

    Must be called before JAX starts its backends. `flags_in_force` adds our flags.

    Args:
      libtpu_flags: the key of that name.
      cache_dir: `data_cache_dir`.
      version: the target TPU, such as `v5p`; None: this machine's.

    Raises:
      ConfigError: the compiler does not take one of them.
    """
    version = version or tpu_version_here()
    if version not in _FLAGS:  # no TPU, or too old
        return
    ours = flags_of(version)
    held = {
        name: value for name, value in _stated(libtpu_flags).items() if ours.get(name) != value
    } | _held()
    if users_flags := {name: value for name, value in held.items() if name != _ADDED_BY_JAX}:
        _try(users_flags, version, cache_dir)
    os.environ[VARIABLE] = text_of(held)


def flags_in_force(libtpu_flags: str, devices: Sequence[jax.Device]) -> str:
    """Returns `libtpu_flags` as in force on devices: ours for `auto`, below `LIBTPU_INIT_ARGS`.

    Drops our unsupported flags with a warning. Without TPUs, returns the text unchanged. All hosts
    must call it.

    Raises:
      ConfigError: the compiler does not support a flag of the user's, or the hosts' flags differ.
    """
    # imports JAX, which must start after `state_flags`
    from maxbatch.parallel.hosts import gather, warn

    version = _version_of(devices)
    if version is None:
        return libtpu_flags
    held = _held()
    held.pop(_ADDED_BY_JAX, None)
    is_auto = libtpu_flags == AUTO
    wanted = flags_of(version) if is_auto else _stated(libtpu_flags)
    refused = _refused(
        {name: value for name, value in wanted.items() if name not in held},
        held,
        libtpu_flags,
        devices,
    )
    if refused and not is_auto:
        raise _refusal(next(iter(refused)), version, "libtpu_flags")
    for name in {name: None for names in gather(list(refused)) for name in names}:
        warn(
            f"the TPU compiler (libtpu {_libtpu_name()}) does not take {name}={wanted.pop(name)} "
            f"for a {version}; compiling without it"
        )
    in_force = text_of(wanted | held) or NONE
    texts = gather(in_force)
    if differing := [host for host, text in enumerate(texts) if text != texts[0]]:
        raise ConfigError(
            f"libtpu_flags: must be the same on all hosts, and host {differing[0]} has "
            f"{shown(texts[differing[0]])} where host 0 has {shown(texts[0])}; works: the same "
            f"{VARIABLE} and libtpu on all hosts"
        )
    return in_force


def program_options(
    libtpu_flags: str, devices: Sequence[jax.Device], program: str = ""
) -> dict[str, str]:
    """Returns a program's compiler options for devices: the flags in force beyond
    `LIBTPU_INIT_ARGS`.

    The first state and the checksums have options of their own. Empty without a TPU.

    Args:
      libtpu_flags: the key as `flags_in_force` returned it.
      program: the program's name.
    """
    if _version_of(devices) is None:
        return {}
    held, flags = _held(), _stated(libtpu_flags)
    wanted = _LITTLE_EFFORT if flags and program in _QUICKLY_COMPILED else flags
    return {
        name.removeprefix("--"): "true" if value is None else value
        for name, value in wanted.items()
        if name not in held
    }


def _version_of(devices: Sequence[jax.Device]) -> str | None:
    """Returns the TPU version of devices; None for other devices and old TPUs."""
    if devices[0].platform != "tpu":
        return None
    chip = chip_of(devices[0].device_kind)
    return next((version for version, known_chip in TPUS.items() if known_chip is chip), None)


def _refused(
    flags: Mapping[str, str | None],
    held: Iterable[str],
    libtpu_flags: str,
    devices: Sequence[jax.Device],
) -> dict[str, str | None]:
    """Returns the flags that the compiler does not support, by a trial program of one addition for
    one device.

    Raises:
      ConfigError: one of them is the user's own.
    """
    import jax

    from maxbatch.run.compile.cache import without_persistent_cache

    here = next(
        (device for device in devices if device.process_index == jax.process_index()), devices[0]
    )
    with without_persistent_cache():
        lowered = _trial_program(here)
        left, refused = dict(flags), dict[str, str | None]()
        while True:
            options: dict[str, str | bool] = {
                name.removeprefix("--"): value or "true" for name, value in left.items()
            }
            try:
                lowered.compile(compiler_options=options or None)
                return refused
            except jax.errors.JaxRuntimeError as error:
                named = named_flags(str(error), left)
                if not named:
                    if mine := named_flags(str(error), held):
                        raise _refusal(
                            mine[0], _version_of(devices) or "", _source(mine[0], libtpu_flags)
                        ) from error
                    return refused  # another cause; the first program's error will name it
                refused |= {name: left.pop(name) for name in named}


def _trial_program(device: jax.Device) -> jax.stages.Lowered:
    import jax

    place = jax.sharding.SingleDeviceSharding(device)
    add_one = jax.jit(lambda x: x + 1, in_shardings=place, out_shardings=place)
    lowered: jax.stages.Lowered = add_one.lower(jax.ShapeDtypeStruct((8,), "int32"))
    return lowered


def named_flags(message: str, flags: Iterable[str]) -> list[str]:
    """Returns the flags named in a compiler's message, or else those that begin with a name
    in it.
    """
    words = set(re.findall(r"\w+", message))
    exact = [name for name in flags if name.removeprefix("--") in words]
    named = tuple(word for word in words if word.startswith("xla_"))
    return exact or [name for name in flags if name.removeprefix("--").startswith(named)]


def _try(flags: Mapping[str, str | None], version: str, data_cache_dir: str) -> None:
    """Compiles a program with flags in `LIBTPU_INIT_ARGS`, in a child process; caches success on
    disk.

    Raises:
      ConfigError: the compiler does not take one of them.
    """
    text = text_of(flags)
    known = cache_file(
        data_cache_dir, "flags", {"libtpu": _libtpu_name(), "tpu": version, "flags": text}
    )
    if recall(known):
        return
    variables = os.environ | {VARIABLE: text, "JAX_PLATFORMS": "cpu"}
    argv = [sys.executable, "-m", "maxbatch.run.compile.flags", version]
    try:
        done = subprocess.run(
            argv,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_LONGEST_TRIAL_S,
            stdin=subprocess.DEVNULL,
        )
    except (subprocess.TimeoutExpired, OSError):
        return
    if done.returncode == 0:
        keep(known, True)
    elif named := named_flags(done.stderr, flags):
        source = VARIABLE if named[0] in _held() else "libtpu_flags"
        raise _refusal(named[0], version, source, done.stderr)


def _stated(libtpu_flags: str) -> dict[str, str | None]:
    return {} if libtpu_flags in (AUTO, NONE) else parse(libtpu_flags)


def _source(name: str, libtpu_flags: str) -> str:
    """Returns the place where the user states a flag."""
    return "libtpu_flags" if name in _stated(libtpu_flags) else VARIABLE


def _held() -> dict[str, str | None]:
    return parse(os.environ.get(VARIABLE, ""))


def _libtpu_name() -> str:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def _refusal(name: str, version: str, source: str, message: str = "") -> ConfigError:
    reason = (
        "it does not know it"
        if f"Unknown command line flag '{name.removeprefix('--')}'" in message
        else "refused"
    )
    return ConfigError(
        f"{source}: the TPU compiler (libtpu {_libtpu_name()}) does not take {name} for a "
        f"{version} ({reason}); works: "
        f"{'libtpu_flags=auto' if source != VARIABLE else f'{VARIABLE} without it'}"
    )


def parse(text: str) -> dict[str, str | None]:
    """Parses flags by name; a bare flag has the value None."""
    pairs = (word.partition("=") for word in text.split())
    return {name: value if equals else None for name, equals, value in pairs}


def text_of(flags: Mapping[str, str | None]) -> str:
    """Formats flags, such as `--a=1 --b`."""
    return " ".join(name if value is None else f"{name}={value}" for name, value in flags.items())


def _main() -> None:
    """Compiles the trial program for the TPU version in the first argument, with the flags of
    `LIBTPU_INIT_ARGS`.

    libtpu ends a process with an unknown flag, and names the flag on standard error.
    """
    from maxbatch.run.compile.target import find_target
    from maxbatch.run.compile.topology import smallest_slice

    _trial_program(find_target(smallest_slice(sys.argv[1])).devices[0]).compile()


if __name__ == "__main__":
    _main()
