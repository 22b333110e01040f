"""GRPO post-training: steps on sampled and scored responses.

All pairs of a batch are drawn from one version of the parameters: those before its first update, or
before the first update of the batch `off_policy_steps` earlier. So neither chunks nor parallel work
change the batch.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import jax
from jax.sharding import Mesh

from maxbatch.config.combined import LearnerConfig, RolloutConfig
from maxbatch.config.config import Config
from maxbatch.kinds.prompt.ahead import BatchesAhead
from maxbatch.kinds.prompt.collecting import CollectedBatch, Workshop
from maxbatch.kinds.prompt.evaluation import PolicyEvaluator, open_evaluator
from maxbatch.kinds.prompt.learner import Learner
from maxbatch.kinds.prompt.prompts import Prompts, PromptSource
from maxbatch.kinds.prompt.refusals import check_policy
from maxbatch.kinds.prompt.reproducible_learner import ReproducibleLearner
from maxbatch.kinds.prompt.rewards import Rewards
from maxbatch.kinds.prompt.rollout import Roller
from maxbatch.kinds.prompt.timeline import Timeline
from maxbatch.kinds.prompt.transcripts import Transcripts
from maxbatch.kinds.prompt.warm_start import first_parameters, warm_start_folder, warm_up
from maxbatch.parallel.agreement import check_agreed
from maxbatch.parallel.hosts import broadcast, warn
from maxbatch.parallel.mesh import lay_out, lay_out_again, must_take_turns, num_slices, share_out
from maxbatch.parallel.trees import State
from maxbatch.plan.batch import BatchPlan, ResumePoint
from maxbatch.plan.holes import SKIP_SAMPLES
from maxbatch.plan.place import Place
from maxbatch.plan.rampup import PlannedStep
from maxbatch.plan.update_settings import UpdatePlan
from maxbatch.run.context import RunContext
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.sessions import TimePart
from maxbatch.run.opening import opened_run
from maxbatch.run.session import Outcome, Session
from maxbatch.run.task import (
    Dispatched,
    ShowText,
    Start,
    TaskData,
    TaskModel,
    check_same_data,
    model_of,
)
from maxbatch.system.terminal.folding import counted
from maxbatch.update.state import TrainState, init_opt_state, with_spike_window
from maxbatch.update.step import StepMetrics


def train_policy(config: Config, devices: Sequence[jax.Device] | None = None) -> Outcome:
    """Trains a policy by a config with a `batch_size`; resumes from the newest checkpoint of
    `run_dir`.

    Raises:
      ConfigError: the config, the prompts, the rewards or the checkpoint cannot be used.
      TrainingError: `max_consecutive_skips` updates in a row were not finite, or the disk is full.
    """
    with opened_run(
        "rl",
        config,
        devices,
        check=lambda config, devices: BatchPlan.from_config(
            config, len(devices), jax.process_count(), num_slices=num_slices(devices)
        ),
    ) as context:
        config = context.config
        session = Session(context, open_policy_training(context))
        if not session.position.step:
            assert session.plan.rl is not None, "the config states a batch of prompts"
            if config.warm_start_steps:
                updates = counted(config.warm_start_steps, "update")
                context.console.print(
                    f"warm start: {updates} on worked examples, before reinforcement learning"
                )
            warm = warm_up(config, session.plan.rl, list(context.devices))
            if warm and warm.stopped_by:
                context.sessions.end_by(warm.stopped_by)
                return Outcome(session.position, warm.stopped_by, config.run_dir)
        return session.run()


class PolicyBatch(NamedTuple):
    """One of the updates of a batch of prompts."""

    planned: PlannedStep
    update: int  # its number within its batch, from 0
    pairs: CollectedBatch | None = None  # of its batch, if they are taken already


def open_policy_training(context: RunContext) -> OpenedPolicy:
    """Opens the prompts and the rewards of a run.

    Raises:
      ConfigError: the config, the prompts or the rewards cannot be used, or the hosts have
        different prompts.
    """
    config = context.config
    prompting = config.prompting
    check_policy(config.rl, prompting, config.compiled_dir)
    rewards = context.stack.enter_context(Rewards(config.rl))
    timeline = context.stack.enter_context(Timeline())
    source = PromptSource(prompting)
    prompts = source.train()
    identity = dict(broadcast(lambda: prompts.identity))
    check_same_data(f"dataset_path={config.dataset_path!r}", prompts.identity)
    identity.pop(SKIP_SAMPLES, None)
    num_hosts = jax.process_count()
    data = TaskData(identity, prompts.num_prompts, num_hosts, unit="prompts", holes=prompts.holes)
    return OpenedPolicy(
        context, config.learner, config.rollout, rewards, timeline, source, prompts, data
    )


@dataclass(frozen=True, eq=False)
class OpenedPolicy:
    """Training of a policy whose prompts and rewards are open (`maxbatch.run.task.Opened`)."""

    context: RunContext
    keys: LearnerConfig
    rollout: RolloutConfig
    rewards: Rewards
    timeline: Timeline
    prompt_source: PromptSource
    prompts: Prompts
    data: TaskData

    @property
    def model(self) -> TaskModel:
        return model_of(self.keys)

    @property
    def source(self) -> tuple[str, str]:
        config = self.context.config
        if config.warm_start_steps:
            return "warm_start_steps", warm_start_folder(config.run_dir)
        return self.context.source

    @property
    def why_untrained(self) -> str:
        reward = self.context.config.reward
        return (
            f"the responses to each prompt all had one reward; look at reward={reward}, or sample "
            "more (num_generations)"
        )

    def plan(self, resume: ResumePoint) -> PlannedPolicy:
        """Plans the run, and divides the devices between training and sampling."""
        config, devices = self.context.config, self.context.devices
        plan = BatchPlan.from_config(
            config,
            len(devices),
            jax.process_count(),
            num_slices=num_slices(devices),
            samples_per_epoch=self.data.samples_per_epoch,
            resume=resume,
        )
        batch, meshes = plan.rl, plan.meshes
        assert batch is not None, "the config states a batch of prompts"
        shares_devices = batch.num_trainer_devices + batch.num_sampler_devices > len(devices)
        trainers, samplers = share_out(
            devices, batch.num_trainer_devices, batch.num_sampler_devices
        )
        mesh = sampling_mesh = lay_out(meshes.training, trainers)
        if meshes.sampling is not meshes.training and shares_devices:
            sampling_mesh = lay_out_again(meshes.sampling, mesh)
        elif meshes.sampling is not meshes.training:
            sampling_mesh = lay_out(meshes.sampling, samplers)
        learner = Learner(self.keys, mesh)
        if self.keys.optimizer.reproducible_sums:
            size, length = batch.micro_batch_size, config.max_target_length
            learner = ReproducibleLearner(self.keys, mesh, size, length)
        num_pairs, group = (
            batch.rollout_micro_batch_size * batch.num_generations,
            batch.num_generations,
        )
        tokenizer = self.prompts.tokenizer
        workshop = Workshop(
            batch=batch,
            prompts=self.prompts,
            roller=Roller(
                self.rollout, tokenizer, sampling_mesh, num_pairs, group, self.prompts.end_ids
            ),
            rewards=self.rewards,
            learner=learner,
            timeline=self.timeline,
            # Two threads may dispatch the programs of two meshes in different orders on different
            # hosts.
            takes_turns=must_take_turns(samplers) and (shares_devices or jax.process_count() > 1),
            temperature=config.decode_sampling_temperature,
            advantage_scale=config.rl.advantage_scale,
            length=config.max_target_length,
        )
        return PlannedPolicy(self, plan, mesh, sampling_mesh, shares_devices, workshop)


@dataclass(frozen=True, eq=False)
class PlannedPolicy:
    """Training of a policy with its plan, its two meshes and their programs
    (`maxbatch.run.task.Planned`).
    """

    opened: OpenedPolicy
    plan: BatchPlan
    mesh: Mesh  # of the devices that train
    sampling_mesh: Mesh
    shares_devices: bool  # whether the devices that sample also train
    workshop: Workshop

    @property
    def abstract(self) -> TrainState:
        return self.workshop.learner.abstract

    def executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        return self.opened.context.executable(name, lower)

    def build(self, start: Start) -> BuiltPolicy:
        opened, config = self.opened, self.opened.context.config
        held_out = opened.prompt_source.held_out if config.eval_interval > 0 else None
        reads = opened.rewards.identity
        reads["end tokens of a response"] = str(opened.prompts.end_ids)
        reads |= opened.data.holes_read(config.skip_samples)
        if held_out:
            reads |= {
                f"{name} of the held-out prompts": str(value)
                for name, value in held_out.identity.items()
            }
        check_agreed(reads, "give every host the same files")
        if start.is_new:
            opens = not config.warm_start_steps  # which opens the starting point
        else:  # for the reference of the divergence, and for the base model of adapters
            opens = bool(config.grpo_beta or config.lora_rank)
        if opens:
            with opened.context.sessions.during(TimePart.RESTORING):
                start.parameters.open(self.abstract.model)
        return BuiltPolicy(opened, self, start, held_out, reads)


@dataclass(frozen=True, eq=False)
class BuiltPolicy:
    """Training of a policy whose inputs are all open (`maxbatch.run.task.Built`)."""

    opened: OpenedPolicy
    planned: PlannedPolicy
    start: Start
    held_out: Prompts | None  # if the run evaluates
    reads: Mapping[str, str]

    has_eval_loss: ClassVar[bool] = False
    introduction: ClassVar[Sequence[str]] = ()

    def run(
        self, restored: TrainState | None, show: ShowText, stack: ExitStack
    ) -> tuple[RunningPolicy, TrainState]:
        """Makes the first state and the reference of the divergence; evaluates a new policy."""
        opened, planned, context = self.opened, self.planned, self.opened.context
        config, position = context.config, self.start.position
        state = with_spike_window(
            self._state(restored),
            planned.abstract,
            position.spikes.losses,
            position.spikes.grad_norms,
        )
        if config.grpo_beta:
            learner = planned.workshop.learner.referring_to(self._first_parameters())
            planned = replace(planned, workshop=planned.workshop._replace(learner=learner))
        batches = context.stack.enter_context(self._batches_ahead(planned))
        log = Transcripts(context.folder, show, position.step, config.rl.transcript_period)
        transcripts = stack.enter_context(closing(log))
        evaluator = None
        if self.held_out:
            evaluator = open_evaluator(
                config.evaluation,
                opened.rollout,
                self.held_out,
                planned.plan,
                planned.sampling_mesh,
                opened.rewards,
            )
        running = RunningPolicy(opened, planned, position.step, batches, transcripts, evaluator)
        if evaluator and position.step == 0:
            with context.sessions.during(TimePart.EVAL):
                figures = running.evaluate(state, 1)
            running.unrecorded.update(
                {Metric.BEFORE_TRAINING.of(name): value for name, value in figures.items()}
            )
            context.console.print(
                f"before the first update: pass@1 {figures[Metric.EVAL_PASS_AT_1]:.3f} (greedy "
                f"{figures[Metric.EVAL_GREEDY_PASS_AT_1]:.3f}), reward "
                f"{figures[Metric.EVAL_REWARD]:.3f}"
            )
        return running, state

    def _batches_ahead(self, planned: PlannedPolicy) -> BatchesAhead:
        """Returns the batches of the run; a batch is collected at the latest during its first
        update.
        """
        manager, workshop = planned.plan.manager, planned.workshop

        def num_prompts(first: int) -> int:
            # Batches after the end of the run are whole: a longer run may resume from its last
            # checkpoint.
            return (
                manager.rows_at(first) // workshop.batch.num_generations
                or workshop.batch.batch_size
            )

        batches = BatchesAhead(
            workshop,
            self.start.position.samples_seen,
            num_prompts,
            not planned.shares_devices,
            self.start.ahead,
        )
        if batches.left_out:
            warn(
                "the responses in the checkpoint belong to other batches than the next ones, "
                "which are sampled again"
            )
        return batches

    def _state(self, restored: TrainState | None) -> TrainState:
        """Returns the restored state, with the base model of its adapters, or else a new state."""
        abstract = self.planned.abstract
        if restored and abstract.frozen is None:
            return restored
        model = self._first_parameters()
        return (
            restored._replace(frozen=model)
            if restored
            else init_opt_state(self.opened.keys, abstract, model)
        )

    def _first_parameters(self) -> State:
        return first_parameters(
            self.start.parameters,
            self.planned.abstract,
            self.planned.workshop.learner.first_parameters,
        )


@dataclass(frozen=True, eq=False)
class RunningPolicy:
    """Training of a policy under way (`maxbatch.run.task.Running`)."""

    opened: OpenedPolicy
    planned: PlannedPolicy
    first_step: int  # updates before it
    batches_ahead: BatchesAhead
    transcripts: Transcripts
    evaluator: PolicyEvaluator | None
    # metrics of an eval, for the next record
    unrecorded: dict[str, float] = field(default_factory=dict)
    # the least and the greatest of each batch
    rewards_seen: set[float] = field(default_factory=set)
    problems: set[str] = field(default_factory=set)  # failures of rewards that a warning has named

    # the responses of a batch need the parameters of the previous update
    takes_turns: ClassVar[bool] = True

    @property
    def evaluates(self) -> bool:
        return self.evaluator is not None

    @property
    def feed(self) -> Iterator[PolicyBatch]:
        """Yields the updates ahead."""
        update = 0
        for planned in self.planned.plan.manager.steps_from(self.first_step):
            yield PolicyBatch(planned, update)
            update = 0 if planned.ends_batch else update + 1

    def policy(self, state: TrainState, batch: PolicyBatch) -> State:
        """Returns the parameters that sample before an update, on the devices that train.

        Later updates of a batch sample nothing, so that adapters need not be merged for them.
        """
        return state.params if batch.update else self.planned.workshop.learner.policy(state)

    def step(
        self, state: TrainState, batch: PolicyBatch, settings: UpdatePlan
    ) -> tuple[TrainState, Dispatched]:
        """Takes an update; the first update on a batch also samples and scores its pairs."""
        started = time.perf_counter()
        workshop, timeline, planned = self.planned.workshop, self.opened.timeline, batch.planned
        policy = self.policy(state, batch)
        collected = batch.pairs or self.batches_ahead.take(batch.update, policy)
        waited = time.perf_counter() - started
        part, num_chunks = self.part(batch), 0
        for pairs in collected.chunks(part, policy):
            num_chunks += 1
            done = workshop.learner.add(state, pairs)
            timeline.watch("trainer", done)
            if workshop.takes_turns:
                jax.block_until_ready(done)
        if batch.update == 0:
            self._write_transcripts(planned.step, collected)
        if planned.ends_batch:
            self._note_rewards(collected)
        if collected.problem and not self.problems:
            warn(
                f"a reward has no value: {collected.problem}; such a response scores "
                "reward_on_failure"
            )
            self.problems.add(collected.problem)
        num_pairs = collected.num_pairs(part)
        # An update without pairs changes nothing, but its decays must be finite.
        at = settings.at(planned.first_sample, num_pairs or None)
        state, metrics = workshop.learner.step(state, at)
        jax.block_until_ready(metrics)
        shares = timeline.shares(started, time.perf_counter())
        figures = collected.figures() | _objective_figures(metrics) | self.unrecorded
        figures |= {Metric.BUSY_FRACTION.of(side): share for side, share in shares.items()}
        if passes := collected.passes.get(part):
            figures |= {Metric.NUM_PASSES: num_chunks, Metric.ROW_SHARE: passes.row_share}
        self.unrecorded.clear()
        filters = workshop.batch.max_prompts_per_batch is not None
        return state, Dispatched(
            planned=planned._replace(num_rows=num_pairs),
            place=Place(
                seen=collected.end if planned.ends_batch else collected.first,
                planned=planned.end_sample if filters else None,
            ),
            micro_batch_size=workshop.batch.micro_batch_size,
            num_micro_batches=num_chunks,
            learning_rate=at.learning_rate,
            data_wait_s=waited,
            metrics=metrics,
            figures=figures,
        )

    def part(self, batch: PolicyBatch) -> int:
        """Returns the update's part of its batch of prompts, from 0."""
        return batch.update % self.planned.workshop.batch.num_minibatches

    def _write_transcripts(self, step: int, collected: CollectedBatch) -> None:
        batch = self.planned.workshop.batch
        number = (step - 1) // batch.updates_per_batch
        version = max(0, number - batch.off_policy_steps) * batch.updates_per_batch
        self.transcripts.write_batch(step, number, version, collected)

    def _note_rewards(self, collected: CollectedBatch) -> None:
        """Records the rewards of a batch, and warns if it lacks groups."""
        rewards = collected.read.rewards_R
        self.rewards_seen.update((float(rewards.min()), float(rewards.max())))
        if collected.groups_missing:
            most = f"max_prompts_per_batch={self.planned.workshop.batch.max_prompts_per_batch}"
            reason = f"among {most} prompts, no others have responses with different rewards"
            if rewards.min() == rewards.max():
                every = f"{rewards[0]:g} for all {rewards.size} responses to {most} prompts"
                reason = f"the reward is constant, {every}"
            warn(
                f"the batch from prompt {collected.first} trains on {collected.num_groups} "
                f"groups: {reason}"
            )

    def compile_rest(self) -> None:
        """Does nothing: each program is compiled when it first runs."""

    def evaluate(self, state: TrainState, step: int) -> Mapping[str, float]:
        """Returns the policy's pass rates on held-out prompts; writes some of its responses."""
        assert self.evaluator is not None, "an eval was asked for"
        self.batches_ahead.settle()  # the devices that sample run one task at a time
        workshop = self.planned.workshop
        evaluation = self.evaluator(workshop.roller.take(workshop.learner.policy(state)))
        self.transcripts.write_eval(step, evaluation)
        return evaluation.figures

    def ahead(self) -> bytes | None:
        """Returns the responses of the next `off_policy_steps` batches."""
        return self.batches_ahead.saved()

    @property
    def why_untrained(self) -> str:
        if len(self.rewards_seen) == 1:
            (every,) = self.rewards_seen
            reward = self.opened.context.config.reward
            return f"the reward is constant, {every:g} for every response; look at reward={reward}"
        return self.opened.why_untrained

    def conclusion(self, state: TrainState) -> Iterable[str]:
        return [f"next: maxbatch report {shlex.quote(self.opened.context.config.run_dir)}"]


def _objective_figures(metrics: StepMetrics) -> dict[str, float]:
    """Returns the objective's other sums as means over the tokens of the responses."""
    sums = {name: float(total) for name, total in jax.device_get(metrics.others).items()}
    tokens = max(sums.pop("tokens"), 1.0)
    return {name: total / tokens for name, total in sums.items()}
