"""The message and exit code for a host that died; without JAX."""

from __future__ import annotations

from collections.abc import Callable

from maxbatch.system.errors import EXIT_FAILED, EXIT_STOPPED

# Returns the newest step that is saved; None if there is none.
LastSaved = Callable[[], int | None]
_RESERVE_S = 8.0  # of `heartbeat_timeout_s`: to report a dead host, and for the others to end
_ON_DEATH: list[Callable[[int], None]] = []  # called with the host that died, before this process ends


def on_death(act: Callable[[int], None]) -> None:
    """Has a function called once a host is known to have died, with its index."""
    _ON_DEATH[:] = [act]


def silence_of(timeout_s: int) -> float:
    """Returns the seconds of silence after which a host counts as dead, so that all have ended by `timeout_s`."""
    return max(timeout_s / 2, timeout_s - _RESERVE_S)


def death_of(host: int, num_hosts: int, how: str, last_saved: LastSaved) -> tuple[str, int]:
    """Returns the message about a host that died, and the exit code of the run."""
    for act in _ON_DEATH:
        act(host)
    try:
        saved = last_saved()
    except Exception as error:  # the checkpoints' store may be unreachable as well
        return f"host {host} of {num_hosts} {how}; the last saved step cannot be read: {error}", EXIT_FAILED
    if saved is None:
        return f"host {host} of {num_hosts} {how}; nothing is saved", EXIT_FAILED
    return f"host {host} of {num_hosts} {how}; step {saved} is saved, and the same command continues", EXIT_STOPPED
