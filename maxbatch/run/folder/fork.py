"""Forks: a new run that continues another run's state, with the lines of its updates until then.

A fork has everything that a resume of the other run at that step would read: config, state, lines,
devices, references, and the warm start of reinforcement learning. The copied states bear the fork's
own id, and what they were forked from. Sessions, local checkpoints and ids at loggers are not
copied. Files that nobody changes are linked, or copied inside their store; the other run is only
read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from maxbatch.config.loading import dump_config
from maxbatch.config.pins import read_written
from maxbatch.run.folder.answers_file import ANSWERS_FILE
from maxbatch.run.folder.best_checkpoint import BEST, BestCheckpoint, read_best
from maxbatch.run.folder.devices import DEVICES_FILE, read_devices
from maxbatch.run.folder.hashes_file import HASHES_FILE
from maxbatch.run.folder.json_file import write_json
from maxbatch.run.folder.metrics import METRICS_FILE, lines_until
from maxbatch.run.folder.old_forms import refuse_old_record
from maxbatch.run.folder.position import (
    COMMITTED_FILE,
    CheckpointRecord,
    DamagedError,
    committed_steps,
    read_record,
)
from maxbatch.run.folder.run_folder import (
    REFERENCE_FILE,
    TRANSCRIPTS_FILE,
    WARM_START,
)
from maxbatch.run.folder.run_id import RUN_FILE, ForkedFrom, RunIdentity, read_identity
from maxbatch.system.errors import ConfigError, writing
from maxbatch.system.storage.atomic_files import (
    remove_leftovers,
    write_atomically,
    writing_folder,
)
from maxbatch.system.storage.new_folders import holding_new
from maxbatch.system.storage.storage import (
    AnyPath,
    clone_file,
    clone_files,
    remove_tree,
)

_CONFIG = "config.yml"  # written last: a folder without it is no fork
_RECORD = "position/metadata"
# their lines belong to updates
_LOGS = (METRICS_FILE, TRANSCRIPTS_FILE, ANSWERS_FILE, HASHES_FILE)


@dataclasses.dataclass(frozen=True)
class Fork:
    """A run's state to fork from."""

    run: AnyPath
    record: CheckpointRecord

    @classmethod
    def at(cls, run: AnyPath, step: int, remedy: Callable[[list[int]], str]) -> Fork:
        """Opens the state of a run after a step.

        Args:
          remedy: ends the refusal of a step without a checkpoint; called with the nearest steps
            that have one.

        Raises:
          ConfigError: there is no such checkpoint, or it cannot be used.
        """
        steps = committed_steps(run)
        if step not in steps:
            below = [other for other in steps if other < step][:1]
            above = [other for other in steps if other > step][-1:]
            raise ConfigError(
                f"{run}: has no checkpoint of step {step}{remedy(sorted(below + above))}"
            )
        checkpoint = run / "checkpoints" / str(step)
        try:
            record = read_record(checkpoint)
        except DamagedError as error:
            raise ConfigError(f"{checkpoint}: cannot be forked: {error}") from None
        refuse_old_record(checkpoint, record)
        return cls(run, record)

    @property
    def step(self) -> int:
        return self.record.position.step

    @property
    def origin(self) -> ForkedFrom:
        """What the states of the fork say of their origin."""
        run_id = self.record.run_id
        if run_id is None and (identity := read_identity(self.run)):
            run_id = identity.run_id
        return {"run": str(self.run.absolute()), "run_id": run_id, "step": self.step}

    def write(
        self, target: AnyPath, config: str, others: Mapping[str, bytes] | None = None
    ) -> RunIdentity:
        """Writes the fork into a new folder, whole or not at all; returns its identity.

        Args:
          config: its `config.yml`.
          others: further files, by name.

        Raises:
          ConfigError: the checkpoint vanished meanwhile, or a file cannot be read or written.
          TrainingError: the disk is full, or a store does not answer.
        """
        if isinstance(target, Path):
            with contextlib.suppress(OSError):
                remove_leftovers(target.parent)
        with writing(target), writing_folder(target, last=_CONFIG) as place:
            try:
                return self._write_files(place, target, config, others or {})
            except FileNotFoundError:
                raise self._vanished() from None

    def write_new(self, target: AnyPath, config: str, works: str) -> RunIdentity:
        """Writes the fork where nothing is, or where a fork was killed; raises as `write` does.

        `works` ends the refusal of a folder that is there.
        """
        why = f"and a fork is a new run; works: {works}"
        refusal = "forks a run there; wait for it, or name another folder"
        with holding_new(target, _CONFIG, why, refusal):
            return self.write(target, config)

    def _write_files(
        self, place: AnyPath, target: AnyPath, config: str, others: Mapping[str, bytes]
    ) -> RunIdentity:
        """Writes the files at a place that becomes `target`; the config last."""
        before = read_identity(self.run)
        identity = RunIdentity.new(is_older=False, forked_from=self.origin)
        if before:
            identity = dataclasses.replace(identity, reads=before.reads, software=before.software)
        self._copy_checkpoint(self.record, identity, place)
        self._copy_best(identity, place)
        for name in _LOGS:
            if lines := lines_until(self.run / name, self.step):
                write_atomically(place / name, b"".join(lines))
        if devices := [used for used in read_devices(self.run) if used.first_step <= self.step]:
            write_json(place / DEVICES_FILE, [dataclasses.asdict(used) for used in devices])
        if (reference := self.run / REFERENCE_FILE).is_file():
            clone_file(reference, place / REFERENCE_FILE)
        self._fork_warm_start(place / WARM_START, target / WARM_START)
        for name, content in others.items():
            write_atomically(place / name, content)
        write_json(place / RUN_FILE, dataclasses.asdict(identity))
        write_atomically(place / _CONFIG, config)
        return identity

    def _copy_checkpoint(
        self, record: CheckpointRecord, identity: RunIdentity, place: AnyPath
    ) -> None:
        """Copies a checkpoint of the run, whose record gets the id of the fork.

        A run that removes a checkpoint first takes away its name, or its mark: if both are there
        after the copy, nothing was missing during it.
        """
        step = str(record.position.step)
        source, copy = self.run / "checkpoints" / step, place / "checkpoints" / step
        mark = _mark_of(source)
        clone_files(source, copy, leave_out=(_RECORD, COMMITTED_FILE))
        forked = record._replace(
            run_id=identity.run_id, forked_from=identity.forked_from, line=None
        )
        (copy / "position").mkdir(parents=True, exist_ok=True)
        write_atomically(copy / _RECORD, json.dumps(forked.to_json()))
        if _mark_of(source) != mark:
            raise FileNotFoundError(source)
        write_atomically(copy / COMMITTED_FILE, b"")

    def _copy_best(self, identity: RunIdentity, place: AnyPath) -> None:
        """Copies the best checkpoint as of the step, if the run still has it."""
        best, checkpoints = self.record.position.best_eval, self.run / "checkpoints"
        if best.loss is None:
            return
        if best.step != self.step:
            try:
                record = read_record(checkpoints / str(best.step))
                self._copy_checkpoint(record, identity, place)
            except (DamagedError, FileNotFoundError):
                remove_tree(place / "checkpoints" / str(best.step))
                return
        best_of_run = read_best(checkpoints)
        is_extra = (
            best_of_run is not None and best_of_run.step == best.step and best_of_run.is_extra
        )
        named = BestCheckpoint(best.step, best.loss, is_extra)
        write_atomically(place / "checkpoints" / BEST, named.to_bytes())

    def _fork_warm_start(self, place: AnyPath, target: AnyPath) -> None:
        """Forks the run before the first update of reinforcement learning, at its end."""
        warm_start = self.run / WARM_START
        config, steps = read_written(warm_start / _CONFIG), committed_steps(warm_start)
        if config is None or not steps:
            return
        text = dump_config(config.replaced({"run_dir": str(target)}))
        place.mkdir(parents=True, exist_ok=True)
        Fork.at(warm_start, steps[0], lambda nearest: "")._write_files(place, target, text, {})

    def _vanished(self) -> ConfigError:
        left = committed_steps(self.run)
        others = f"; it has {', '.join(map(str, left[:5]))}" if left else ""
        return ConfigError(
            f"{self.run}: removed its checkpoint of step {self.step} while it was copied{others}; "
            "nothing was written"
        )


def _mark_of(checkpoint: AnyPath) -> object:
    """Returns a value that changes once a run begins to remove a checkpoint; FileNotFoundError if
    it has been removed.
    """
    if isinstance(checkpoint, Path):
        return os.stat(checkpoint).st_ino
    return (checkpoint / COMMITTED_FILE).stat().version
