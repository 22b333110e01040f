"""Checkpoints: asynchronous, keyed by completed updates.

A checkpoint is `params`, `opt_state`, the `average` of the parameters if the run keeps one (sharded
arrays), and `position` (JSON, `maxbatch.run.folder.position.CheckpointRecord`). A task with batches
ahead in progress adds `ahead`, one file. Commits are atomic. A damaged checkpoint is set aside and
the previous one is used; an unreadable one ends the run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from maxbatch.config.combined import UpdateConfig
from maxbatch.config.keys import Fixes
from maxbatch.config.sections import FORMER_KEYS, KEYS, names_fixing
from maxbatch.config.values import shown
from maxbatch.data.store.store import WHOLE_CONTENT
from maxbatch.parallel.hosts import broadcast
from maxbatch.plan.holes import NO_HOLES, Holes
from maxbatch.run.compile.background import Background, MakeExecutable, compile_here
from maxbatch.run.compile.flags import CHECKSUMS
from maxbatch.run.folder.ahead import AHEAD_FILE, ahead_hash, read_ahead
from maxbatch.run.folder.best_checkpoint import BEST, BestCheckpoint, read_best
from maxbatch.run.folder.foreign import foreign_best
from maxbatch.run.folder.holes_behind import refuse_other_holes
from maxbatch.run.folder.old_forms import old_form, refuse_old_record
from maxbatch.run.folder.position import (
    CheckpointRecord,
    DamagedError,
    Position,
    committed_steps,
    is_committed,
    newest_record,
    read_record,
)
from maxbatch.run.folder.run_id import ForkedFrom
from maxbatch.run.weights.checkpoint_writing import Save, remove_unfinished
from maxbatch.run.weights.checksums import (
    array_checksums,
    checksums_by,
    combined,
    damage_of_state,
    lower_checksums,
    stored_parameters,
    warn_of_no_checksums,
)
from maxbatch.run.weights.origin import RunOrigin
from maxbatch.run.weights.shard_files import OTHER_ARRAYS
from maxbatch.run.weights.shards import read_item, read_together
from maxbatch.system.errors import ConfigError, writing
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.storage import AnyPath, move_tree
from maxbatch.update.state import TrainState


class Restored(NamedTuple):
    """A checkpoint, its arrays on their devices."""

    state: TrainState
    position: Position
    ahead: bytes | None = None  # saved by its task for the batches ahead


def model_identity(config: UpdateConfig) -> dict[str, object]:
    """Returns the keys that fix the shapes and initial values of the parameters, and the
    optimizer's state.

    Adapters add their keys; their base model is the run's origin (`Checkpoints.origin`).
    """
    identity = {key: config[key] for key in names_fixing(Fixes.MODEL)}
    if config.adapters.lora_rank:
        identity |= {key: config[key] for key in names_fixing(Fixes.ADAPTERS)}
    return identity


def _items(state: TrainState) -> list[tuple[str, object]]:
    return [(name, part) for name, part in state.saved._asdict().items() if part is not None]


class Checkpoints:
    """The checkpoints of one run.

    All hosts call each method together. The first host looks at the folder, and the others follow
    its decision.

    Args:
      run_dir: the run's folder; checkpoints are in `run_dir/checkpoints/STEP`.
      keep: number of newest checkpoints to keep; None: all.
      identity: facts that a checkpoint must share to be resumed: `{"data": {...}, "model": {...}}`.
      warn: called for every checkpoint set aside.
      num_loading_hosts: hosts that load data, recorded for the next run.
      keeps_best: whether the checkpoint with the lowest eval loss is kept too.
      on_commit: called with the step of every committed checkpoint, on a thread of the first host.
      forked_from: the state that the run began with, if it is a fork.
      holes: own numbers that the stream leaves out; those behind a checkpoint are in its identity.

    Attributes:
      origin: the source of the run's first parameters, recorded in every checkpoint if known.
      has_set_aside: whether this start found damaged checkpoints and moved them away.
    """

    def __init__(
        self,
        run_dir: AnyPath,
        keep: int | None,
        identity: dict[str, dict[str, object]],
        warn: Callable[[str], None],
        num_loading_hosts: int = 1,
        run_id: str | None = None,
        keeps_best: bool = False,
        on_commit: Callable[[int], None] | None = None,
        holes: Holes = NO_HOLES,
        forked_from: ForkedFrom | None = None,
    ) -> None:
        self._run_dir = run_dir.absolute()
        self._folder = self._run_dir / "checkpoints"
        self._keep, self._identity, self._warn = keep, identity, warn
        self._hosts, self._run_id = (jax.process_count(), num_loading_hosts), run_id
        self._on_commit, self._holes = on_commit, holes
        self._forked_from = forked_from
        self.has_set_aside = False
        self.origin: RunOrigin | None = None
        # until they are compiled ahead
        self._checksums: Callable[[TrainState], np.ndarray] = array_checksums
        self._keeps_best = keeps_best
        # as `checkpoints/best` states it, or the save under way
        self._best: BestCheckpoint | None = None
        self._steps: set[int] | None = None  # saved or being saved, once the first save begins
        self._token = ""  # this start's own
        self._thread = ThreadPoolExecutor(1, "maxbatch-checkpoint")
        self._under_way: tuple[Save, Future[None]] | None = None
        self._is_best_foreign = False  # another program's, so that a later save tries again
        self._started = self._saved = 0  # step of the last save begun; last step known to be saved

    def compile(
        self, abstract: TrainState, background: Background, make: MakeExecutable = compile_here
    ) -> None:
        """Starts compiling the programs of a save, ahead of the first one."""
        if self._checksums is array_checksums:
            compiled = background.start(
                partial(make, CHECKSUMS, partial(lower_checksums, abstract.saved))
            )
            self._checksums = lambda state: checksums_by(compiled.result(), abstract.saved)(state)

    def newest(self) -> CheckpointRecord | None:
        """Returns the record of the newest checkpoint with sound JSON, or None.

        Raises:
          ConfigError: the checkpoint has another dataset, seed, tokenizer or model, or cannot be
            read.
        """

        def look() -> dict[str, object] | None:
            remove_unfinished(self._folder)
            newest = newest_record(self._run_dir, self._check)
            if newest and self._keeps_best:
                self._mend_best(newest.position)
            return newest.to_json() if newest else None

        saved = broadcast(look)
        record = CheckpointRecord.from_json(saved) if saved else None
        self._started = self._saved = record.position.step if record else 0
        return record

    def _mend_best(self, position: Position) -> None:
        """Writes `checkpoints/best` if the writer was killed between a checkpoint and this file."""
        best, marked = position.best_eval, read_best(self._folder)
        folder = self._folder / str(best.step)
        if (
            best.loss is None
            or (marked and marked.step == best.step)
            or not folder.is_dir()
            or not is_committed(folder)
        ):
            return
        with writing(self._folder):
            write_atomically(
                self._folder / BEST, BestCheckpoint(best.step, best.loss, is_extra=False).to_bytes()
            )

    def _look(self, step: int) -> tuple[str | None, Any]:
        """Returns the damage of a checkpoint's JSON, or the JSON if it is sound."""
        try:
            record = read_record(self._folder / str(step))
        except DamagedError as error:
            return str(error), None
        self._check(record)
        return None, record.to_json()

    def _check(self, record: CheckpointRecord) -> None:
        """Raises ConfigError for a checkpoint in an old form, or of another run."""
        step = record.position.step
        refuse_old_record(self._folder / str(step), record)
        self.check_identity(record, f"its checkpoint of step {step}")

    def check_identity(self, record: CheckpointRecord, which: str) -> None:
        """Raises ConfigError for a checkpoint with another dataset, seed, tokenizer or model;
        `which` names it.

        The same for one in an old form, without the hash of a whole Megatron store.
        """
        refuse_other_holes(self._run_dir, record, which, self._holes)
        for part, mine in self._identity_at(record.position).items():
            theirs: dict[str, object] = (
                {key: KEYS[key].default_value for key in mine if key in KEYS}
                if part == "model"
                else {}
            )
            theirs |= record.identity[part]  # keys newer than the checkpoint had their defaults
            for key, text in FORMER_KEYS.items():
                if str(theirs.get(key)) == text:
                    del theirs[key]
            if any(key.endswith(WHOLE_CONTENT) for key in mine.keys() - theirs.keys()):
                raise old_form(self._run_dir, "a part of a Megatron store is its hash")
            changes = [
                f"{key}: {shown(repr(theirs.get(key)))} there, {shown(repr(mine.get(key)))} here"
                for key in sorted(mine.keys() | theirs.keys())
                if mine.get(key) != theirs.get(key)
            ]
            if changes:
                raise ConfigError(
                    f"run_dir={self._run_dir}: {which} belongs to another run "
                    f"({', '.join(changes)}); give another run_dir, or start from its parameters "
                    "with load_parameters_path"
                )

    def _identity_at(self, position: Position) -> dict[str, dict[str, object]]:
        """Returns the identity of a checkpoint at a position, with the holes behind it."""
        behind = self._holes.before(self._holes.position_after(position.samples_seen))
        return self._identity | {"data": self._identity["data"] | behind.identity}

    def restore(
        self, abstract: TrainState, make: MakeExecutable = compile_here, after: int = -1
    ) -> Restored | None:
        """Restores the newest whole checkpoint onto the shardings of `abstract`; returns None if
        there is none.

        Moves damaged ones to `checkpoints-damaged/`, with a warning.

        Args:
          abstract: shapes and places of the state.
          after: the step of another available state; only newer checkpoints count; -1: none.

        Raises:
          ConfigError: a checkpoint has another dataset, seed, tokenizer, model or optimizer, or
            cannot be read.
        """
        restored, damages = None, {}
        for step in broadcast(partial(committed_steps, self._run_dir)):
            if step <= after:
                break
            damage, saved = broadcast(partial(self._look, step))
            if not damage:
                record = CheckpointRecord.from_json(saved)
                state, damage = self._restore_arrays(record, abstract, make)
            if not damage:
                ahead, damage = read_ahead(self._folder / str(step), record)
            if not damage:
                restored = Restored(state, record.position, ahead)
                self._started = self._saved = step
                break
            damages[step] = damage
        if not restored and any(OTHER_ARRAYS in damage for damage in damages.values()):
            raise ConfigError(
                f"run_dir={self._run_dir}: no checkpoint has the arrays of this optimizer; set "
                "its keys to those of config.yml there, give another run_dir, or start from the "
                "parameters with load_parameters_path"
            )
        for step, damage in damages.items():
            self._set_aside(step, damage, restored.position.step if restored else max(0, after))
        return restored

    def _restore_arrays(
        self, record: CheckpointRecord, abstract: TrainState, make: MakeExecutable
    ) -> tuple[Any, str | None]:
        """Returns the state, or None and its damage on one of the hosts."""
        folder = self._folder / str(record.position.step)
        restored, damage = read_together(
            lambda: {name: read_item(folder / name, part) for name, part in _items(abstract)},
            folder,
        )
        if restored is None:
            return None, damage
        state = TrainState(**restored)  # type: ignore[arg-type]  # each item has the type of its part
        damage = self.damage_of(record, state, abstract, make)
        return (None, damage) if damage else (state, None)

    def damage_of(
        self,
        record: CheckpointRecord,
        state: TrainState,
        abstract: TrainState,
        make: MakeExecutable,
    ) -> str | None:
        """Compares a restored state with its record; returns the damage, or None."""
        if record.parameters is None:
            warn_of_no_checksums(self._folder / str(record.position.step))
        elif self._checksums is array_checksums:
            program = make(CHECKSUMS, partial(lower_checksums, abstract.saved))
            self._checksums = checksums_by(program, abstract.saved)
        return damage_of_state(record, state, self._checksums)

    def _set_aside(self, step: int, damage: str, resumed: int) -> None:
        def move() -> str:
            with writing(self._folder):
                beside = self._run_dir / "checkpoints-damaged"
                beside.mkdir(exist_ok=True)
                try:
                    return self._move(step, beside / str(step))
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                # `checkpoints/` is a mount, or a link to another disk: stay on it, under a name
                # that is no step.
                return self._move(step, self._folder / f"damaged-{step}")

        self.has_set_aside = True
        self._warn(
            f"checkpoint {step} cannot be read ({damage}); moved to {broadcast(move)}, "
            f"training continues from step {resumed}"
        )

    def _move(self, step: int, target: AnyPath) -> str:
        """Renames a checkpoint to a new name, which it returns."""
        while target.exists():
            target = target.with_name(target.name + "+")
        move_tree(self._folder / str(step), target)
        return str(target)

    def save(
        self,
        state: TrainState,
        position: Position,
        ahead: bytes | None = None,
        is_extra: bool = False,
    ) -> None:
        """Starts a save; returns when the arrays may be overwritten, and writes files in the
        background.

        Args:
          ahead: the task's data for the batches ahead.
          is_extra: whether it is saved for its eval loss alone.

        Raises:
          TrainingError: the disk is full, possibly during the previous save; earlier saves are
            whole.
          ConfigError: the folder cannot be written.
        """
        record = self.record_of(state, position, ahead)
        small = {"position/metadata": json.dumps(record.to_json()).encode()}
        if ahead is not None:
            small[AHEAD_FILE] = ahead

        self._wait()
        if self._steps is None:
            with writing(self._folder):
                self._folder.mkdir(exist_ok=True)
            self._token = broadcast(partial(secrets.token_hex, 4))
            self._steps = set(broadcast(partial(committed_steps, self._run_dir)))
            self._best = self._read_best() if self._keeps_best else broadcast(self._forget_best)

        # which checkpoints stay, and which is the best, once this one is whole
        steps = sorted(self._steps | {position.step})
        best = self._best_of(position, steps, is_extra)
        old = self._old(steps, best, position.spikes.checkpoints(steps))
        new_best = best if best != self._best or self._is_best_foreign else None
        save = Save(
            self._folder,
            self._token,
            position.step,
            dict(_items(state)),
            small,
            old,
            new_best,
            self._on_commit,
        )
        self._under_way = save, self._thread.submit(save.run)
        self._started, self._steps, self._best = position.step, set(steps) - set(old), best

    def _read_best(self) -> BestCheckpoint | None:
        """Returns the content of `checkpoints/best`, as the first host reads it."""
        fields = broadcast(self._stated_best)
        return BestCheckpoint(*fields) if fields else None

    def _stated_best(self) -> BestCheckpoint | None:
        return None if foreign_best(self._folder) else read_best(self._folder)

    def _forget_best(self) -> None:
        """Removes a `checkpoints/best` of ours, which further evals, whose best is not kept, may
        prove wrong.
        """
        if foreign_best(self._folder):
            return
        with writing(self._folder):
            (self._folder / BEST).unlink(missing_ok=True)

    def _best_of(
        self, position: Position, steps: Sequence[int], is_extra: bool
    ) -> BestCheckpoint | None:
        """Returns the best of the checkpoints `steps` at a position, the last of them saved
        there.
        """
        lowest = position.best_eval
        if not self._keeps_best or lowest.loss is None or lowest.step not in steps:
            return self._best
        if self._best and self._best.step == lowest.step:
            return self._best
        return BestCheckpoint(lowest.step, lowest.loss, is_extra and lowest.step == position.step)

    def _old(
        self, steps: Sequence[int], best: BestCheckpoint | None, before_spikes: set[int]
    ) -> list[int]:
        """Returns the checkpoints to remove: all but the newest ones, the best one and those before
        the newest spikes.

        One that was saved for its eval loss alone counts for none of the newest, and goes once
        another one is better.
        """
        extra = {saved.step for saved in (best, self._best) if saved and saved.is_extra}
        counted = [step for step in steps if step not in extra]
        old = counted[: -self._keep] if self._keep else []
        old += sorted(extra - {steps[-1]})
        kept = before_spikes | ({best.step} if best else set())
        return [step for step in old if step in steps and step not in kept]

    def record_of(
        self,
        state: TrainState,
        position: Position,
        ahead: bytes | None = None,
        line: str | None = None,
    ) -> CheckpointRecord:
        """Returns the record of a state with its checksums; all hosts must call it.

        Args:
          ahead: the task's data for the batches ahead.
          line: the `line_digest` of the state's last update, for a local checkpoint.
        """
        sums = self._checksums(state.saved)
        parameters, average = stored_parameters(state.params, sums), None
        if state.average is not None:  # its checksums come last
            average = stored_parameters(state.average, sums[-len(parameters) :])
        of_ahead = None if ahead is None else ahead_hash(ahead)
        checksum = combined(sums)
        origin = self.origin.pin if self.origin else None
        return CheckpointRecord(
            position,
            self._identity_at(position),
            checksum,
            self._hosts,
            parameters,
            average,
            of_ahead,
            self._run_id,
            origin,
            line,
            self._forked_from,
        )

    def has(self, step: int) -> bool:
        """Returns whether this step is saved or being saved."""
        return step in (committed_steps(self._run_dir) if self._steps is None else self._steps)

    def has_best(self, step: int) -> bool:
        """Returns whether `checkpoints/best` names the checkpoint of this step."""
        if foreign_best(self._folder):
            return False
        best = read_best(self._folder) if self._best is None else self._best
        return best is not None and best.step == step

    def _wait(self) -> None:
        """Waits for the last save; raises as `save` does."""
        if self._under_way is None:
            return
        (save, written), self._under_way = self._under_way, None
        try:
            written.result()
        except BaseException:
            if not save.may_be_committed:
                self._started = self._saved
            raise
        self._saved, self._is_best_foreign = self._started, save.is_best_foreign

    def close(self) -> None:
        """Waits for the last save to commit; raises as `save` does."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()

    @property
    def fate(self) -> str:
        """The newest saved step, for messages."""
        if self._under_way and self._under_way[1].done():
            with contextlib.suppress(Exception):  # a failed save is reported elsewhere
                self._wait()
        saved = f"step {self._saved} is saved" if self._saved else "nothing is saved"
        return (
            saved if self._started == self._saved else f"{saved}, and perhaps step {self._started}"
        )
