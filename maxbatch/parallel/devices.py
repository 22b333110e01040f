"""The start of JAX's devices, and its failures in one line."""

from __future__ import annotations

import os
import traceback

from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError, TrainingError, one_line

_BRIDGE = os.path.join("jax", "_src", "xla_bridge.py")  # JAX's module that starts devices
# its functions that do
_STARTS = ("backends", "_init_backend", "_get_backend_uncached", "get_backend")
_LONGEST_REASON = 300


def start_devices() -> None:
    """Starts this host's devices, unless they run.

    Raises:
      ConfigError: `JAX_PLATFORMS` names devices that do not start.
      TrainingError: the devices that JAX has chosen itself do not start.
    """
    import jax

    try:
        jax.devices()
    except Exception as error:
        raise failure_of_devices(error) or error from error


def failure_of_devices(error: Exception) -> ConfigError | TrainingError | None:
    """Returns an error with one line for a failure of JAX to start its devices; None for any other
    error.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.endswith(_BRIDGE) or frames[-1].name not in _STARTS:
        return None
    platforms = os.environ.get("JAX_PLATFORMS", "")
    why = one_line(error).partition(" (set JAX_PLATFORMS")[0].partition(" (you may need to")[0]
    reason = (
        "no such device is known to JAX here"
        if isinstance(error, AssertionError)
        else shown(why, _LONGEST_REASON)
    )
    if platforms:
        return ConfigError(
            f"environment variable JAX_PLATFORMS={shown(platforms)}: the devices do not start "
            f"({reason}); works: JAX_PLATFORMS=cpu"
        )
    return TrainingError(
        f"the devices of this machine do not start ({reason}); end the process that holds them, "
        "or look at the driver; works without them: JAX_PLATFORMS=cpu"
    )
