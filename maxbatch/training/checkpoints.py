"""Checkpoints: asynchronous, keyed by completed updates, each with its position and the stream it belongs to.

A checkpoint is three items: `params`, `opt_state` (both sharded arrays) and `position` (JSON: where training
stands, the identity of the stream and of the model, a checksum of the arrays and one over itself). It commits whole
or not at all. One that is damaged is set aside and the one before is taken; one that the system does not let be read
ends the run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from maxbatch.config.keys import Fixes, names_fixing
from maxbatch.config.values import shown
from maxbatch.parallel.hosts import broadcast, gather
from maxbatch.runs.metrics import cannot_read
from maxbatch.runs.position import CheckpointRecord, DamagedError, Position, committed_steps, read_record
from maxbatch.system.errors import ConfigError, cannot_write
from maxbatch.training.array_files import arrays_handler, os_error, plain_path, reason, restore_as
from maxbatch.training.compile.ladder import Background, MakeExecutable, compile_here
from maxbatch.training.state import TrainState

CHECKSUM = "checksum"  # name of the compiled program
_OTHER_ARRAYS = "tree structures do not match"  # Orbax, where the arrays are not those that were asked for


class Restored(NamedTuple):
    """A checkpoint, its arrays on their devices."""

    state: TrainState
    position: Position


class Newest(NamedTuple):
    """The newest checkpoint, before its arrays are read."""

    position: Position
    hosts: tuple[int, int]  # hosts of the run that wrote it, and those of them that loaded data


def model_identity(config: ConfigDict) -> dict[str, Any]:
    """Returns the keys that fix the shape and the start of the parameters, and the optimizer's state."""
    return {key: config[key] for key in names_fixing(Fixes.MODEL)}


