"""The opening of every training command: JAX's settings, the agreement of all hosts on the start,
and the folder, clock and threads of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import jax

from maxbatch.config.config import Config
from maxbatch.config.own_parts import own_parts_text, refuse_own_parts
from maxbatch.config.pins import facts_of
from maxbatch.parallel.absent_tpu import leave_out_absent_tpu
from maxbatch.run.agreement import check_same_start
from maxbatch.run.compile.flags import flags_in_force, state_flags
from maxbatch.run.context import RunContext
from maxbatch.run.own import CONFIGURED, Parts, code_of
from maxbatch.system.hardware.cpu_devices import give_cpu_devices_threads


def prepare_jax(libtpu_flags: str, data_cache_dir: str) -> None:
    """Sets what JAX reads when it starts its backends; a second call changes nothing.

    These are the threads of CPU devices, the platforms without an absent TPU, and the user's flags
    of the TPU's compiler.

    Raises:
      ConfigError: the compiler does not take a flag of `libtpu_flags`.
    """
    give_cpu_devices_threads()
    leave_out_absent_tpu()
    state_flags(libtpu_flags, data_cache_dir)


@contextmanager
def opened_run(
    command: str,
    config: Config,
    devices: Sequence[jax.Device] | None = None,
    parts: Parts = CONFIGURED,
    check: Callable[[Config, Sequence[jax.Device]], object] = lambda config, devices: None,
) -> Iterator[RunContext]:
    """Opens a run in its folder, once all hosts start the same; the block trains it.

    The context's config has the compiler's flags in force and the names of the user's own parts.

    Args:
      command: `train` or `rl`; hosts that start different ones are refused.
      devices: the devices to train on; None: all.
      parts: the user's own parts.
      check: refuses a config on these devices before the folder is made.

    Raises:
      ConfigError: the hosts differ, or the config, an own part or the folder cannot be used.
    """
    prepare_jax(config.libtpu_flags, config.data_cache_dir)
    check_same_start(command, facts_of(config) | code_of(parts))
    devices = list(devices or jax.devices())

    refuse_own_parts(config.own_parts, given=parts.names)
    flags = flags_in_force(config.libtpu_flags, devices)
    config = config.replaced({"libtpu_flags": flags, "own_parts": own_parts_text(parts.names)})
    check(config, devices)

    with ExitStack() as stack:
        yield RunContext(config, devices, stack)
