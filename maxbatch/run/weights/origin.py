"""The origin of a run's first parameters, pinned in its checkpoints, so that a resume reads the
same or is refused.

A resume reads it again for data missing in the checkpoint: the model below adapters, GRPO's
reference, the reference of new pairs. If the origin is a run that trains on, it takes the pinned
checkpoint, not the newest. Any path with the pinned content works.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from maxbatch.config.config import Config
from maxbatch.config.model_forms import is_foreign_model
from maxbatch.config.sections import ModelConfig
from maxbatch.config.values import shown
from maxbatch.parallel.hosts import broadcast, gather, warn
from maxbatch.parallel.trees import State
from maxbatch.run.folder.best_checkpoint import find_best, names_best
from maxbatch.run.folder.position import CheckpointRecord, Origin, is_committed, last_saved
from maxbatch.run.weights.checkpoint_reading import Adapting, RemovedError, is_checkpoint
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath, as_path

T = TypeVar("T")
Reader = Callable[[State], State]  # (shapes, types and shardings) -> parameters


class Source(Protocol):
    """A model, or a model's adapters, on disk or in an object store."""

    @property
    def identity(self) -> str:
        """A hash of its content, independent of its folder; all hosts of a run compute it
        together.
        """

    def identity_like(self, other: str) -> str:
        """Returns the identity in another's form, for comparison; all hosts of a run call it
        together.
        """

    @property
    def step(self) -> int | None:
        """The step of a checkpoint, or the number of its folder in MaxText; None for a Hugging Face
        folder.
        """

    @property
    def stored_dtype(self) -> str | None:
        """The type of its tensors, as `bfloat16`; None: the config's `weight_dtype`.

        Raises:
          ConfigError: its tensors are missing or damaged.
        """

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """Returns the config of the model, with "key=value" texts over it.

        Raises:
          ConfigError: its model is not supported, or its files contradict each other.
        """

    def adapting(self) -> Adapting | None:
        """Returns the run of the adapters that it holds; None if it holds a whole model."""

    def open(self, config: ModelConfig, abstract_params: State) -> Reader:
        """Returns a function that reads the parameters, all of `abstract_params` or some of them.

        Headers and records are read now, values when the function is called.

        Raises:
          ConfigError: headers or records do not fit the shapes.
        """


OpenSource = Callable[[str], Source]


def open_origin(
    open_at: OpenSource, key: str, path: str, pin: Origin | None, whose: str
) -> tuple[Source, Origin]:
    """Opens the origin of a run; all hosts call it.

    Args:
      path: in a run folder, takes the checkpoint of the pinned step, or without a pin the first
        host's newest.
      pin: the required origin; None: any.
      whose: names the run, for messages.

    Raises:
      ConfigError: there is no such source, its content differs from the pin, or the hosts' sources
        differ.
    """
    named = f"{key}={shown(repr(path))}"
    step = pin.step if pin else broadcast(lambda: _named_step(path))
    checkpoints = None if step is None else _checkpoints_of(path)
    if step is None or checkpoints is None:
        source = open_at(path)
    else:
        held = f"{whose} started from it" if pin else "the first host has it"
        newest = partial(_named_step, path) if pin is None else lambda: None
        source = _open_step(open_at, checkpoints, step, newest, named, held)
    _refuse_different(named, gather([type(source).__name__, source.step]))
    identity = source.identity_like(pin.identity) if pin else source.identity
    _refuse_different(named, gather(identity))
    if pin and identity != pin.identity:
        raise ConfigError(
            f"{named}: is not the model that {whose} started from ({shown(str(pin), 300)}); put "
            "that one back, or name a copy of it"
        )
    origin = broadcast(lambda: Origin(key, path, identity, source.step))
    return source, Origin(*origin)


def _open_step(
    open_at: OpenSource,
    checkpoints: AnyPath,
    step: int,
    newest: Callable[[], int | None],
    named: str,
    held: str,
) -> Source:
    """Opens a run's checkpoint of a step, or a newer one if its run removes that one meanwhile; all
    hosts call it.
    """
    while True:
        folder, source = checkpoints / str(step), None
        if folder.is_dir() and is_committed(folder):
            with contextlib.suppress(RemovedError):
                source = open_at(str(folder))
        if all(gather(source is not None)) or (newer := broadcast(newest)) in (None, step):
            break
        step = newer
    if source is None:
        raise ConfigError(
            f"{named}: has no checkpoint of step {step}, and {held}; a run keeps only its newest "
            "ones (max_num_checkpoints_to_keep): put that checkpoint back, or name a copy of it"
        )
    return source


