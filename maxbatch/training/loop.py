"""A run, from its config to its last checkpoint: feed, step, record, save."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from maxbatch.config.loading import dump_config
from maxbatch.data.feed.feed import Feed
from maxbatch.data.store.tokenizers import make_tokenizer
from maxbatch.parallel.hosts import is_first
from maxbatch.parallel.mesh import must_take_turns
from maxbatch.plan.learning_rate import LearningRate
from maxbatch.plan.view import WIDTH, equation, ramp_table
from maxbatch.runs.metrics import MetricsLog
from maxbatch.runs.run_folder import RunFolder
from maxbatch.sampling.text import generate_text
from maxbatch.system.terminal import TrainingConsole
from maxbatch.training.checkpoints import Position
from maxbatch.training.compile.cache import CompileCounter, use_persistent_cache
from maxbatch.training.compile.ladder import Background, StepLadder
from maxbatch.training.evaluation import Evaluator
from maxbatch.training.profiling import Profiler
from maxbatch.training.progress import Progression, end_of_run, nothing_left
from maxbatch.training.recorder import Board, Dispatched, Output, Recorder
from maxbatch.training.run import Run, warn
from maxbatch.training.signals import StopRequest


class Outcome(NamedTuple):
    """How a run ended."""

    position: Position
    stopped_by: str | None  # the signal that stopped it early, None where it ran to its end


def train(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Outcome:
    """Trains as the config says, from the newest checkpoint of `run_dir` where there is one.

    Args:
      config: a resolved config (`maxbatch.load_config`).
      devices: the devices to train on, all by default.

    Returns:
      Where the run stands, and the signal that stopped it, if one did.

    Raises:
      ConfigError: the config, the data or the checkpoint cannot be used.
      TrainingError: `max_consecutive_skips` updates in a row were not finite.
    """
    use_persistent_cache(config)
    console = TrainingConsole(width=WIDTH, highlight=False, markup=False, quiet=not is_first())
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(config.run_dir, writes=is_first()))
        stop = stack.enter_context(StopRequest())
        compiles = stack.enter_context(CompileCounter())
        background = stack.enter_context(Background())
        run = Run(config, folder, stack, devices or jax.devices())
        if run.is_complete:
            console.print(nothing_left(config.run_dir, run.position, "samples"))
            return Outcome(run.position, None)
        if is_first():
            folder.write("config.yml", dump_config(config))
        manager, steps = run.plan.manager, run.plan_steps()
        introduce(run, steps, console)
        with (
            Feed(
                run.stream,
                manager,
                steps.shape_for,
                run.placement,
                run.position.step,
                run.total_steps,
            ) as feed,
            Profiler(config.profile_steps, folder.path / "profile") as profiler,
        ):
            started = time.perf_counter()
            run.prepare(steps, background)
            console.print(f"ready in {time.perf_counter() - started:.1f} s")
            outputs = open_outputs(run, folder, console) if is_first() else []
            with closing(
                Recorder(config, run.position, compiles, run.devices, run.stream, outputs)
            ) as recorder:
                train_to_the_end(run, steps, run.evaluator(), feed, recorder, profiler, background, stop)
        if run.checkpoints:
            run.checkpoints.close()  # what is said to be done or saved is on disk
        outcome = Outcome(run.position, None if run.is_complete else stop.signal_name)
        conclude(run, console, outcome)
        return outcome


def open_outputs(run: Run, folder: RunFolder, console: Console) -> list[Output]:
    """Where the run's records go: its metrics file, TensorBoard, and whoever looks on."""
    step, num_stages = run.position.step, len(run.plan.manager.stages)
    progression = Progression(console, run.total_steps, step, num_stages, run.config.log_period)
    metrics = MetricsLog(folder, step, run.position.samples_seen, warn)
    return [metrics, Board(folder, step), progression]


