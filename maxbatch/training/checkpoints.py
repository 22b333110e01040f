"""Checkpoints: asynchronous, keyed by completed updates, each with its position and the stream it belongs to.

A checkpoint is three items: `params`, `opt_state` (both sharded arrays) and `position` (JSON: where training
stands, the identity of the stream and of the model, and a checksum of the arrays). It commits whole or not at all.
One that cannot be read, or whose arrays do not match the checksum, is set aside and the one before is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from ml_collections import ConfigDict

from maxbatch.config.keys import Fixes, names_fixing
from maxbatch.config.loading import load_config
from maxbatch.parallel.hosts import broadcast, gather
from maxbatch.system.errors import ConfigError
from maxbatch.training.compile.ladder import Background, MakeExecutable, compile_here
from maxbatch.training.noise_scale import NoiseScale
from maxbatch.training.state import TrainState, abstract_model

CHECKSUM = "checksum"  # name of the compiled program

# What reading a damaged JSON file raises.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


class Position(NamedTuple):
    """Where a run stands: Python numbers, since 32-bit counters overflow at 2.1 billion tokens."""

    step: int = 0  # completed updates
    samples_seen: int = 0  # rows of the stream that were trained on
    skipped_updates: int = 0  # of the completed updates, those skipped as non-finite
    consecutive_skips: int = 0  # of those, the ones in a row at the end
    noise_scale: NoiseScale = NoiseScale()  # what was measured of the gradients' noise so far


class Restored(NamedTuple):
    state: TrainState
    position: Position


class Newest(NamedTuple):
    """What the newest checkpoint says before its arrays are read."""

    position: Position
    hosts: tuple[int, int]  # hosts of the run that wrote it, and those of them that loaded data


class _Saved(NamedTuple):
    """The JSON of a checkpoint."""

    position: Position
    checksum: int
    hosts: tuple[int, int]


def model_identity(config: ConfigDict) -> dict[str, Any]:
    """The keys that fix the shape and the start of the parameters, and the optimizer's state."""
    return {key: config[key] for key in names_fixing(Fixes.MODEL)}


def state_checksum(state: TrainState) -> jax.Array:
    """A uint32 sum of the bits of every array: the same for any sharding, another for any damage of one word."""

    def bits(x: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
        return words.astype(jnp.uint32).sum(dtype=jnp.uint32)

    return jnp.stack([bits(leaf) for leaf in jax.tree.leaves(state)]).sum(dtype=jnp.uint32)


class Checkpoints:
    """The checkpoints of one run.

    Args:
      run_dir: the run's folder; checkpoints lie in `run_dir/checkpoints/STEP`.
      keep: newest checkpoints kept, None for all.
      identity: what a checkpoint must agree with to be resumed: `{"data": {...}, "model": {...}}`.
      warn: told of every checkpoint that is passed over.
      num_loading_hosts: hosts that load data, written down for the next run.

    Its methods are called by all hosts alike. The first one looks at the folder, and the others follow it.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int | None,
        identity: dict[str, dict[str, Any]],
        warn: Callable[[str], None],
        num_loading_hosts: int = 1,
    ) -> None:
        self._warn = warn
        self._hosts = (jax.process_count(), num_loading_hosts)
        self._folder = run_dir.absolute() / "checkpoints"
        self._identity = identity
        self._checksum = jax.jit(state_checksum)
        self._compiled_checksum: Future[Any] | None = None
        self._keep = keep
        self._opened: ocp.CheckpointManager | None = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        """Opened when it is first needed: a run that is refused before never starts Orbax's threads."""
        self._opened = self._opened or self._open()
        return self._opened

    def _steps(self) -> list[int]:
        """The committed checkpoints, newest first; a half-written one has another name."""
        names = (path.name for path in self._folder.glob("*") if path.is_dir())
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        handlers = {
            "params": _arrays_handler(),
            "opt_state": _arrays_handler(),
            "position": ocp.JsonCheckpointHandler(),
        }
        return ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def compile(
        self, abstract: TrainState, background: Background, make: MakeExecutable = compile_here
    ) -> None:
        """Starts compiling what a save runs on device, so that the first save need not."""
        if self._compiled_checksum is None:
            lower = partial(self._checksum.lower, abstract)
            self._compiled_checksum = background.start(partial(make, CHECKSUM, lower))

    def newest(self) -> Newest | None:
        """The newest readable checkpoint, by its JSON alone; None where there is none."""

        def look() -> list[Any] | None:
            for step in self._steps():
                try:
                    saved = self._read(step)
                except _UNREADABLE:
                    continue
                return [saved.position._asdict(), saved.hosts]
            return None

        found = broadcast(look)
        return Newest(_position(found[0]), tuple(found[1])) if found else None

    def _read(self, step: int) -> _Saved:
        saved = json.loads((self._folder / str(step) / "position" / "metadata").read_text())
        for part, mine in self._identity.items():
            theirs = saved["identity"][part]
            differing = [k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)]
            if differing:
                changes = ", ".join(
                    f"{k}: {theirs.get(k)!r} there, {mine.get(k)!r} here" for k in sorted(differing)
                )
                raise ConfigError(
                    f"run_dir={self._folder.parent}: its checkpoint of step {step} belongs to another run ({changes}); "
                    "give another run_dir, or start from its parameters with load_parameters_path"
                )
        return _Saved(_position(saved["position"]), saved["checksum"], tuple(saved["hosts"]))

    def restore(self, abstract: TrainState, make: MakeExecutable = compile_here) -> Restored | None:
        """The newest checkpoint that is whole, placed as `abstract` says; None where there is none.

        Damaged ones are moved to `checkpoints-damaged/` with a warning. `make` gives the program that sums the arrays.

        Raises:
          ConfigError: the checkpoint is of another dataset, seed, tokenizer or model.
        """

        def look(step: int) -> list[Any]:
            try:
                saved = self._read(step)
            except _UNREADABLE as error:
                return [_reason(error), None, None]
            return [None, saved.position._asdict(), saved.checksum]

        for step in broadcast(self._steps):
            damage, position, checksum = broadcast(partial(look, step))
            if not damage:
                state, own_damage = self._restore_arrays(step, abstract)
                damages = [d for d in gather(own_damage) if d]
                damage = damages[0] if damages else self._wrong_sum(state, checksum, abstract, make)
            if not damage:
                return Restored(state, _position(position))
            self._set_aside(step, damage)
        return None

    def _restore_arrays(self, step: int, abstract: TrainState) -> tuple[Any, str | None]:
        """The state, and why this host could not read it."""
        arguments = ocp.args.Composite(
            params=_restore_as(abstract.params), opt_state=_restore_as(abstract.opt_state)
        )
        try:
            items = self._manager.restore(step, args=arguments)
            return TrainState(items["params"], items["opt_state"]), None
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # whatever a damaged file makes of the reader
            return None, _reason(error)

    def _wrong_sum(
        self, state: TrainState, checksum: int, abstract: TrainState, make: MakeExecutable
    ) -> str | None:
        if self._compiled_checksum is None:
            self._compiled_checksum = Future()
            self._compiled_checksum.set_result(make(CHECKSUM, partial(self._checksum.lower, abstract)))
        right = int(self._compiled_checksum.result()(state)) == checksum
        return None if right else "its arrays do not match their checksum"

    def _set_aside(self, step: int, damage: str) -> None:
        self.close()

        def move() -> str:
            target = self._folder.parent / "checkpoints-damaged" / str(step)
            while target.exists():
                target = target.with_name(target.name + "+")
            target.parent.mkdir(exist_ok=True)
            (self._folder / str(step)).rename(target)
            return str(target)

        target = broadcast(move)
        self._warn(f"checkpoint {step} cannot be read ({damage}); moved to {target}, the one before is taken")

    def save(self, state: TrainState, position: Position) -> None:
        """Starts saving; returns once the arrays may be overwritten, the files follow in the background."""
        checksum = self._compiled_checksum.result() if self._compiled_checksum else self._checksum
        record = {
            "position": position._asdict(),
            "identity": self._identity,
            "checksum": int(checksum(state)),
            "hosts": self._hosts,
        }
        self._manager.save(
            position.step,
            args=ocp.args.Composite(
                params=ocp.args.PyTreeSave(state.params),
                opt_state=ocp.args.PyTreeSave(state.opt_state),
                position=ocp.args.JsonSave(record),
            ),
        )

    def has(self, step: int) -> bool:
        """Whether a checkpoint of this step is saved or being saved."""
        return step in (self._opened.all_steps() if self._opened else self._steps())

    def close(self) -> None:
        """Waits for the last save to commit."""
        if self._opened:
            self._opened.close()
            self._opened = None


