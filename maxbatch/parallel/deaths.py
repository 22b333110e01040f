"""The message and exit code for a host that died; without JAX."""

from __future__ import annotations

from collections.abc import Callable

from maxbatch.system.errors import EXIT_FAILED, EXIT_STOPPED

# Returns the newest step that is saved; None if there is none.
LastSaved = Callable[[], int | None]
_RESERVE_S = 8.0  # of `heartbeat_timeout_s`: to report a dead host, and for the others to end
# called before another host's end ends this process
_ON_END: list[Callable[[str, bool], None]] = []


def on_end(act: Callable[[str, bool], None]) -> None:
    """Has a function called before another host's end ends this process.

    Args:
      act: takes the cause (`host 1 died`, `host 1 failed`), and whether that host refused its
        input.
    """
    _ON_END[:] = [act]


def announce_end(cause: str, is_refusal: bool = False) -> None:
    """Calls the function of `on_end`."""
    for act in _ON_END:
        act(cause, is_refusal)


def silence_of(timeout_s: int) -> float:
    """Returns the seconds of silence after which a host counts as dead, so that all have ended by
    `timeout_s`.
    """
    return max(timeout_s / 2, timeout_s - _RESERVE_S)


def death_of(host: int, num_hosts: int, how: str, last_saved: LastSaved) -> tuple[str, int]:
    """Returns the message about a host that died, and the exit code of the run."""
    announce_end(f"host {host} died")
    try:
        saved = last_saved()
    except Exception as error:  # the checkpoints' store may be unreachable as well
        return (
            f"host {host} of {num_hosts} {how}; the last saved step cannot be read: {error}",
            EXIT_FAILED,
        )
    if saved is None:
        return f"host {host} of {num_hosts} {how}; nothing is saved", EXIT_FAILED
    return (
        f"host {host} of {num_hosts} {how}; step {saved} is saved, and the same command continues",
        EXIT_STOPPED,
    )
