"""What a run says of a host that died, and its exit code; without JAX."""

from __future__ import annotations

from collections.abc import Callable

from maxbatch.system.errors import EXIT_FAILED, EXIT_STOPPED

# Returns the newest step that is saved; None if there is none.
LastSaved = Callable[[], int | None]


def death_of(host: int, num_hosts: int, how: str, last_saved: LastSaved) -> tuple[str, int]:
    """Returns the message about a host that died, and the exit code of the run."""
    try:
        saved = last_saved()
    except Exception as error:  # the store of the checkpoints may be gone as well
        return f"host {host} of {num_hosts} {how}; what is saved is not known: {error}", EXIT_FAILED
    if saved is None:
        return f"host {host} of {num_hosts} {how}; nothing is saved", EXIT_FAILED
    return f"host {host} of {num_hosts} {how}; step {saved} is saved, and the same command continues", EXIT_STOPPED