def train_to_the_end(
    run: Run,
    steps: StepLadder,
    evaluator: Evaluator | None,
    feed: Feed,
    recorder: Recorder,
    profiler: Profiler,
    background: Background,
    stop: StopRequest,
) -> None:
    """Takes every update that is left, or those until somebody asks to stop; saves at the end in both cases."""
    config, checkpoints = run.config, run.checkpoints
    rate = LearningRate.from_config(config, run.plan.manager)

    def save() -> None:
        if checkpoints and not checkpoints.has(recorder.position.step):
            recorder.sync()
            checkpoints.save(run.state, recorder.position)

    def evaluate() -> dict[str, Any]:
        return {"eval_loss": evaluator(run.state.params).loss} if evaluator else {}

    one_at_a_time = must_take_turns(run.devices)
    first_step, last_step = run.position.step + 1, run.total_steps
    behind: Dispatched | None = None  # its metrics are fetched while the next update runs
    stopped = False
    recorder.restart_clock()
    for step, feeding in enumerate(feed, start=first_step):
        if stop.before(step):
            stopped = True
            break
        profiler.before(step)
        learning_rate, batch_ratio = rate.at(feeding.first_sample), rate.batch_ratio_at(feeding.first_sample)
        run.state, metrics = steps[feeding.shape](
            run.state,
            feeding.batch,
            np.int32(feeding.num_micro_batches),
            np.float32(learning_rate),
            np.float32(batch_ratio),
        )
        if behind:
            recorder.record(behind)
        behind = Dispatched(
            step=step,
            samples_seen=feeding.first_sample + feeding.num_rows,
            num_rows=feeding.num_rows,
            stage=feeding.stage,
            micro_batch_size=feeding.shape.micro_batch,
            num_micro_batches=feeding.num_micro_batches,
            learning_rate=learning_rate,
            data_wait_s=feed.waited_s,
            metrics=metrics,
        )
        background.check()

        evaluates = evaluator is not None and (step == last_step or step % config.eval_interval == 0)
        saves = step == last_step or step % config.checkpoint_period == 0
        pauses = evaluates or saves or step == first_step or profiler.ends_after(step)
        if pauses or one_at_a_time:
            if step == first_step:
                jax.block_until_ready(metrics)
                run.compile_later(steps, evaluator, background)
            recorder.record(behind, evaluate if evaluates else None)
            behind = None
        if pauses:
            profiler.after(step)
            if saves:
                save()
            recorder.restart_clock()
    if behind:
        recorder.record(behind)
    if stopped:
        save()
    run.position = recorder.position


def introduce(run: Run, steps: StepLadder, console: Console) -> None:
    """Prints what is about to happen: the batch as an equation, the ramp, the model and where it trains."""
    console.print(equation(run.plan))
    if len(run.plan.manager.stages) > 1:
        console.print(ramp_table(run.plan))
        console.print(steps.describe())
    resumed = (
        f", resumed at step {run.position.step}, sample {run.position.samples_seen:,}"
        if run.position.step
        else ""
    )
    data = run.config.dataset_type
    if run.samples_per_epoch is not None:
        data += f", {run.samples_per_epoch:,} samples an epoch"
    console.print(f"{run.num_parameters:,} parameters | {data} | {run.config.run_dir}{resumed}")


def conclude(run: Run, console: Console, outcome: Outcome) -> None:
    """Prints where the run lies, a sample of what it learned, and what to type next."""
    config = run.config
    saved, stopped_by = run.checkpoints is not None, outcome.stopped_by
    console.print(end_of_run(config.run_dir, run.position, "samples", stopped_by=stopped_by, saved=saved))
    if stopped_by:
        return
    if config.generate_prompt:
        text = generate_text(
            run.state.params, make_tokenizer(config), config.generate_prompt, config, mesh=run.mesh
        )
        console.print(f"{'--- a sample ':-<80}\n{text}\n{'':-<80}")
    if run.checkpoints:
        prompt = f' --prompt "{config.generate_prompt}"' if config.generate_prompt else ""
        console.print(f"next: maxbatch generate {config.run_dir}{prompt}")
    console.print(f"      pip install tensorboard && tensorboard --logdir {config.run_dir}")
