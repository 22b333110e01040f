"""The trainer under audit, called through its three functions.

Errors are one line: Refused if the trainer fails, ConfigError if it cannot be used.

Shapes: B rows of a batch, L tokens in a row.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxbatch.system.errors import ConfigError

Batch = dict[str, np.ndarray]  # tokens int32, weights float32, segments int32, each [B, L]

_LONGEST = 200  # characters of a trainer's message that are shown
_LOW_PRECISION = 2.0**-7  # of bfloat16: from 1 to the next number
_DIGITS_BELOW_HALF = 2**13 - 1  # bits of a float32 that float16 and bfloat16 lack


class Layout(NamedTuple):
    """How the batch of an update is cut."""

    num_devices: int
    gradient_accumulation_steps: int  # forward and backward passes of an update
    rows_per_pass: int  # rows of one pass, of all devices together; the last pass may hold fewer


class _Trainer(Protocol):
    """The functions that a trainer must have."""

    def init(self) -> object: ...
    def step(self, state: Any, batch: Batch, /) -> Any: ...  # (state, metrics)
    def params(self, state: Any, /) -> object: ...


Make = Callable[[Layout], object]


class Refused(Exception):
    """The trainer raised an exception; the message is one line."""


class Unsaved(Refused):
    """The state can neither be pickled nor copied."""


class Saved(NamedTuple):
    """A saved state."""

    pickled: bytes
    state: object = None  # a deep copy, of a state that cannot be pickled
    problem: str = ""  # why it cannot be


class Run(NamedTuple):
    """The results of a trainer over U updates."""

    # U + 1, float64: the initial ones, and those after each update
    params: list[dict[str, np.ndarray]]
    losses: list[float]  # U, or empty if the trainer reports no loss
    metrics: list[dict[str, float]]  # U; the other scalars that the trainer reports
    # machine epsilon of each parameter (`_rounding`); 0: whole numbers
    rounding: dict[str, float]

    def then(self, later: Run) -> Run:
        """Returns this run joined with a run from its last state."""
        return Run(
            self.params + later.params[1:],
            self.losses + later.losses,
            self.metrics + later.metrics,
            self.rounding,
        )


class Subject:
    """A trainer under audit.

    Making a trainer may compile it. Trainers are reused, unless repeating a run in the same kind of
    layout (one or several devices, one or several passes) gives other numbers.
    """

    def __init__(self, make: Make) -> None:
        self.make = make
        self._made_before: dict[Layout, _Trainer] = {}
        self._reusable: dict[tuple[bool, bool], bool] = {}
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def run(self, layout: Layout, batches: Sequence[Batch]) -> Run:
        """Trains on the batches.

        Raises:
          Refused: the trainer raised an exception.
          ConfigError: the trainer lacks a function, or a function returns a value of the wrong
            form.
        """
        kind = (layout.num_devices > 1, layout.gradient_accumulation_steps > 1)
        trainer = self._made_before.get(layout) or self._made(layout)
        result = self._run(trainer, batches)
        if kind not in self._reusable:
            self._reusable[kind] = self._is_same_again(trainer, result, batches)
        if self._reusable[kind]:
            self._made_before[layout] = trainer
        return result

    def repeat(self, layout: Layout, batches: Sequence[Batch]) -> Run:
        """Trains on the batches with a new trainer; raises as `run` does."""
        return self._run(self._made(layout), batches)

    def run_and_save(self, layout: Layout, batches: Sequence[Batch]) -> tuple[Run, Saved]:
        """Returns a run as `run` does, and its last state; raises Unsaved if it can neither be
        pickled nor copied.
        """
        trainer = self._made(layout)
        result, state = self._updated(trainer, _init(trainer), batches)
        saved = _saved(state)
        self._updated(trainer, state, batches[:1])  # the saved state must not change with this one
        return result, saved

    def resume(self, layout: Layout, saved: Saved, batches: Sequence[Batch]) -> Run:
        """Returns the run of a fresh trainer from a saved state; raises as `run` does."""
        trainer = self._made(layout)
        with _refusing():
            state = saved.state if saved.problem else pickle.loads(saved.pickled)
        return self._updated(trainer, state, batches)[0]

    def _is_same_again(self, trainer: _Trainer, result: Run, batches: Sequence[Batch]) -> bool:
        try:
            return is_equal(result, self._run(trainer, batches))
        except Refused:
            return False

    def _made(self, layout: Layout) -> Any:
        with _refusing():
            trainer = self.make(layout)
            lacking = [
                name
                for name in ("init", "step", "params")
                if not callable(getattr(trainer, name, None))
            ]
        if lacking:
            kind = type(trainer).__name__
            raise ConfigError(
                f"make: must return an object with init(), step() and params(); {kind} has no "
                f"{lacking[0]}()"
            )
        return trainer

    def _run(self, trainer: _Trainer, batches: Sequence[Batch]) -> Run:
        return self._updated(trainer, _init(trainer), batches)[0]

    def _updated(
        self, trainer: _Trainer, state: object, batches: Sequence[Batch]
    ) -> tuple[Run, object]:
        # the rounding of the last parameters, which have moved
        first, rounding = self._params(trainer, state)
        params, losses, metrics = [first], [], []
        for batch in batches:
            with _refusing():
                answer = trainer.step(state, {name: array.copy() for name, array in batch.items()})
                is_pair = (
                    isinstance(answer, tuple)
                    and len(answer) == 2
                    and isinstance(answer[1], Mapping | None)
                )
                step_metrics = dict(answer[1] or {}) if is_pair else {}
            if not is_pair:
                raise ConfigError(
                    f"step: returned a {type(answer).__name__}; it must return (state, metrics)"
                )
            state, scalars = answer[0], dict(_scalars(step_metrics))
            if "loss" in scalars:
                losses.append(scalars.pop("loss"))
            metrics.append(scalars)
            after, rounding = self._params(trainer, state)
            params.append(after)
        if losses and len(losses) < len(batches):
            raise ConfigError(
                "step: metrics['loss'] must be present after every update, or after none"
            )
        return Run(params, losses, metrics, rounding), state

    def _params(
        self, trainer: _Trainer, state: object
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        with _refusing():
            params = trainer.params(state)
            named = (
                {str(name): array for name, array in params.items()}
                if isinstance(params, Mapping)
                else {}
            )
        if not named:
            raise ConfigError(
                f"params: returned a {type(params).__name__}; it must return names and numpy arrays"
            )
        arrays = {name: _numbers(name, array) for name, array in named.items()}
        shapes = {name: array.shape for name, array in arrays.items()}
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            name = next(
                name
                for name in {**shapes, **self._shapes}
                if shapes.get(name) != self._shapes.get(name)
            )
            was, now = self._shapes.get(name, "absent"), shapes.get(name, "absent")
            raise ConfigError(
                f"params: {name} was {was} and is {now}; names and shapes must be those of every "
                "layout"
            )
        return arrays, {name: _rounding(array) for name, array in named.items()}


def _init(trainer: _Trainer) -> object:
    with _refusing():
        return trainer.init()


def _numbers(name: str, array: object) -> np.ndarray:
    """Returns a parameter in float64; raises ConfigError unless it holds real numbers."""
    if not isinstance(array, np.ndarray | np.generic):
        kind = type(array).__name__
        raise ConfigError(
            f"params: {name} is a {kind}, not a numpy array; works: np.asarray({name})"
        )
    if array.dtype.kind == "c":
        works = f"{name}.real and {name}.imag under two names"
        raise ConfigError(f"params: {name} holds complex numbers; works: {works}")
    try:
        with np.errstate(all="ignore"):
            return np.array(array, np.float64)
    except Exception as error:
        raise ConfigError(
            f"params: {name} is an array that holds no numbers ({_line(error)})"
        ) from error


def _scalars(metrics: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        try:
            if isinstance(value, str | bytes | bytearray):
                raise TypeError("a text")
            yield str(name), float(value)
        except BaseException as error:
            _reraise_if_stopped(error)
            if isinstance(name, str) and name == "loss":
                kind = type(value).__name__
                raise ConfigError(
                    f"step: metrics['loss'] is a {kind}, not a number ({_line(error)})"
                ) from error


def _rounding(array: np.ndarray) -> float:
    """Returns the machine epsilon of an array's dtype, or of bfloat16 if every value fits in it."""
    if array.dtype == np.float32 and not (array.view(np.uint32) & _DIGITS_BELOW_HALF).any():
        return _LOW_PRECISION
    if array.dtype.kind == "f" and array.dtype.itemsize > 2:
        return float(np.finfo(array.dtype).eps)
    return 0.0 if array.dtype.kind in "biuO" else _LOW_PRECISION


