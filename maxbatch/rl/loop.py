"""A run of reinforcement learning, from its config to its last checkpoint: sample, score, train, step, record, save.

All pairs of a batch are drawn from the parameters before its first update, so that neither the chunks nor what of them
runs side by side shows in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import jax
from ml_collections import ConfigDict
from rich.console import Console

from maxbatch.config.loading import dump_config
from maxbatch.plan.learning_rate import LearningRate
from maxbatch.plan.view import WIDTH, equation
from maxbatch.rl.collecting import Collector
from maxbatch.rl.evaluation import Evaluation
from maxbatch.rl.objective import Pairs
from maxbatch.rl.rewards import Rewards
from maxbatch.rl.run import PolicyRun
from maxbatch.rl.timeline import Timeline
from maxbatch.rl.warm_start import warm_up
from maxbatch.runs.metrics import MetricsLog, StepLog
from maxbatch.runs.run_folder import RunFolder
from maxbatch.system.errors import ConfigError
from maxbatch.system.terminal import TrainingConsole
from maxbatch.training.compile.cache import CompileCounter, use_persistent_cache
from maxbatch.training.loop import Outcome
from maxbatch.training.profiling import Profiler
from maxbatch.training.progress import Progression, end_of_run, nothing_left
from maxbatch.training.recorder import Board, Dispatched, Output, Recorder
from maxbatch.training.run import warn
from maxbatch.training.signals import StopRequest
from maxbatch.training.step import StepMetrics


def train_policy(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Outcome:
    """Trains a policy as the config says, from the newest checkpoint of `run_dir` where there is one.

    Args:
      config: a resolved config with a `batch_size`.
      devices: all by default.

    Returns:
      Where the run stands, and the signal that stopped it, if one did.

    Raises:
      ConfigError: the config, the prompts, the rewards or the checkpoint cannot be used.
      TrainingError: `max_consecutive_skips` updates in a row were not finite.
    """
    if jax.process_count() > 1:
        raise ConfigError("maxbatch rl: must run on one host, and this is one of several")
    devices = list(devices or jax.devices())
    use_persistent_cache(config)
    console = TrainingConsole(width=WIDTH, highlight=False, markup=False)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(config.run_dir))
        rewards = stack.enter_context(Rewards(config))
        run = PolicyRun(config, folder, stack, devices)
        if run.is_complete:
            console.print(nothing_left(config.run_dir, run.position, "prompts"))
            return Outcome(run.position, None)
        folder.write("config.yml", dump_config(config))
        warm = None if run.position.step else warm_up(config, run.batch, devices)
        if warm and warm.stopped_by:
            return Outcome(run.position, warm.stopped_by)
        stop = stack.enter_context(StopRequest())
        compiles = stack.enter_context(CompileCounter())
        console.print(equation(run.plan))
        console.print(f"{run.num_parameters:,} parameters | {config.dataset_type} | {config.run_dir}")
        run.prepare()
        step = run.position.step
        board = Board(folder, step)
        transcripts = stack.enter_context(closing(Transcripts(folder, board, step)))
        progression = Progression(console, run.total_steps, step, 1, config.log_period)
        metrics = MetricsLog(folder, step, run.position.samples_seen, warn)
        outputs: list[Output] = [metrics, board, progression]
        recorder = Recorder(config, run.position, compiles, devices, None, outputs)
        profiler = Profiler(config.profile_steps, folder.path / "profile")
        with closing(recorder), Timeline() as timeline, profiler:
            train_to_the_end(run, rewards, recorder, transcripts, timeline, profiler, stop, console)
        if run.checkpoints:
            run.checkpoints.close()  # what is said to be done or saved is on disk
        outcome = Outcome(run.position, None if run.is_complete else stop.signal_name)
        saved, stopped_by = run.checkpoints is not None, outcome.stopped_by
        console.print(end_of_run(config.run_dir, run.position, "prompts", stopped_by=stopped_by, saved=saved))
        if not stopped_by:
            console.print(f"next: maxbatch report {config.run_dir}")
        return outcome


class Transcripts:
    """Samples of the evals: a line of `transcripts.jsonl` each, and a text in TensorBoard."""

    def __init__(self, folder: RunFolder, board: Board, step: int) -> None:
        self._log, self._board = StepLog(folder, "transcripts.jsonl", step), board

    def write(self, step: int, evaluation: Evaluation) -> None:
        """Adds those of an eval."""
        self._log.append({"step": step, "transcripts": evaluation.transcripts})
        lines = [
            f"    {'right' if t['passes'] else 'wrong'} {'greedy ' if t['greedy'] else 'sampled'} "
            f"{t['prompt']}{t['response']}"
            for t in evaluation.transcripts
        ]
        self._board.text(step, "transcripts", "\n".join(lines))

    def close(self) -> None:
        self._log.close()


def train_to_the_end(
    run: PolicyRun,
    rewards: Rewards,
    recorder: Recorder,
    transcripts: Transcripts,
    timeline: Timeline,
    profiler: Profiler,
    stop: StopRequest,
    console: Console,
) -> None:
    """Takes every batch that is left, or those until somebody asks to stop; saves at the end in both cases."""
    config, learner, batch, manager = run.config, run.learner, run.batch, run.plan.manager
    rate = LearningRate.from_config(config, manager)
    evaluator = run.evaluator(rewards)
    step, first = run.position.step, run.position.samples_seen

    def add(pairs: Pairs) -> None:
        done = learner.add(pairs)
        timeline.watch("trainer", done)
        if run.one_at_a_time:
            jax.block_until_ready(done)

    def begin() -> float:
        """Starts the clocks of an update."""
        profiler.before(step + 1)
        recorder.restart_clock()
        return time.perf_counter()

    def is_due(period: int) -> bool:
        """Whether this is the first end of a batch since an update that is a multiple of a period."""
        return step == run.total_steps or step // period > (step - batch.num_iterations) // period

    def evaluate() -> dict[str, Any]:
        if evaluator is None:
            return {}
        evaluation = evaluator(run.roller.take(learner.state.params))
        transcripts.write(max(step, 1), evaluation)
        return evaluation.figures

    def save() -> None:
        if run.checkpoints and not run.checkpoints.has(recorder.position.step):
            recorder.sync()
            run.checkpoints.save(learner.state, recorder.position)

    before = {f"first_{name}": figure for name, figure in evaluate().items()} if step == 0 else {}
    if before:
        console.print(
            f"before the first update: pass@1 {before['first_eval_pass_at_1']:.3f} "
            f"(greedy {before['first_eval_greedy_pass_at_1']:.3f})"
        )
    has_warned = False
    while step < run.total_steps and not stop.before(step + 1):
        started = begin()
        collector = Collector(run, rewards, timeline, run.roller.take(learner.state.params))
        num_pairs = manager.rows_at(first)
        num_prompts = num_pairs // batch.num_generations
        chunks = []
        for pairs in collector.pairs(first, num_prompts):
            add(pairs)
            chunks.append(pairs)
        if collector.problem and not has_warned:
            warn(f"a reward has no value: {collector.problem}; such a response scores reward_on_failure")
            has_warned = True
        learning_rate = rate.at(first)
        for iteration in range(batch.num_iterations):
            if iteration:
                started = begin()
                for pairs in chunks:
                    add(pairs)
            metrics = jax.block_until_ready(learner.step(learning_rate))
            step += 1
            ends_batch = iteration == batch.num_iterations - 1
            first += num_prompts if ends_batch else 0
            figures = {**collector.figures(), **_policy_figures(metrics), **before}
            for side, share in timeline.shares(started, time.perf_counter()).items():
                figures[f"busy_fraction/{side}"] = share
            update = Dispatched(
                step=step,
                samples_seen=first,
                num_rows=num_pairs,
                stage=0,
                micro_batch_size=batch.micro_batch_size,
                num_micro_batches=len(chunks),
                learning_rate=learning_rate,
                data_wait_s=0.0,
                metrics=metrics,
            )
            evaluates = ends_batch and is_due(config.eval_interval)
            recorder.record(update, partial(_joined, figures, evaluate if evaluates else dict))
            before = {}
            profiler.after(step)
        if is_due(config.checkpoint_period):
            save()
    save()
    run.position = recorder.position


def _joined(figures: dict[str, Any], more: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return figures | more()


def _policy_figures(metrics: StepMetrics) -> dict[str, float]:
    """Return the objective's other sums as means over the tokens of the responses, by the names of the metrics."""
    sums = {name: float(total) for name, total in jax.device_get(metrics.others).items()}
    tokens = max(sums.pop("tokens"), 1.0)
    names = {"entropy": "entropy", "kl": "kl", "clipped": "clip_fraction", "old_kl": "old_policy_kl"}
    return {names[name]: total / tokens for name, total in sums.items()}
