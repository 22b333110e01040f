"""The best checkpoint period for a rate of failures.

δ: seconds that a checkpoint delays training. M: mean seconds between failures. τ: seconds of
training between two checkpoints. A period costs δ / τ of the time in checkpoints and, at a failure,
half of it in updates that are trained again: τ / 2M.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DAY_S = 86400.0


def young(save_s: float, between_failures_s: float) -> float:
    """Returns √(2δM), seconds. Reference: Young 1974, https://doi.org/10.1145/361147.361115."""
    return math.sqrt(2 * save_s * between_failures_s)


def daly(save_s: float, between_failures_s: float) -> float:
    """Returns Daly's correction of Young's period for failures that are no longer rare, seconds.

    Reference: Daly 2006, equation 37, https://doi.org/10.1016/j.future.2004.11.016.
    """
    ratio = save_s / (2 * between_failures_s)
    if ratio >= 1:
        return between_failures_s
    return young(save_s, between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


class MeasuredTimes(NamedTuple):
    """Times measured by a run's sessions; None where nothing was measured."""

    save_s: float | None
    step_s: float | None
    restart_s: float | None  # of a restart: away, starting, restoring and compiling


class CheckpointPeriod(NamedTuple):
    """The period for a rate of failures; its fields are those of `plan --json`."""

    failures_per_day: float
    seconds_between_failures: float
    save_seconds: float
    save_seconds_source: str  # stated, measured or assumed
    step_seconds: float | None  # None: unknown
    young_seconds: float
    daly_seconds: float
    # Daly's period in updates, at least 1; None if the time of an update is unknown
    checkpoint_period: int | None
    # of the time, in checkpoints, updates trained again and, if their time is known, restarts
    lost_share: float
    restart_seconds: float | None  # None: unknown


ASSUMED_SAVE_S = 10.0


def period_for(
    failures_per_day: float, save_s: float | None, step_s: float | None, measured: MeasuredTimes
) -> CheckpointPeriod:
    """Returns the period for a rate of failures; stated times override measured ones."""
    source = (
        "assumed"
        if save_s is None and measured.save_s is None
        else "measured"
        if save_s is None
        else "stated"
    )
    save = save_s or measured.save_s or ASSUMED_SAVE_S
    step = step_s or measured.step_s
    between = DAY_S / failures_per_day
    seconds = daly(save, between)
    updates = None if step is None else max(1, round(seconds / step))
    applied = seconds if updates is None or step is None else updates * step
    lost = save / (applied + save) + (applied / 2 + (measured.restart_s or 0.0)) / between
    return CheckpointPeriod(
        failures_per_day,
        between,
        save,
        source,
        step,
        young(save, between),
        seconds,
        updates,
        min(1.0, lost),
        measured.restart_s,
    )


def in_words(period: CheckpointPeriod) -> str:
    """Returns the advice as one line."""
    of_save = f"{period.save_seconds:,.3g} s per checkpoint ({period.save_seconds_source})"
    updates = "" if period.checkpoint_period is None else f" = {period.checkpoint_period:,} updates"
    lost = "checkpoints, lost updates" + ("" if period.restart_seconds is None else " and restarts")
    return (
        f"checkpoint period for {period.failures_per_day:g} failures a day and {of_save}: "
        f"{period.daly_seconds:,.0f} s{updates} (Daly 2006; Young 1974: "
        f"{period.young_seconds:,.0f} s); {lost} cost {period.lost_share:.2%} of the time"
    )
