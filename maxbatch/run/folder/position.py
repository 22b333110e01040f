"""The JSON of a checkpoint: the run's position and identity, checksums of its arrays and of itself;
no JAX.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxbatch.plan.place import Place
from maxbatch.run.folder.metrics import samples_seen_at
from maxbatch.run.folder.run_id import ForkedFrom, forked_from
from maxbatch.system.errors import reading
from maxbatch.system.storage.bounded import read_json
from maxbatch.system.storage.storage import AnyPath, is_whole, subfolders
from maxbatch.update.noise_scale import NoiseScale

_OWN_CHECKSUM = "json_checksum"
# of JSON without a checksum over itself
_OLD_FIELDS = {"position", "identity", "checksum", "hosts"}
COMMITTED_FILE = "commit_success.txt"  # written last where folders cannot be renamed


class BestEval(NamedTuple):
    """The lowest eval loss so far, by which a run may stop early."""

    loss: float | None = None  # None: no eval had a finite one
    step: int = 0  # completed updates at that eval
    evals_since: int = 0  # later evals, none of which was lower

    def after(self, loss: float, step: int) -> BestEval:
        """Returns the best eval after one more eval."""
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            return BestEval(loss, step)
        return self._replace(evals_since=self.evals_since + 1)


_MOST_SPIKES = 3  # whose checkpoints are kept


class Spikes(NamedTuple):
    """The last updates of a run with `skip_step_on_spikes`, the newest at the end."""

    losses: tuple[float, ...] = ()  # float32; of the updates that a spike is compared with
    grad_norms: tuple[float, ...] = ()  # float32, before clipping; of the same updates
    steps: tuple[int, ...] = ()  # the newest updates that were skipped as spikes; at most three

    def kept(self, loss: float, grad_norm: float, interval: int) -> Spikes:
        """Returns them after an update that is neither non-finite nor without weight."""
        return self._replace(
            losses=(*self.losses, loss)[-interval:],
            grad_norms=(*self.grad_norms, grad_norm)[-interval:],
        )

    def skipped(self, step: int) -> Spikes:
        """Returns them after an update that was skipped as a spike."""
        return self._replace(steps=(*self.steps, step)[-_MOST_SPIKES:])

    def checkpoints(self, steps: Sequence[int]) -> set[int]:
        """Returns, of a run's checkpoints, the newest before each spike."""
        before = (
            max((step for step in steps if step < spike), default=None) for spike in self.steps
        )
        return {step for step in before if step is not None}

    def without_window(self) -> Spikes:
        """Returns them after an update of a run that skips no spikes."""
        return Spikes(steps=self.steps)

    @classmethod
    def from_json(cls, saved: Sequence[Any]) -> Spikes:
        """Returns the spikes in a JSON array; raises as `CheckpointRecord.from_json` does."""
        losses, grad_norms, steps = saved
        if len(losses) != len(grad_norms) or len(steps) > _MOST_SPIKES:
            raise ValueError("out of range")
        return cls(
            tuple(map(_finite, losses)), tuple(map(_finite, grad_norms)), tuple(map(_whole, steps))
        )


class Position(NamedTuple):
    """The position of a run: Python numbers, since 32-bit counters overflow at 2.1 billion
    tokens.
    """

    step: int = 0  # completed updates
    place: Place = Place()  # in the stream
    skipped_updates: int = 0  # of the completed updates, those skipped as non-finite or as spikes
    consecutive_skips: int = 0  # non-finite updates in a row at the end
    noise_scale: NoiseScale = NoiseScale()  # averages of the gradient noise so far
    weightless_updates: int = 0  # of the completed updates, those whose batch had no loss weight
    best_eval: BestEval = BestEval()
    # of the completed updates, those of another trainer, whose state the run began with
    taken_over: int = 0
    spikes: Spikes = Spikes()

    @property
    def samples_seen(self) -> int:
        """Samples of the stream that were read."""
        return self.place.seen

    @property
    def trained_updates(self) -> int:
        """Updates of the run itself that changed its parameters."""
        return self.step - self.taken_over - self.skipped_updates - self.weightless_updates

    @property
    def is_consistent(self) -> bool:
        """Whether the counts of updates can be those of one run."""
        return self.consecutive_skips <= self.skipped_updates and self.trained_updates >= 0

    def to_json(self) -> dict[str, object]:
        """Returns the JSON object; the two numbers of its place are two fields."""
        saved = {
            "step": self.step,
            "samples_seen": self.place.seen,
            "skipped_updates": self.skipped_updates,
            "consecutive_skips": self.consecutive_skips,
            "noise_scale": self.noise_scale,
            "weightless_updates": self.weightless_updates,
            "best_eval": self.best_eval,
            "samples_planned": self.place.planned,
            "taken_over": self.taken_over,
            "spikes": self.spikes if any(self.spikes) else None,
        }
        return {name: value for name, value in saved.items() if value is not None}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Position:
        """Returns the position that a JSON object holds; raises what `CheckpointRecord.from_json`
        does.
        """
        planned = saved.get("samples_planned")
        trace, square, mass = map(_finite, saved["noise_scale"])
        return cls(
            step=_whole(saved["step"]),
            place=Place(
                _whole(saved["samples_seen"]), None if planned is None else _whole(planned)
            ),
            skipped_updates=_whole(saved["skipped_updates"]),
            consecutive_skips=_whole(saved["consecutive_skips"]),
            noise_scale=NoiseScale(trace, square, mass),
            weightless_updates=_whole(saved.get("weightless_updates", 0)),
            best_eval=_best_eval(saved.get("best_eval", BestEval())),
            taken_over=_whole(saved.get("taken_over", 0)),
            spikes=Spikes.from_json(saved.get("spikes", Spikes())),
        )


