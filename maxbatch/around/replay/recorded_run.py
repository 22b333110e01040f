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
from maxbatch.config.values import first_of, shown
from maxbatch.run.folder.devices import DEVICES_FILE, DevicesUsed, read_devices
from maxbatch.run.folder.hashes_file import ArrayHashes, read_hashes
from maxbatch.run.folder.metrics import Record, scan_metrics
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.folder.run_folder import SESSIONS_FILE
from maxbatch.run.folder.run_id import ForkedFrom, read_identity
from maxbatch.run.folder.sessions import read_sessions
from maxbatch.run.session_configs import SessionConfigs
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath, as_path
from maxbatch.system.terminal.warning import note

_MOST_NAMED = 8


class Segment(NamedTuple):
    """Consecutive updates with one config on the same devices."""

    first_step: int
    last_step: int
    config: Config
    devices: DevicesUsed


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
        return config

    @cached_property
    def lines(self) -> Mapping[int, Record]:
        """The lines of its updates, by step."""
        return {record[Metric.STEP]: record for record in scan_metrics(self.path).records}

    @cached_property
    def hashes(self) -> Mapping[int, ArrayHashes]:
        """The hashes of its states (`reproducible_sums`), by step; empty without."""
        return read_hashes(self.path)

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
        if self._fork and step <= self._fork["step"]:
            return self._origin._config_at(step)
        if config := self._configs.at(step):
            return config
        known = self._configs.first_known
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
    def _configs(self) -> SessionConfigs:
        sessions, own = read_sessions(self.path), self._fork["step"] if self._fork else 0
        if not sessions and max(self.lines, default=0) > own:
            note(
                f"{shown(self.named)}: has no {SESSIONS_FILE}, which states the keys that sessions "
                "changed; its updates are taken again with the last session's config"
            )
        return SessionConfigs(self.config, sessions)

    @cached_property
    def _fork(self) -> ForkedFrom | None:
        """What the run was forked from; None if it is no fork."""
        identity = read_identity(self.path)
        return None if identity is None else identity.forked_from

    @cached_property
    def _origin(self) -> RecordedRun:
        """The run that this one was forked from.

        Raises:
          ConfigError: its folder is gone, or is now another run's.
        """
        fork = self._fork
        assert fork is not None, "the run is a fork"
        origin = RecordedRun(fork["run"])
        identity = read_identity(origin.path)
        run_id = None if identity is None else identity.run_id
        if run_id != fork["run_id"] or not (origin.path / "config.yml").is_file():
            raise ConfigError(
                f"{shown(self.named)}: its updates until {fork['step']} are those of "
                f"{shown(fork['run'])}, which it was forked from; that run is not there, and "
                "states their config"
            )
        return origin

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


def _same_devices(first: DevicesUsed, other: DevicesUsed) -> bool:
    return dataclasses.replace(first, first_step=other.first_step) == other
