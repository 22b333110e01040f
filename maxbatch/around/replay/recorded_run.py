"""A run as its folder records it: the lines of its updates, its checkpoints, and the config and
devices that every update had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from maxbatch.config.config import Config
from maxbatch.config.own_parts import TRAINED, refuse_own_parts
from maxbatch.config.pins import read_written
from maxbatch.config.sections import KEYS
from maxbatch.config.values import Value, first_of, shown
from maxbatch.run.folder.devices import DEVICES_FILE, DevicesUsed, read_devices
from maxbatch.run.folder.metrics import Record, scan_metrics
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.folder.run_folder import SESSIONS_FILE
from maxbatch.run.folder.sessions import Changed, Session, read_sessions
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath, as_path

_MOST_NAMED = 8


class Segment(NamedTuple):
    """Consecutive updates with one config on the same devices."""

    first_step: int
    last_step: int
    config: Config
    devices: DevicesUsed


class _Owned(NamedTuple):
    """The config of the updates from one step on."""

    first_step: int
    config: Config


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run whose updates are taken again; nothing in its folder is written.

    Args:
      named: the path of its folder, as typed.
    """

    named: str

    @cached_property
    def path(self) -> AnyPath:
        return as_path(self.named)

    @cached_property
    def config(self) -> Config:
        """The config of its last session.

        Raises:
          ConfigError: there is no run, or its updates cannot be taken again.
        """
        file = self.path / "config.yml"
        if not file.is_file():
            raise ConfigError(f"{shown(self.named)}: is no run folder (it has no config.yml)")
        config = read_written(file)
        if config is None:
            raise ConfigError(f"{file}: cannot be read as the config of a run; restore it")
        refuse_own_parts(config.own_parts, TRAINED)
        if config.recipe.is_sampled:
            raise ConfigError(
                f"{shown(self.named)}: is a run of reinforcement learning, and replay takes "
                "updates of maxbatch train"
            )
        return config

    @cached_property
    def lines(self) -> Mapping[int, Record]:
        """The lines of its updates, by step."""
        return {record[Metric.STEP]: record for record in scan_metrics(self.path).records}

    def line(self, step: int) -> Record:
        """Returns the line of an update; raises ConfigError if there is none."""
        if step in self.lines:
            return self.lines[step]
        if not self.lines:
            raise ConfigError(f"{shown(self.named)}: has no update yet")
        nearest = min(self.lines, key=lambda known: abs(known - step))
        raise ConfigError(
            f"--step {step}: {shown(self.named)} has updates {min(self.lines)} to "
            f"{max(self.lines)}; works: --step {nearest}"
        )

    def checkpoint_before(self, step: int, wanted: int | None) -> int | None:
        """Returns the step of the checkpoint from which an update is reached: the stated one, else
        the newest before it; None: the update is reached from the first parameters.

        Raises:
          ConfigError: the stated one is missing, or is not before the update.
        """
        before = [committed for committed in committed_steps(self.path) if committed < step]
        if wanted is None:
            return before[0] if before else None
        if wanted in before:
            return wanted
        there = "is not before" if wanted >= step else "is missing, and"
        if not before:
            raise ConfigError(
                f"--checkpoint {wanted}: {there} update {step}, and {shown(self.named)} has no "
                "checkpoint before it; works: no --checkpoint"
            )
        nearest = min(before, key=lambda committed: abs(committed - wanted))
        steps = first_of([str(committed) for committed in sorted(before)], _MOST_NAMED)
        raise ConfigError(
            f"--checkpoint {wanted}: {shown(self.named)} has checkpoints {steps} before update "
            f"{step}; works: --checkpoint {nearest}"
        )

    def segments(self, first_step: int, last_step: int) -> list[Segment]:
        """Returns the configs and devices of consecutive updates.

        Raises:
          ConfigError: the config of one of them is not known.
        """
        segments: list[Segment] = []
        for step in range(first_step, last_step + 1):
            config, devices = self._config_at(step), self._devices_at(step)
            last = segments[-1] if segments else None
            if last and last.config == config and _same_devices(last.devices, devices):
                segments[-1] = last._replace(last_step=step)
            else:
                segments.append(Segment(step, step, config, devices))
        return segments

    def _config_at(self, step: int) -> Config:
        for owned in self._owned:
            if owned.first_step <= step:
                return owned.config
        known = self._owned[-1].first_step
        checkpoints = [
            committed for committed in committed_steps(self.path) if committed >= known - 1
        ]
        works = f"; works: --step {min(checkpoints) + 1}" if checkpoints else ""
        raise ConfigError(
            f"{shown(self.named)}: {SESSIONS_FILE} does not state which keys the session from "
            f"update {known} on changed (an older maxbatch wrote it), so replay can take updates "
            f"again from checkpoint {known - 1} on{works}"
        )

    @cached_property
    def _owned(self) -> list[_Owned]:
        """The configs of the sessions that trained, the last first, back to the first one that is
        known.
        """
        config, owned = self.config, []
        for session in reversed(read_sessions(self.path)):
            if _has_trained(session):
                assert session.first_step is not None, "it has trained"
                owned.append(_Owned(session.first_step, config))
            if session.first_step is None:
                continue  # it ended before it stated its config
            if session.changed is None:
                if session.first_step == 1:
                    break  # nothing before it is left in the run
                return owned or [_Owned(session.first_step, config)]
            config = config.replaced(_before(session.changed))
        return [*owned, _Owned(1, config)]

    def _devices_at(self, step: int) -> DevicesUsed:
        used = [entry for entry in self._devices if entry.first_step <= step] or self._devices[:1]
        if not used:
            raise ConfigError(
                f"{shown(self.named)}: has no {DEVICES_FILE}, which states the devices that its "
                "batches follow from; restore it"
            )
        return used[-1]

    @cached_property
    def _devices(self) -> Sequence[DevicesUsed]:
        return read_devices(self.path)


def _has_trained(session: Session) -> bool:
    return session.first_step is not None and (session.last_step or 0) >= session.first_step


def _before(changed: Changed) -> dict[str, Value]:
    """Returns the values before a session of the keys that it changed."""
    return {
        name: None if before is None else KEYS[name].read(before, plain=False)
        for name, (before, _) in changed.items()
        if name in KEYS
    }


def _same_devices(first: DevicesUsed, other: DevicesUsed) -> bool:
    return dataclasses.replace(first, first_step=other.first_step) == other
