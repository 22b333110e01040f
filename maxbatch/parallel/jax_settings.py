"""The settings of JAX and its compilers by which programs or random numbers may differ.

Every setting counts, except those that are listed here as harmless.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import jax

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Settings of JAX without effect on numbers, by the beginning of their name.
_HARMLESS = (
    # messages and dumps
    "jax_captured_constants_",
    "jax_compiler_detailed_logging_",
    "jax_debug_leaked_clients_",
    "jax_debug_log_",
    "jax_distributed_debug",
    "jax_dump_ir_",
    "jax_explain_cache_misses",
    "jax_hlo_source_file_",
    "jax_include_debug_info_",
    "jax_include_full_tracebacks_",
    "jax_log_",
    "jax_logging_",
    "jax_pallas_verbose_errors",
    "jax_pprint_",
    "jax_send_traceback_",
    "jax_source_url_",
    "jax_traceback_",
    "jax_tracer_error_",
    # caches of compiled programs
    "jax_compilation_cache_",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_",
    "jax_raise_persistent_cache_",
    "jax_remove_custom_partitioning_ptr_",
    # guards, which raise or do nothing
    "jax_array_garbage_collection_guard",
    "jax_check_tracer_leaks",
    "jax_thread_guard",
    "jax_transfer_guard",
    # the host's place among the others, and its devices, whose number and kind are compared by
    # themselves
    "jax_check_proxy_envs",
    "jax_coordinator_",
    "jax_cpu_get_",
    "jax_cross_host_transfer_socket_address",
    "jax_cross_host_transfer_timeout_",
    "jax_cross_host_transport_addresses",
    "jax_cuda_visible_devices",
    "jax_distributed_verify_",
    "jax_force_tpu_init",
    "jax_local_device_ids",
    "jax_mtls_",
    "jax_num_cpu_devices",
    "jax_num_processes",
    "jax_oneapi_visible_devices",
    "jax_partition_index",
    "jax_platform_name",
    "jax_platforms",
    "jax_process_id",
    "jax_rocm_visible_devices",
    "jax_share_binary_between_hosts_timeout_",
    "jax_slice_index",
)
# Flags without effect on numbers: dumps, places, the number of simulated devices, and what lets
# many of them meet.
_HARMLESS_FLAGS = (
    "--xla_dump",
    "--xla_force_host_platform_device_count",
    "--xla_gpu_cuda_data_dir",
    "--xla_cpu_collective_call_",
    "--xla_cpu_enable_concurrency_optimized_scheduler",
    "--xla_tpu_use_enhanced_launch_barrier",
)


def settings_in_force(platform: str) -> dict[str, str]:
    """Returns the settings of JAX and of its compilers by the name of the variable that states
    each.

    Args:
      platform: of the devices; only TPUs read the flags of the TPU compiler.
    """
    settings = {name.upper(): str(value) for name, value in jax.config.values.items()}
    # Modules of JAX that are not loaded yet read their variables later.
    settings = {
        name: value for name, value in os.environ.items() if name.startswith("JAX_")
    } | settings
    in_force = {
        name: value for name, value in settings.items() if not name.lower().startswith(_HARMLESS)
    }
    for variable in _VARIABLES:
        if variable == "XLA_FLAGS" or platform == "tpu":
            in_force[variable] = " ".join(sorted(_flags(variable)))
    return dict(sorted(in_force.items()))


def _flags(variable: str) -> Iterable[str]:
    """Returns the flags of a variable, of each the one in force, without harmless ones."""
    text = os.environ.get(variable, "").strip()
    # the name of a file with flags
    if variable == "XLA_FLAGS" and text and not text.startswith("-"):
        try:
            text = Path(text).read_text()
        except (OSError, ValueError):
            return [text]
    last = {word.partition("=")[0]: word for word in text.split()}
    return [word for word in last.values() if not word.startswith(_HARMLESS_FLAGS)]