class StoredParameter(NamedTuple):
    """A parameter as a checkpoint holds it."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int  # 32 bits


class Origin(NamedTuple):
    """The source of a run's first parameters."""

    key: str  # the config key that states it; `init_weights_seed`: initialised, not read
    source: str = ""  # its path, as stated
    identity: str = ""  # a hash of its content
    step: int | None = None  # of the checkpoint; None for a Hugging Face folder

    def __str__(self) -> str:
        step = "" if self.step is None else f", its checkpoint of step {self.step}"
        return f"{self.key}={self.source!r}{step}" if self.source else self.key


class CheckpointRecord(NamedTuple):
    """The content of the JSON of a checkpoint."""

    position: Position
    identity: dict[str, dict[str, object]]  # that a run must match to resume it: "data" and "model"
    checksum: int  # of all arrays, 32 bits
    hosts: tuple[int, int]  # hosts of the run that wrote it, and how many of them loaded data
    # by name; None in a checkpoint made without
    parameters: dict[str, StoredParameter] | None = None
    # of the parameters, by name; None if the run keeps none
    average: dict[str, StoredParameter] | None = None
    ahead: str | None = None  # a hash of its state for the batches ahead; None: it has none
    # of the run that wrote it; None in a checkpoint made before runs had ids
    run_id: str | None = None
    # the source of its run's parameters; None where the run began before checkpoints stated it
    origin: Origin | None = None
    # of a local checkpoint: `line_digest` of its line in metrics.jsonl; None in run_dir
    line: str | None = None
    forked_from: ForkedFrom | None = None  # of a fork's run

    def to_json(self) -> dict[str, object]:
        """Returns the JSON object, which carries a checksum over itself."""
        saved = {
            name: value
            for name, value in self._asdict().items()
            if value is not None or name == "parameters"
        }
        saved["position"] = self.position.to_json()
        for part, stored in (("parameters", self.parameters), ("average", self.average)):
            if stored is not None:
                saved[part] = {name: form._asdict() for name, form in stored.items()}
        if self.origin is not None:
            saved["origin"] = self.origin._asdict()
        return saved | {_OWN_CHECKSUM: _checksum(saved)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> CheckpointRecord:
        """Returns the record that a JSON object holds; fields that a later version added are
        ignored.

        Raises:
          AttributeError, KeyError, TypeError, ValueError: the object has another form, or a value
            is out of range.
        """
        position = Position.from_json(saved["position"])
        num_hosts, num_loading_hosts = map(_whole, saved["hosts"])
        ahead_hash, run_id, line = (saved.get(name) for name in ("ahead", "run_id", "line"))
        if not (
            position.is_consistent
            and 1 <= num_loading_hosts <= num_hosts
            and all(isinstance(saved["identity"][part], dict) for part in ("data", "model"))
            and all(isinstance(text, str | None) for text in (ahead_hash, run_id, line))
        ):
            raise ValueError("out of range")

        hosts, parameters = (num_hosts, num_loading_hosts), _parameters(saved.get("parameters"))
        average = _parameters(saved.get("average"))
        checksum, origin = _word(saved["checksum"]), _origin(saved.get("origin"))
        return cls(
            position,
            saved["identity"],
            checksum,
            hosts,
            parameters,
            average,
            ahead_hash,
            run_id,
            origin,
            line,
            forked_from(saved.get("forked_from")),
        )


class DamagedError(Exception):
    """A checkpoint that cannot be trusted; the message is the reason."""


def read_record(checkpoint: AnyPath) -> CheckpointRecord:
    """Returns the content of the JSON of a checkpoint, checked for contradictions.

    In a run's `checkpoints/STEP` it must agree with that name. If the checksum over the JSON holds,
    the rest is trusted. One without it, which was made before, must agree with the metrics of its
    step, if there are any.

    Raises:
      DamagedError: the JSON is missing, or cannot be trusted.
      ConfigError: the system denies reading it.
    """
    path = checkpoint / "position" / "metadata"
    try:
        saved = _saved(path)
        own_checksum = saved.pop(_OWN_CHECKSUM, None)
        if _checksum(saved) != own_checksum and not (
            own_checksum is None and saved.keys() == _OLD_FIELDS
        ):
            raise DamagedError("its JSON does not match its checksum")
        record = CheckpointRecord.from_json(saved)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError("its JSON is not a checkpoint's") from None
    step = record.position.step
    is_in_run = checkpoint.parent.name == "checkpoints" and is_step(checkpoint.name)
    if is_in_run and step != int(checkpoint.name):
        raise DamagedError(f"it states step {step}")
    if own_checksum is None and is_in_run:
        recorded = samples_seen_at(checkpoint.parent.parent, step)
        if recorded and record.position.samples_seen not in recorded:
            raise DamagedError(
                f"metrics.jsonl states samples_seen {recorded[0]}, it states "
                f"{record.position.samples_seen}"
            )
    return record


def committed_steps(run_dir: AnyPath) -> list[int]:
    """Returns the steps of the checkpoints, newest first; half-written ones have other names than
    numbers.

    Raises:
      ConfigError: the folder cannot be read.
    """
    folder = run_dir / "checkpoints"
    names: list[str] = []
    with reading(folder), contextlib.suppress(FileNotFoundError):
        names = subfolders(folder)
    steps = sorted(map(int, filter(is_step, names)), reverse=True)
    return [step for step in steps if is_committed(folder / str(step))]


def last_saved(run_dir: AnyPath) -> int | None:
    """Returns the step of the newest checkpoint; None if there is none. Raises what
    `committed_steps` does.
    """
    return next(iter(committed_steps(run_dir)), None)


def newest_record(
    run_dir: AnyPath, check: Callable[[CheckpointRecord], None] = lambda record: None
) -> CheckpointRecord | None:
    """Returns the record of the newest checkpoint whose JSON is sound; None if there is none.

    Args:
      check: called with it; it may refuse the run.

    Raises:
      ConfigError: the system denies reading a checkpoint.
    """
    for step in committed_steps(run_dir):
        try:
            record = read_record(run_dir / "checkpoints" / str(step))
        except DamagedError:
            continue  # an older one may be sound
        check(record)
        return record
    return None


def is_committed(checkpoint: AnyPath) -> bool:
    """Returns whether a folder named by a step is a whole checkpoint."""
    return is_whole(checkpoint, COMMITTED_FILE)


def _saved(path: AnyPath) -> Any:
    """Returns the value of a JSON file, None if it is missing."""
    with reading(path), contextlib.suppress(FileNotFoundError):
        return read_json(path, str(path), finite=False) if path.is_file() else None
    return None


def is_step(name: str) -> bool:
    """Returns whether a name is a step's, as a checkpoint's folder is named."""
    return re.fullmatch("0|[1-9][0-9]*", name) is not None


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a whole number")
    return value


def _word(value: object) -> int:
    word = _whole(value)
    if word >= 2**32:
        raise ValueError("not 32 bits")
    return word


def _parameters(saved: Any) -> dict[str, StoredParameter] | None:
    if saved is None:
        return None
    return {
        str(name): StoredParameter(
            tuple(map(_whole, form["shape"])), str(form["dtype"]), _word(form["checksum"])
        )
        for name, form in saved.items()
    }


def _origin(saved: Any) -> Origin | None:
    if saved is None:
        return None
    step = saved["step"]
    key, source, identity = (str(saved[name]) for name in ("key", "source", "identity"))
    return Origin(key, source, identity, None if step is None else _whole(step))


def _best_eval(saved: Sequence[Any]) -> BestEval:
    loss, step, evals_since = saved
    return BestEval(None if loss is None else _finite(loss), _whole(step), _whole(evals_since))


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _checksum(saved: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()
