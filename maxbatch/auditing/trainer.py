"""The trainer under audit, called through the few functions that it has to have.

Shapes: B rows of a batch, L tokens in a row.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxbatch.system.errors import ConfigError

Batch = dict[str, np.ndarray]  # tokens int32, weights float32, segments int32, each [B, L]

_LONGEST = 200  # characters of a message of the trainer's
_LOW_PRECISION = 2.0**-8  # of bfloat16


class Layout(NamedTuple):
    """How the batch of an update is cut."""

    num_devices: int
    gradient_accumulation_steps: int  # forward and backward passes of an update
    rows_per_pass: int  # rows of one pass, of all devices together; the last pass may hold fewer


class Refused(Exception):
    """The trainer raised an exception; the message is one line."""


class Run(NamedTuple):
    """What a trainer answered over U updates."""

    params: list[dict[str, np.ndarray]]  # U + 1, float64: the initial ones, and those after each update
    losses: list[float]  # U, or none where the trainer reports none
    metrics: list[dict[str, float]]  # U; the other scalars that the trainer reports
    rounding: dict[str, float]  # of each parameter's type: the distance from 1 to the next number


class Subject:
    """A trainer under audit.

    Making a trainer may compile it, so one is made anew for each run only if those of its kind of layout (on several
    devices or on one, of several passes or of one) do not give the same numbers when they run again.

    Args:
      make: returns a trainer for a layout.
    """

    def __init__(self, make: Callable[[Layout], Any]) -> None:
        self._make = make
        self._made_before: dict[Layout, Any] = {}
        self._reusable: dict[tuple[bool, bool], bool] = {}
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def run(self, layout: Layout, batches: Sequence[Batch], save_after: int = 0) -> Run:
        """Trains on the batches; from `save_after` updates on with a fresh trainer and the saved state.

        Raises:
          Refused: the trainer raised an exception.
          ConfigError: the trainer lacks a function, or one returns something else than it has to.
        """
        kind = (layout.num_devices > 1, layout.gradient_accumulation_steps > 1)
        made = None if save_after else self._made_before.get(layout)
        trainer = made or self._made(layout)
        found = self._run(trainer, layout, batches, save_after)
        if kind not in self._reusable:
            self._reusable[kind] = not save_after and self._is_same_again(trainer, found, layout, batches)
        if self._reusable[kind]:
            self._made_before[layout] = trainer
        return found

    def _is_same_again(self, trainer: Any, found: Run, layout: Layout, batches: Sequence[Batch]) -> bool:
        try:
            return _same(found, self._run(trainer, layout, batches))
        except Refused:
            return False

    def _made(self, layout: Layout) -> Any:
        with _refusing():
            trainer = self._make(layout)
        for name in ("init", "step", "params"):
            if not callable(getattr(trainer, name, None)):
                kind = type(trainer).__name__
                raise ConfigError(
                    f"make: must return an object with init(), step() and params(); {kind} has no {name}()"
                )
        return trainer

    def _run(self, trainer: Any, layout: Layout, batches: Sequence[Batch], save_after: int = 0) -> Run:
        with _refusing():
            state = trainer.init()
        first, rounding = self._params(trainer, state)
        params, losses, metrics = [first], [], []
        for number, batch in enumerate(batches):
            if save_after and number == save_after:
                state = _saved(state)
                trainer = self._made(layout)
            with _refusing():
                answer = trainer.step(state, {name: array.copy() for name, array in batch.items()})
            if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Mapping | None):
                raise ConfigError(f"step: returned a {type(answer).__name__}; it must return (state, metrics)")
            state = answer[0]
            scalars = dict(_scalars(answer[1] or {}))
            if "loss" in scalars:
                losses.append(scalars.pop("loss"))
            metrics.append(scalars)
            params.append(self._params(trainer, state)[0])
        if losses and len(losses) < len(batches):
            raise ConfigError("step: metrics['loss'] must be there after every update, or after none")
        return Run(params, losses, metrics, rounding)

    def _params(self, trainer: Any, state: Any) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        with _refusing():
            params = trainer.params(state)
        if not isinstance(params, Mapping) or not params:
            raise ConfigError(f"params: returned a {type(params).__name__}; it must return names and numpy arrays")
        for name, array in params.items():
            if not isinstance(array, np.ndarray | np.generic):
                kind = type(array).__name__
                raise ConfigError(f"params: {name} is a {kind}, not a numpy array; works: np.asarray({name})")
        try:
            found = {str(name): np.array(array, np.float64) for name, array in params.items()}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"params: an array holds no numbers ({_line(error)})") from error
        shapes = {name: array.shape for name, array in found.items()}
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            name = next(name for name in {**shapes, **self._shapes} if shapes.get(name) != self._shapes.get(name))
            was, now = self._shapes.get(name, "absent"), shapes.get(name, "absent")
            raise ConfigError(f"params: {name} was {was} and is {now}; names and shapes must be those of every layout")
        return found, {str(name): _rounding(array) for name, array in params.items()}


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        try:
            yield str(name), float(value)
        except (TypeError, ValueError) as error:
            if name == "loss":
                raise ConfigError(f"step: metrics['loss'] is a {type(value).__name__}, not a number") from error


def _rounding(array: np.ndarray) -> float:
    if array.dtype.kind == "f" and array.dtype.itemsize > 2:
        return float(np.finfo(array.dtype).eps)
    return _LOW_PRECISION if array.dtype.itemsize == 2 else 0.0


def _saved(state: Any) -> Any:
    """Returns the state as read back from a file, or the state itself if it cannot be written to one."""
    with contextlib.suppress(Exception):
        return pickle.loads(pickle.dumps(state))
    with contextlib.suppress(Exception):
        return copy.deepcopy(state)
    return state


def _same(a: Run, b: Run) -> bool:
    arrays = ((x[name], y[name]) for x, y in zip(a.params, b.params, strict=True) for name in x)
    return np.array_equal(a.losses, b.losses, equal_nan=True) and all(
        np.array_equal(x, y, equal_nan=True) for x, y in arrays
    )


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raises Refused for whatever the trainer raises; NumPy's warnings are no news here."""
    try:
        with np.errstate(all="ignore"):
            yield
    except (Exception, SystemExit) as error:
        raise Refused(_line(error)) from error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_LONGEST] if text else type(error).__name__