def _position(saved: dict[str, Any]) -> Position:
    return Position(**saved | {"noise_scale": NoiseScale(*saved["noise_scale"])})


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _arrays_handler() -> ocp.PyTreeCheckpointHandler:
    """Writes each shard from one of its replicas: slicing it over all of them would compile during training."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _restore_as(abstract: Any) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(
        abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract)
    )


def load_parameters(path: str | Path) -> tuple[ConfigDict, nnx.GraphDef[Any], nnx.State]:
    """The parameters of a run's newest checkpoint, or of one checkpoint, on the first device.

    Args:
      path: a run folder, or one of its `checkpoints/STEP`.

    Returns:
      The run's config, the model's graph and the parameters.

    Raises:
      ConfigError: there is no such run or checkpoint.
    """
    checkpoint = _find_checkpoint(Path(path).expanduser().absolute())
    config = load_config(checkpoint.parent.parent / "config.yml")
    graphdef, params = abstract_model(config)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), params)
    return config, graphdef, restore_parameters(checkpoint, params)


def restore_parameters(path: str | Path, abstract_params: nnx.State) -> nnx.State:
    """The parameters of a run folder or checkpoint, placed as `abstract_params` says.

    Raises:
      ConfigError: there is no such checkpoint, or its model has another shape.
    """
    checkpoint = _find_checkpoint(Path(path).expanduser().absolute())
    with ocp.Checkpointer(_arrays_handler()) as checkpointer:
        try:
            return checkpointer.restore(checkpoint / "params", args=_restore_as(abstract_params))
        except (ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise ConfigError(
                f"load_parameters_path={path}: its parameters do not fit this model ({reason})"
            ) from error


def _find_checkpoint(path: Path) -> Path:
    if (path / "params").is_dir():
        return path
    steps = [p for p in (path / "checkpoints").glob("*") if p.name.isdigit() and (p / "params").is_dir()]
    if not steps:
        raise ConfigError(
            f"{path}: no checkpoint here; give a run folder with checkpoints/, or one of checkpoints/STEP"
        )
    return max(steps, key=lambda p: int(p.name))