def _refuse_different(named: str, facts: list[object]) -> None:
    differing = [f"host {host}" for host, fact in enumerate(facts) if fact != facts[0]]
    if differing:
        verb = "differs" if len(differing) == 1 else "differ"
        raise ConfigError(
            f"{named}: the hosts have different models there ({', '.join(differing[:8])} {verb} "
            "from host 0); give every host the same files"
        )


def _checkpoints_of(path: str) -> AnyPath | None:
    """Returns the `checkpoints/` of a path that names one of them by its rank: a run folder, or its
    best checkpoint.
    """
    place = as_path(path)
    if is_checkpoint(place) or is_foreign_model(path):
        return None
    return place.parent if names_best(place) else place / "checkpoints"


def _named_step(path: str) -> int | None:
    """Returns the step of a run's newest checkpoint, or of its best one; None for other paths."""
    checkpoints = _checkpoints_of(path)
    if checkpoints is None:
        return None
    if names_best(as_path(path)):
        return int(find_best(as_path(path)).name)
    return last_saved(checkpoints.parent.absolute())


class RunOrigin:
    """The source of a run's first parameters, opened once.

    Args:
      path: the stated path; empty for new parameters.
      record: the record of the run's newest checkpoint; None for a new run.

    Attributes:
      pin: its record in checkpoints; None until it is read, which a run that version 0.3 began may
        not need.
    """

    def __init__(
        self,
        open_at: OpenSource,
        key: str,
        path: str,
        run_dir: AnyPath,
        record: CheckpointRecord | None,
    ) -> None:
        self._open_at, self._key, self._path, self._run_dir = open_at, key, path, run_dir
        self._is_resumed = record is not None
        self._source: Source | None = None
        self._has_read = False
        if record is not None:
            self.pin = record.origin
        else:
            self.pin = None if path else Origin(key)

    @property
    def mark(self) -> str:
        """A text that distinguishes these first parameters from others of the same model and seed;
        empty if unknown.
        """
        return "" if self.pin is None else self.pin.identity or self.pin.key

    def source(self) -> Source | None:
        """Returns the source to read; None for new parameters. All hosts call it.

        Raises:
          ConfigError: the source is missing, is not the run's origin, or differs between hosts.
        """
        if self._source is None:
            pin, whose = self.pin, f"the run in run_dir={self._run_dir}"
            if pin and pin.key != self._key:
                here = f"{self._key}={shown(repr(self._path))}" if self._path else "none"
                works = f"{pin.key}={shlex.quote(pin.source)}" if pin.source else f"{self._key}=''"
                raise ConfigError(
                    f"{self._key}: {whose} started from {shown(str(pin), 300)} and reads it "
                    f"again; the config states {here}; works: {works}"
                )
            if not self._path:
                return None
            self._source, self.pin = open_origin(self._open_at, self._key, self._path, pin, whose)
            if self._is_resumed and not pin:
                warn(
                    f"{self._run_dir}: was made before checkpoints stated what a run started "
                    f"from; {self._key}={shown(repr(self._path))} is read as it is now"
                )
            if pin:
                self.pin = pin
        return self._source

    def read_from(self, read: Callable[[Source], T]) -> T:
        """Calls `read` with the source and returns its result; all hosts call it.

        If the run that wrote the source trains on, and removes it before anything was read, its
        newest checkpoint is the source instead.

        Raises:
          ConfigError: the source was removed, and this run started from it.
        """
        while True:
            source = self.source()
            assert source is not None, "the parameters are not made"
            try:
                value = read(source)
            except RemovedError as error:
                self._take_newer(source, error)
            else:
                self._has_read = True
                return value

    def _take_newer(self, removed: Source, error: RemovedError) -> None:
        named = f"{self._key}={shown(repr(self._path))}"
        if self._is_resumed or self._has_read:
            raise ConfigError(
                f"{named}: its run removed the checkpoint of step {removed.step} while it was "
                f"read, and the run in run_dir={self._run_dir} started from it; put that "
                "checkpoint back, or name a copy of it"
            ) from error
        if broadcast(lambda: _named_step(self._path)) in (None, removed.step):
            raise error
        self._source = self.pin = None
        warn(f"{removed}: its run removed it while it was read; {self.source()} is read instead")
