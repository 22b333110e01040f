"""Checkpoints: asynchronous, keyed by completed updates.

A checkpoint is `params`, `opt_state`, the `average` of the parameters if the run keeps one (sharded arrays), and
`position` (JSON, `maxbatch.runs.position.CheckpointRecord`). A task whose batches ahead are under way adds `ahead`
(JSON). A checkpoint commits whole or not at all. A damaged one is set aside and the one before is taken; one that the
system does not let be read ends the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.options import AsyncOptions, AtomicityMode, AtomicityOptions, MultiprocessingOptions

from maxbatch.config.keys import Fixes
from maxbatch.config.loading import keys
from maxbatch.config.sections import names_fixing
from maxbatch.config.values import shown
from maxbatch.huggingface.folder.config_json import END_TOKENS
from maxbatch.parallel.hosts import broadcast
from maxbatch.runs.position import (
    OLD_BASE,
    CheckpointRecord,
    DamagedError,
    Position,
    committed_steps,
    is_committed,
    read_record,
)
from maxbatch.system.bounded import read_json
from maxbatch.system.errors import ConfigError, LeaseLost, reading, writing
from maxbatch.system.fences import BUILDING, ask
from maxbatch.system.patience import patience
from maxbatch.system.storage import AnyPath, is_remote, move_tree, probe, remove_tree, subfolders
from maxbatch.training.compile.background import Background, MakeExecutable, compile_here
from maxbatch.training.update.state import TrainState
from maxbatch.training.update.update_config import UpdateConfig
from maxbatch.training.weights.checksums import (
    CHECKSUMS,
    array_checksums,
    combined,
    damage_of_state,
    lower_checksums,
    stored_parameters,
)
from maxbatch.training.weights.orbax_files import (
    COMMIT_S,
    OTHER_ARRAYS,
    arrays_handler,
    os_error,
    plain_path,
    read_arrays,
    restore_as,
    staged_below,
)
from maxbatch.training.weights.origin import RunOrigin

_POLL_S, _LOOK_S = 0.05, 10.0
_MOST_AHEAD_BYTES = 4 << 30


class Restored(NamedTuple):
    """A checkpoint, its arrays on their devices."""

    state: TrainState
    position: Position
    ahead: str | None = None  # what its task has saved for the batches ahead


def model_identity(config: UpdateConfig) -> dict[str, Any]:
    """Returns the keys that fix the shape and the start of the parameters, and the optimizer's state.

    Adapters add theirs; the model that they adapt is the origin of their run (`Checkpoints.origin`).
    """
    identity = {key: config[key] for key in names_fixing(Fixes.MODEL)}
    if config.adapters.lora_rank:
        identity |= {key: config[key] for key in names_fixing(Fixes.ADAPTERS)}
    return identity


def _items(state: TrainState) -> list[tuple[str, Any]]:
    """Returns the names and the arrays of what a checkpoint holds."""
    return [(name, part) for name, part in state.saved._asdict().items() if part is not None]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one run.

    All hosts call its methods alike. The first host looks at the folder, and the others follow it.

    Args:
      run_dir: the run's folder; checkpoints lie in `run_dir/checkpoints/STEP`.
      keep: newest checkpoints kept, None for all.
      identity: what a checkpoint must agree with to be resumed: `{"data": {...}, "model": {...}}`.
      warn: told of every checkpoint that is set aside.
      num_loading_hosts: hosts that load data, written down for the next run.
      run_id: of the run, written down as well.

    Attributes:
      origin: what the run started from, which every checkpoint states if it is known.
    """

    def __init__(
        self,
        run_dir: AnyPath,
        keep: int | None,
        identity: dict[str, dict[str, Any]],
        warn: Callable[[str], None],
        num_loading_hosts: int = 1,
        run_id: str | None = None,
    ) -> None:
        self._run_dir = run_dir.absolute()
        self._folder = self._run_dir / "checkpoints"
        self._is_remote = is_remote(self._run_dir)  # then Orbax removes no leftovers, and tries again for minutes
        self._keep, self._identity, self._warn = keep, identity, warn
        self._hosts, self._run_id = (jax.process_count(), num_loading_hosts), run_id
        self.origin: RunOrigin[Any] | None = None
        self._checksums: Callable[[TrainState], np.ndarray] = array_checksums  # until they are compiled ahead
        self._opened: ocp.CheckpointManager | None = None
        self._started = self._saved = 0  # the step whose save began last; the last that is known to be saved
        self._stack = contextlib.ExitStack()

    @property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax's manager, opened at first use: a run that is refused before never starts its threads."""
        self._opened = self._opened or self._open()
        return self._opened

    def _open(self) -> ocp.CheckpointManager:
        self._folder.mkdir(exist_ok=True)
        in_store = self._is_remote
        # A folder of an object store cannot be renamed: a file that is written last says that it is whole.
        staged = None
        if in_store:
            staged = staged_below(self._folder, broadcast(partial(secrets.token_hex, 8)))
        mode = AtomicityMode.COMMIT_FILE if in_store else AtomicityMode.AUTO
        # Unless the hosts are named, Orbax has them wait for each other in a program on all devices. Another thread may
        # run programs there as well (it samples in reinforcement learning), in an order that differs between hosts.
        hosts = set(range(jax.process_count()))
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=False,  # it is there
            multiprocessing_options=MultiprocessingOptions(active_processes=hosts),
            cleanup_tmp_directories=not in_store,
            enable_async_checkpointing=True,
            lightweight_initialize=in_store,  # else it reads an object of every checkpoint, for times that nobody asks
            atomicity_options=AtomicityOptions(mode=mode),
            temporary_path_class=staged,
            async_options=AsyncOptions(timeout_secs=COMMIT_S),
        )
        handlers = {name: arrays_handler() for name in ("params", "opt_state", "average")}
        handlers["position"], handlers["ahead"] = ocp.JsonCheckpointHandler(), ocp.JsonCheckpointHandler()
        path = self._stack.enter_context(plain_path(self._folder))
        manager = ocp.CheckpointManager(path, options=options, item_handlers=handlers)
        return self._stack.enter_context(contextlib.closing(manager))

    def _remove_unfinished(self) -> None:
        """Removes from an object store what another start of the run left of a checkpoint.

        The folders that checkpoints are copied from go first: a start that was stopped cannot go on to copy.
        """
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(subfolders(self._folder), key=lambda name: not name.startswith(BUILDING)):
                if name.startswith(BUILDING) or not is_committed(self._folder / name):
                    remove_tree(self._folder / name)

    def compile(self, abstract: TrainState, background: Background, make: MakeExecutable = compile_here) -> None:
        """Starts compiling what a save runs on device, so that the first save need not."""
        if self._checksums is array_checksums:
            compiled = background.start(partial(make, CHECKSUMS, partial(lower_checksums, abstract.saved)))
            self._checksums = lambda state: jax.device_get(compiled.result()(state))

    def newest(self) -> CheckpointRecord | None:
        """Returns the record of the newest checkpoint whose JSON is sound; None if there is none.

        Raises:
          ConfigError: the checkpoint is of another dataset, seed, tokenizer or model, or cannot be read.
        """

        def look() -> dict[str, Any] | None:
            if self._is_remote:
                self._remove_unfinished()
            records = (self._look(step)[1] for step in committed_steps(self._run_dir))
            return next(filter(None, records), None)

        found = broadcast(look)
        record = CheckpointRecord.from_json(found) if found else None
        self._started = self._saved = record.position.step if record else 0
        return record

    def _look(self, step: int) -> tuple[str | None, Any]:
        """Returns how the JSON of a checkpoint is damaged, and the JSON if it is sound."""
        try:
            record = read_record(self._folder / str(step))
        except DamagedError as error:
            return str(error), None
        self.check_identity(record, f"its checkpoint of step {step}")
        return None, record.to_json()

    def check_identity(self, record: CheckpointRecord, which: str) -> None:
        """Raises ConfigError for a checkpoint of another dataset, seed, tokenizer or model; `which` names it."""
        for part, mine in self._identity.items():
            theirs = (
                {key: keys()[key].read(keys()[key].default) for key in mine if key in keys()} if part == "model" else {}
            )
            if part == "data" and END_TOKENS in mine:
                theirs[END_TOKENS] = mine[END_TOKENS]  # which checkpoints made before do not state
            theirs |= record.identity[part]  # a key that is newer than the checkpoint had its default
            theirs.pop(OLD_BASE, None)  # compared when the base is read
            changes = [
                f"{key}: {shown(repr(theirs.get(key)))} there, {shown(repr(mine.get(key)))} here"
                for key in sorted(mine.keys() | theirs.keys())
                if mine.get(key) != theirs.get(key)
            ]
            if changes:
                raise ConfigError(
                    f"run_dir={self._run_dir}: {which} belongs to another run ({', '.join(changes)}); "
                    "give another run_dir, or start from its parameters with load_parameters_path"
                )

    def restore(self, abstract: TrainState, make: MakeExecutable = compile_here, after: int = -1) -> Restored | None:
        """Returns the newest checkpoint that is whole, placed as `abstract` says; None if there is none.

        Damaged ones are moved to `checkpoints-damaged/` with a warning.

        Args:
          abstract: shapes and places of the state.
          make: gives the program of the checksums.
          after: the step of a state that is taken unless a newer checkpoint is whole; -1: there is no such state.

        Raises:
          ConfigError: a checkpoint is of another dataset, seed, tokenizer, model or optimizer, or cannot be read.
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
                ahead, damage = self._read_ahead(record)
            if not damage:
                restored = Restored(state, record.position, ahead)
                self._started = self._saved = step
                break
            damages[step] = damage
        if not restored and any(OTHER_ARRAYS in damage for damage in damages.values()):
            raise ConfigError(
                f"run_dir={self._run_dir}: no checkpoint has the arrays of this optimizer; set its keys to those of "
                "config.yml there, give another run_dir, or start from the parameters with load_parameters_path"
            )
        for step, damage in damages.items():
            self._set_aside(step, damage, restored.position.step if restored else max(0, after))
        return restored

    def _restore_arrays(
        self, record: CheckpointRecord, abstract: TrainState, make: MakeExecutable
    ) -> tuple[Any, str | None]:
        """Returns the state, or None and how it is damaged for one of the hosts."""
        step = record.position.step
        items = ocp.args.Composite(**{name: restore_as(part) for name, part in _items(abstract)})
        restored, damage = read_arrays(lambda: self._manager.restore(step, args=items), self._folder / str(step))
        if restored is None:
            return None, damage
        state = TrainState(**{name: restored[name] for name, _ in _items(abstract)})
        damage = self.damage_of(record, state, abstract, make)
        return (None, damage) if damage else (state, None)

    def damage_of(
        self, record: CheckpointRecord, state: TrainState, abstract: TrainState, make: MakeExecutable
    ) -> str | None:
        """Returns how a restored state differs from its record; None if it does not."""
        if record.parameters is not None and self._checksums is array_checksums:
            program = make(CHECKSUMS, partial(lower_checksums, abstract.saved))
            self._checksums = lambda state: jax.device_get(program(state))
        return damage_of_state(record, state, self._checksums)

    def _read_ahead(self, record: CheckpointRecord) -> tuple[str | None, str | None]:
        """Returns what a checkpoint holds for the batches ahead, and how it is damaged."""
        if record.ahead is None:
            return None, None
        path = self._folder / str(record.position.step) / "ahead" / "metadata"
        with reading(path):
            try:
                ahead = read_json(path, str(path), most_bytes=_MOST_AHEAD_BYTES)["ahead"]
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                ahead = None
        if not isinstance(ahead, str) or _hash(ahead) != record.ahead:
            return None, "what it holds for the batches ahead does not match its checksum"
        return ahead, None

    def _set_aside(self, step: int, damage: str, resumed: int) -> None:
        self.close()

        def move() -> str:
            target = self._run_dir / "checkpoints-damaged" / str(step)
            while target.exists():
                target = target.with_name(target.name + "+")
            with self._writing():
                target.parent.mkdir(exist_ok=True)
                move_tree(self._folder / str(step), target)
            return str(target)

        self._warn(
            f"checkpoint {step} cannot be read ({damage}); moved to {broadcast(move)}, "
            f"training goes on from step {resumed}"
        )

    def save(self, state: TrainState, position: Position, ahead: str | None = None) -> None:
        """Starts saving; returns once the arrays may be overwritten, the files follow in the background.

        Args:
          state: the state after the update.
          position: the position there.
          ahead: what the task needs for the batches ahead, besides.

        Raises:
          TrainingError: the disk is full, perhaps already for the save before; what was saved earlier is whole.
          ConfigError: the folder cannot be written.
        """
        record = self.record_of(state, position, ahead)
        with self._writing():
            items = {name: ocp.args.PyTreeSave(part) for name, part in _items(state)}
            items["position"] = ocp.args.JsonSave(record.to_json())
            if ahead is not None:
                items["ahead"] = ocp.args.JsonSave({"ahead": ahead})
            self._wait()
            self._manager.save(position.step, args=ocp.args.Composite(**items))
            self._started, self._saved = position.step, self._started  # it waited for the save before

    def record_of(self, state: TrainState, position: Position, ahead: str | None = None) -> CheckpointRecord:
        """Returns the record of a state, its checksums included; all hosts must call it."""
        sums = self._checksums(state.saved)
        parameters, average = stored_parameters(state.params, sums), None
        if state.average is not None:  # whose checksums are the last
            average = stored_parameters(state.average, sums[-len(parameters) :])
        of_ahead = None if ahead is None else _hash(ahead)
        checksum = combined(sums)
        origin = self.origin.pin if self.origin else None
        return CheckpointRecord(
            position, self._identity, checksum, self._hosts, parameters, average, of_ahead, self._run_id, origin
        )

    def has(self, step: int) -> bool:
        """Returns whether a checkpoint of this step is saved or being saved."""
        return step in (self._opened.all_steps() if self._opened else committed_steps(self._run_dir))

    def close(self) -> None:
        """Waits for the last save to commit; raises what `save` does."""
        with self._writing():
            self._wait()
            if self._opened:
                self._opened = None
                self._stack.close()
                self._saved = self._started

    @property
    def fate(self) -> str:
        """What is known to be saved, in words."""
        with contextlib.suppress(Exception):  # of a save that failed, which is told elsewhere
            if self._opened and not self._opened.is_saving_in_progress():
                self._opened.wait_until_finished()  # raises the error of its thread, which check_for_errors does not
                self._saved = self._started
        saved = f"step {self._saved}" if self._saved else "nothing"
        return f"{saved} is saved" + ("" if self._started == self._saved else f", and perhaps step {self._started}")

    def _wait(self) -> None:
        """Waits for the last save. If it takes long, looks whether the store still takes writes, and else gives it up.

        TensorStore tries again for minutes what a full or closed bucket refuses.
        """
        looked_at = time.monotonic()
        while self._is_remote and self._opened and self._opened.is_saving_in_progress():
            time.sleep(_POLL_S)
            if time.monotonic() < looked_at + _LOOK_S and not patience().gave_up:
                continue
            probe(self._run_dir)
            looked_at = time.monotonic()
        if self._is_remote and self._opened:
            self._opened.wait_until_finished()
            self._saved = self._started

    def _give_up(self) -> None:
        """Leaves the threads of a save to a store that fails behind: nobody waits for them, or is told once more."""
        if self._is_remote:
            self._opened = None
            self._stack.pop_all()
            patience().leave_behind()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if failure := os_error(error, self._folder):
                self._give_up()
                with writing(self._folder):
                    raise failure from error
            try:
                ask(str(self._folder / "a checkpoint"))
            except LeaseLost:  # what failed may be the work of the process that holds the folder now
                self._give_up()
                raise
            raise