def state_checksum(state: TrainState) -> jax.Array:
    """Returns a uint32 sum of the bits of every array: the same for any sharding, another if one word differs."""

    def bits(x: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
        return words.astype(jnp.uint32).sum(dtype=jnp.uint32)

    return jnp.stack([bits(leaf) for leaf in jax.tree.leaves(state)]).sum(dtype=jnp.uint32)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Keeps out the tracebacks of failed writes, which Orbax logs and raises."""
    return not record.exc_info


class Checkpoints:
    """The checkpoints of one run.

    All hosts call its methods alike. The first host looks at the folder, and the others follow it.

    Args:
      run_dir: the run's folder; checkpoints lie in `run_dir/checkpoints/STEP`.
      keep: newest checkpoints kept, None for all.
      identity: what a checkpoint must agree with to be resumed: `{"data": {...}, "model": {...}}`.
      warn: told of every checkpoint that is set aside.
      num_loading_hosts: hosts that load data, written down for the next run.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int | None,
        identity: dict[str, dict[str, Any]],
        warn: Callable[[str], None],
        num_loading_hosts: int = 1,
    ) -> None:
        self._run_dir = run_dir.absolute()
        self._folder = self._run_dir / "checkpoints"
        self._keep, self._identity, self._warn = keep, identity, warn
        self._hosts = (jax.process_count(), num_loading_hosts)
        self._checksum = jax.jit(state_checksum)
        self._compiled_checksum: Future[Any] | None = None
        self._opened: ocp.CheckpointManager | None = None
        self._stack = contextlib.ExitStack()

    @property
    def _manager(self) -> ocp.CheckpointManager:
        """Opened when it is first needed: a run that is refused before never starts Orbax's threads."""
        self._opened = self._opened or self._open()
        return self._opened

    def _open(self) -> ocp.CheckpointManager:
        logging.getLogger("absl").addFilter(_has_no_traceback)
        self._folder.mkdir(exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        handlers = {
            "params": arrays_handler(),
            "opt_state": arrays_handler(),
            "position": ocp.JsonCheckpointHandler(),
        }
        path = self._stack.enter_context(plain_path(self._folder))
        manager = ocp.CheckpointManager(path, options=options, item_handlers=handlers)
        return self._stack.enter_context(contextlib.closing(manager))

    def compile(
        self, abstract: TrainState, background: Background, make: MakeExecutable = compile_here
    ) -> None:
        """Starts compiling what a save runs on device, so that the first save need not."""
        if self._compiled_checksum is None:
            lower = partial(self._checksum.lower, abstract)
            self._compiled_checksum = background.start(partial(make, CHECKSUM, lower))

    def newest(self) -> Newest | None:
        """Returns the newest checkpoint whose JSON is sound; None if there is none.

        Raises:
          ConfigError: the checkpoint is of another dataset, seed, tokenizer or model, or cannot be read.
        """

        def look() -> dict[str, Any] | None:
            for step in committed_steps(self._run_dir):
                with contextlib.suppress(DamagedError):
                    return self._read(step).to_json()
            return None

        found = broadcast(look)
        record = CheckpointRecord.from_json(found) if found else None
        return Newest(record.position, record.hosts) if record else None

    def _read(self, step: int) -> CheckpointRecord:
        record = read_record(self._run_dir, step)
        for part, mine in self._identity.items():
            theirs = record.identity[part]
            differing = [k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)]
            if differing:
                changes = ", ".join(
                    f"{k}: {shown(repr(theirs.get(k)))} there, {shown(repr(mine.get(k)))} here"
                    for k in sorted(differing)
                )
                raise ConfigError(
                    f"run_dir={self._run_dir}: its checkpoint of step {step} belongs to another run ({changes}); "
                    "give another run_dir, or start from its parameters with load_parameters_path"
                )
        return record

    def restore(self, abstract: TrainState, make: MakeExecutable = compile_here) -> Restored | None:
        """Returns the newest checkpoint that is whole, placed as `abstract` says; None if there is none.

        Damaged ones are moved to `checkpoints-damaged/` with a warning. `make` gives the program that sums the arrays.

        Raises:
          ConfigError: a checkpoint is of another dataset, seed, tokenizer, model or optimizer, or cannot be read.
        """

        def look(step: int) -> list[Any]:
            try:
                return [None, self._read(step).to_json()]
            except DamagedError as error:
                return [str(error), None]

        restored, damages = None, {}
        for step in broadcast(partial(committed_steps, self._run_dir)):
            damage, saved = broadcast(partial(look, step))
            if not damage:
                record = CheckpointRecord.from_json(saved)
                state, damage = self._restore_arrays(step, abstract, record.checksum, make)
            if not damage:
                restored = Restored(state, record.position)
                break
            damages[step] = damage
        if not restored and any(_OTHER_ARRAYS in damage for damage in damages.values()):
            raise ConfigError(
                f"run_dir={self._run_dir}: no checkpoint has the arrays of this optimizer; set its keys to those of "
                "config.yml there, give another run_dir, or start from the parameters with load_parameters_path"
            )
        for step, damage in damages.items():
            self._set_aside(step, damage, restored.position.step if restored else 0)
        return restored

    def _restore_arrays(
        self, step: int, abstract: TrainState, checksum: int, make: MakeExecutable
    ) -> tuple[Any, str | None]:
        """Returns the state, or None and how it is damaged for one of the hosts."""
        state, damage = None, None
        arguments = ocp.args.Composite(
            params=restore_as(abstract.params), opt_state=restore_as(abstract.opt_state)
        )
        try:
            items = self._manager.restore(step, args=arguments)
            state = TrainState(items["params"], items["opt_state"])
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # whatever a damaged file makes of the reader
            if failure := os_error(error):
                raise cannot_read(self._folder / str(step), failure) from error
            damage = reason(error)
        damage = next(filter(None, gather(damage)), None)
        if damage:
            return None, damage
        if self._compiled_checksum is None:
            self._compiled_checksum = Future()
            self._compiled_checksum.set_result(make(CHECKSUM, partial(self._checksum.lower, abstract)))
        is_sound = int(self._compiled_checksum.result()(state)) == checksum
        return (state, None) if is_sound else (None, "its arrays do not match their checksum")

    def _set_aside(self, step: int, damage: str, resumed: int) -> None:
        self.close()

        def move() -> str:
            target = self._run_dir / "checkpoints-damaged" / str(step)
            while target.exists():
                target = target.with_name(target.name + "+")
            with self._writing():
                target.parent.mkdir(exist_ok=True)
                (self._folder / str(step)).rename(target)
            return str(target)

        self._warn(
            f"checkpoint {step} cannot be read ({damage}); moved to {broadcast(move)}, "
            f"training goes on from step {resumed}"
        )

    def save(self, state: TrainState, position: Position) -> None:
        """Starts saving; returns once the arrays may be overwritten, the files follow in the background.

        Raises:
          TrainingError: the disk is full, perhaps already for the save before; what was saved earlier is whole.
          ConfigError: the folder cannot be written.
        """
        checksum = self._compiled_checksum.result() if self._compiled_checksum else self._checksum
        record = CheckpointRecord(position, self._identity, int(checksum(state)), self._hosts)
        with self._writing():
            self._manager.save(
                position.step,
                args=ocp.args.Composite(
                    params=ocp.args.PyTreeSave(state.params),
                    opt_state=ocp.args.PyTreeSave(state.opt_state),
                    position=ocp.args.JsonSave(record.to_json()),
                ),
            )

    def has(self, step: int) -> bool:
        """Whether a checkpoint of this step is saved or being saved."""
        return step in (self._opened.all_steps() if self._opened else committed_steps(self._run_dir))

    def close(self) -> None:
        """Waits for the last save to commit; raises what `save` does."""
        self._opened = None
        with self._writing():
            self._stack.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if failure := os_error(error):
                raise cannot_write(self._folder, failure) from error
            raise