def _saved(state: object) -> Saved:
    try:
        return Saved(pickle.dumps(state))
    except BaseException as error:
        _reraise_if_stopped(error)
        problem = f"the state cannot be pickled ({_line(error)})"
    try:
        return Saved(b"", copy.deepcopy(state), problem)
    except BaseException as error:
        _reraise_if_stopped(error)
        raise Unsaved(problem) from error


def is_equal(a: Run, b: Run) -> bool:
    """Returns whether all numbers of two runs are equal, bit for bit."""
    arrays = ((x[name], y[name]) for x, y in zip(a.params, b.params, strict=True) for name in x)
    return np.array_equal(a.losses, b.losses, equal_nan=True) and all(
        np.array_equal(x, y, equal_nan=True) for x, y in arrays
    )


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns exceptions of the trainer into Refused; ignores NumPy's warnings."""
    try:
        with np.errstate(all="ignore"):
            yield
    except BaseException as error:
        _reraise_if_stopped(error)
        raise Refused(f"{_line(error)}{_place(error)}") from error


def _reraise_if_stopped(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error


def _place(error: BaseException) -> str:
    """Returns the file and the line of the adapter in which an exception was raised: ",
    trainer.py:12".

    The line is the deepest one outside of installed packages and of this one.
    """
    outside = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__
        and not frame.filename.startswith("<")
        and "site-packages" not in frame.filename
        and not frame.filename.startswith(sysconfig.get_path("stdlib"))
    ]
    return f", {os.path.basename(outside[-1].filename)}:{outside[-1].lineno}" if outside else ""


def _line(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        text = " ".join(str(error).split())
    except Exception:
        return kind
    return f"{kind}: {text}"[:_LONGEST] if text else kind
