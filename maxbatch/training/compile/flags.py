"""The flags of the TPU compiler, which libtpu reads once, from `LIBTPU_INIT_ARGS`, when it is loaded.

The defaults of libtpu overlap nothing: collectives run while computation waits. The flags are those that MaxText's
recipes set (https://github.com/AI-Hypercomputer/maxtext, `benchmarks/xla_flags_library.py`): weight gathers run behind
computation. Programs depend on them, so `train`, `rl`, `compile` and `fit` set the same.
"""

from __future__ import annotations

import os

from ml_collections import ConfigDict

from maxbatch.parallel.absent_tpu import tpu_version_here

VARIABLE = "LIBTPU_INIT_ARGS"
AUTO, NONE = "auto", "none"

_OVERLAP = {
    "--xla_tpu_enable_async_collective_fusion": "true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "--xla_tpu_overlap_compute_collective_tc": "true",
    "--xla_enable_async_all_gather": "true",
    "--xla_tpu_enable_data_parallel_all_reduce_opt": "true",
    "--xla_tpu_data_parallel_opt_different_sized_ops": "true",
}
# Large sums of gradients are not joined into one, which could only start after the last of them.
_SUMS_APART = {"--xla_jf_crs_combiner_threshold_in_bytes": "1048576"}
# Sums of gradients run on SparseCores while the backward pass of other layers runs.
_SUMS_ON_SPARSE_CORES = {
    "--xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "--xla_tpu_enable_all_reduce_offload_tracing": "true",
    "--xla_tpu_use_tc_device_shape_on_sc": "true",
    "--xla_sc_enable_instruction_fusion": "false",
    "--xla_sc_disjoint_spmem": "false",
    "--xla_sc_disable_megacore_partitioning": "true",
} | _SUMS_APART
# Without SparseCores each sum runs inside of the next gradient's product; that of a layer's last product is exposed.
_SUMS_BESIDE_PRODUCTS = {"--xla_enable_async_all_reduce": "true"} | _SUMS_APART
_SUMS_IN_PRODUCTS = {"--xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true"} | _SUMS_BESIDE_PRODUCTS
# Vector memory that one fusion may use. The default of 16 MiB cuts products into small blocks: a quarter more cycles.
_SCOPED_VMEM = {"--xla_tpu_scoped_vmem_limit_kib": "65536"}

# By chip. A core of a v4 has 16 MiB of vector memory in all, less than a sum inside of a wide product takes.
_FLAGS = {
    "v4": _OVERLAP | _SUMS_BESIDE_PRODUCTS,
    "v5e": _OVERLAP | _SUMS_IN_PRODUCTS | _SCOPED_VMEM,
    "v5p": _OVERLAP | _SUMS_ON_SPARSE_CORES | _SCOPED_VMEM,
    "v6e": _OVERLAP | _SUMS_ON_SPARSE_CORES | _SCOPED_VMEM,
    "tpu7x": _OVERLAP | _SUMS_ON_SPARSE_CORES | _SCOPED_VMEM,
}

_ADDED_BY_JAX = "--xla_tpu_use_enhanced_launch_barrier"  # at import on a TPU machine; shapes no program


def flags_of(version: str) -> str:
    """Returns the flags for a TPU version, as one text."""
    return _text(_FLAGS[version])


def with_flags(config: ConfigDict, version: str | None = None) -> ConfigDict:
    """Sets the flags of a TPU run for this process, and returns the config with the flags in force.

    Flags in the user's own `LIBTPU_INIT_ARGS` win, each over the same flag of `libtpu_flags`. It must be called before
    JAX starts its backends. Without a TPU nothing is set and the config is returned as it is.

    Args:
      version: the TPU that programs are compiled for, such as `v5p`; None: this machine's.
    """
    version = version or tpu_version_here()
    if version not in _FLAGS:  # no TPU, or one that is too old
        return config
    stated = {AUTO: flags_of(version), NONE: ""}.get(config.libtpu_flags, config.libtpu_flags)
    held = _parse(stated) | _parse(os.environ.get(VARIABLE, ""))
    os.environ[VARIABLE] = _text(held)
    changed = ConfigDict(config.to_dict())
    held.pop(_ADDED_BY_JAX, None)
    changed.libtpu_flags = _text(held) or NONE
    return changed.lock()


def _parse(text: str) -> dict[str, str | None]:
    """Returns flags by name; the value of a flag without one is None."""
    pairs = (word.partition("=") for word in text.split())
    return {name: value if equals else None for name, equals, value in pairs}


def _text(flags: dict[str, str] | dict[str, str | None]) -> str:
    return " ".join(name if value is None else f"{name}={value}" for name, value in flags.items())
