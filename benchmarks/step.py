"""(a) The trainer's update and its whole loop against the same update written by hand.

Both start from the same parameters and train on the same rows; before anything is timed, three
updates must give the same losses and gradient norms. Then hand-written update, trainer's update and
trainer's loop (feed, recording of metrics, learning rate) take turns in one process.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import jax

from benchmarks.handwritten import Form, HandwrittenStep, parameters_of_trainer
from benchmarks.measurement import BenchmarkError, Measurement, ratio
from benchmarks.trainer import (
    LEARNING_RATE,
    MODEL,
    QUICK_MODEL,
    RUN,
    TrainerStep,
    rows_of_documents,
)
from maxbatch.config.config import Config
from maxbatch.config.loading import load_config
from maxbatch.data.feed.feed import StagedBatch
from maxbatch.run.compile.cache import CompileCounter
from maxbatch.run.context import RunContext
from maxbatch.run.pretraining import BuiltPretraining, open_pretraining
from maxbatch.run.record.profiling import Profiler
from maxbatch.run.session import Session

BAR = 0.97
TOLERANCE = 2e-4


class FeedInTurns:
    """The loop's feed, which gives the other sides their turns after each turn of the loop.

    Attributes:
      seconds: of every side, per turn of `updates_per_turn` updates; the loop's under "loop".
    """

    def __init__(
        self,
        feed: Iterator[StagedBatch],
        others: Mapping[str, Callable[[], object]],
        updates_per_turn: int,
    ) -> None:
        self._feed, self._others, self._updates_per_turn = feed, others, updates_per_turn
        self._taken = 0
        self._turn_began = 0.0
        self.seconds: dict[str, list[float]] = {name: [] for name in (*others, "loop")}

    def __iter__(self) -> Iterator[StagedBatch]:
        return self

    def __next__(self) -> StagedBatch:
        if self._taken % self._updates_per_turn == 0:
            if self._taken:
                self.seconds["loop"].append(time.perf_counter() - self._turn_began)
            self._take_turns_of_others()
        self._taken += 1
        return next(self._feed)

    def _take_turns_of_others(self) -> None:
        order = list(self._others.items())
        turn = self._taken // self._updates_per_turn
        for name, side in order if turn % 2 == 0 else reversed(order):
            start = time.perf_counter()
            for _ in range(self._updates_per_turn):
                side()
            self.seconds[name].append(time.perf_counter() - start)
        self._turn_began = time.perf_counter()


def measure(quick: bool) -> list[Measurement]:
    """Ratios of tokens/s, trainer over hand-written, at accumulation 1 and 4."""
    if quick:
        return _measure(1, QUICK_MODEL, turns=3, updates_per_turn=1)
    return [
        *_measure(1, MODEL, turns=9, updates_per_turn=3),
        *_measure(4, MODEL, turns=9, updates_per_turn=1),
    ]


def _measure(
    num_micro_batches: int, model: Sequence[str], turns: int, updates_per_turn: int
) -> list[Measurement]:
    with tempfile.TemporaryDirectory() as run_dir:
        config = load_config(
            overrides=[
                *model,
                *RUN,
                f"run_dir={run_dir}",
                "per_device_batch_size=2",
                f"gradient_accumulation_steps={num_micro_batches}",
                # The first turn warms up; the request for the next turn ends the timing of one.
                f"steps={(turns + 1) * updates_per_turn + 1}",
                f"learning_rate={LEARNING_RATE}",
            ]
        )
        with ExitStack() as stack:
            seconds = _seconds_in_turns(config, num_micro_batches, updates_per_turn, stack)
    timed = {name: values[1 : turns + 1] for name, values in seconds.items()}
    cut = f"accumulation {num_micro_batches}"
    return [
        ratio(f"update, {cut}", timed["hand-written"], timed["update"], bar=BAR, sense="at least"),
        ratio(
            f"whole loop, {cut}", timed["hand-written"], timed["loop"], bar=BAR, sense="at least"
        ),
    ]


def _seconds_in_turns(
    config: Config, num_micro_batches: int, updates_per_turn: int, stack: ExitStack
) -> dict[str, list[float]]:
    context = RunContext(config, jax.devices(), stack)
    session = Session(context, open_pretraining(context))
    session.console.quiet = True
    assert isinstance(session.built, BuiltPretraining), "a new run has updates left"
    recorder, show = session.open_recorder(stack.enter_context(CompileCounter()), stack)
    running, state = session.built.run(None, show, stack)
    shape = running.steps.shape_for(session.plan.manager.stages[-1], True)
    trainer = TrainerStep(
        config, session.planned.mesh, session.planned.abstract, running.steps[shape], shape
    )
    handwritten = HandwrittenStep(
        parameters_of_trainer(jax.device_get(state.params)),
        session.planned.mesh,
        Form(config.base_num_query_heads),
        (num_micro_batches, shape.micro_batch, config.max_target_length),
        LEARNING_RATE,
    )
    rows = rows_of_documents(num_micro_batches * shape.micro_batch, config)
    sides = {
        "hand-written": lambda: handwritten(rows),
        "update": lambda: trainer(rows, num_micro_batches),
    }
    check_equal(*sides.values())

    in_turns = FeedInTurns(running.feed, sides, updates_per_turn)
    profiler = stack.enter_context(Profiler("", session.folder.path / "profile"))
    session.train(replace(running, feed=in_turns), state, recorder, profiler)
    return in_turns.seconds


def check_equal(
    handwritten: Callable[[], tuple[float, float]],
    trainer: Callable[[], tuple[float, float]],
    later: float = TOLERANCE,
) -> None:
    """Takes three updates of both; raises BenchmarkError if a loss or a gradient norm differs.

    Args:
      later: the tolerance after the first update.
    """
    for update in range(1, 4):
        theirs, ours = handwritten(), trainer()
        tolerance = TOLERANCE if update == 1 else later
        if not all(
            math.isclose(a, b, rel_tol=tolerance) for a, b in zip(theirs, ours, strict=True)
        ):
            raise BenchmarkError(
                f"update {update}: loss and gradient norm are {theirs} by hand and {ours} in the "
                "trainer; times of different computations say nothing"
            )
