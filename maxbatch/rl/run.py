"""GRPO post-training: steps on sampled and scored responses.

All pairs of a batch are drawn from one version of the parameters: those before its first update, or before the first
update of the batch `off_policy_steps` earlier. So neither the chunks nor what runs side by side changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import NamedTuple

import jax

from maxbatch.config.sections import Config
from maxbatch.parallel.hosts import broadcast, warn
from maxbatch.parallel.mesh import lay_out, lay_out_again, must_take_turns, num_slices, share_out
from maxbatch.parallel.trees import State
from maxbatch.plan.batch import BatchPlan, Resume
from maxbatch.plan.plan_config import PlanConfig
from maxbatch.plan.rampup import PlannedStep
from maxbatch.plan.update_settings import UpdatePlan, UpdateSettings
from maxbatch.rl.ahead import BatchesAhead
from maxbatch.rl.collecting import CollectedBatch, Workshop
from maxbatch.rl.evaluation import PolicyEvaluator, open_evaluator
from maxbatch.rl.learner import Learner
from maxbatch.rl.policy_config import PromptConfig, RolloutConfig
from maxbatch.rl.prompts import Prompts, PromptSource
from maxbatch.rl.refusals import check_policy
from maxbatch.rl.reward_terms import identity_of
from maxbatch.rl.rewards import Rewards
from maxbatch.rl.rollout import Roller
from maxbatch.rl.timeline import Timeline
from maxbatch.rl.transcripts import Transcripts
from maxbatch.rl.warm_start import first_parameters, warm_start_folder, warm_up
from maxbatch.runs.metrics_schema import Metric
from maxbatch.runs.sessions import TimePart
from maxbatch.training.agreement import check_same_start
from maxbatch.training.compile.background import compile_here
from maxbatch.training.compile.flags import program_options, state_flags, with_flags
from maxbatch.training.session import Outcome, RunContext, Session
from maxbatch.training.task import Dispatched, Start, TaskData, check_same_data, model_of
from maxbatch.training.update.state import TrainState, init_opt_state
from maxbatch.training.update.step import StepMetrics
from maxbatch.training.update.update_config import UpdateConfig


def train_policy(config: Config, devices: Sequence[jax.Device] | None = None) -> Outcome:
    """Trains a policy by a config with a `batch_size`; resumes from the newest checkpoint of `run_dir`.

    Raises:
      ConfigError: the config, the prompts, the rewards or the checkpoint cannot be used.
      TrainingError: `max_consecutive_skips` updates in a row were not finite, or the disk is full.
    """
    state_flags(config)
    check_same_start(config, "rl", {})
    devices = list(devices or jax.devices())
    config = with_flags(config, devices)
    # Refuses before a file is read.
    BatchPlan.from_config(config, len(devices), jax.process_count(), num_slices=num_slices(devices))
    with ExitStack() as stack:
        context = RunContext(config, devices, stack)
        session = Session(context, PolicyTraining(context))
        if not session.position.step and not broadcast(lambda: context.stop.is_asked):
            assert session.plan.rl is not None, "the config states a batch of prompts"
            warm = warm_up(config, session.plan.rl, devices)
            if warm and warm.stopped_by:
                return Outcome(session.position, warm.stopped_by, config.run_dir)
        return session.run()


class PolicyBatch(NamedTuple):
    """One of the updates of a batch of prompts."""

    planned: PlannedStep  # with `filter_groups` its positions count the prompts that are trained on
    update: int  # its number within its batch, from 0


class PolicyTraining:
    """The task of reinforcement learning (`maxbatch.training.task.Task`)."""

    takes_turns = True  # the responses of a batch need the parameters of the update before
    evaluates = has_eval_loss = False

    def __init__(self, context: RunContext) -> None:
        self._context, self._config = context, context.config
        config = context.config.rl
        check_policy(config, PromptConfig.of(context.config), context.config.compiled_dir)
        self._rewards = context.stack.enter_context(Rewards(config))
        self._timeline = context.stack.enter_context(Timeline())
        self._source = PromptSource(context.config)
        self._prompts = self._source.train()
        identity = broadcast(lambda: self._prompts.identity)
        check_same_data(f"dataset_path={context.config.dataset_path!r}", self._prompts.identity)
        self.data = TaskData(identity, self._prompts.num_prompts, jax.process_count(), unit="prompts")
        self.model = model_of(UpdateConfig.of(context.config))
        self._held_out: Prompts | None = None  # once opened, if the run evaluates
        self._evaluator: PolicyEvaluator | None = None
        self._before_training: dict[str, float] = {}  # metrics of an eval, added to the first record
        self._warned = False
        self._rewards_seen: set[float] = set()  # the least and the greatest of each batch

    def executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        return compile_here(name, lower, program_options(self._config.libtpu_flags, self._context.devices))

    def plan(self, resume: Resume) -> BatchPlan:
        devices = self._context.devices
        return BatchPlan.from_config(
            self._config,
            len(devices),
            jax.process_count(),
            num_slices=num_slices(devices),
            samples_per_epoch=self.data.samples_per_epoch,
            resume=resume,
        )

    def build(self, plan: BatchPlan) -> None:
        """Shares the devices out between those that train and those that sample."""
        config, devices = self._config, self._context.devices
        batch, meshes = plan.rl, plan.meshes
        assert batch is not None, "the config states a batch of prompts"
        self._shares_devices = shares_devices = batch.num_trainer_devices + batch.num_sampler_devices > len(devices)
        trainers, samplers = share_out(devices, batch.num_trainer_devices, batch.num_sampler_devices)
        self.mesh = lay_out(meshes.training, trainers)
        if meshes.sampling is meshes.training:
            self._sampling_mesh = self.mesh
        elif shares_devices:
            self._sampling_mesh = lay_out_again(meshes.sampling, self.mesh)
        else:
            self._sampling_mesh = lay_out(meshes.sampling, samplers)
        self._learner = Learner(config, self.mesh)
        self.abstract = self._learner.abstract
        num_pairs = batch.rollout_micro_batch_size * batch.num_generations
        self._rollout = RolloutConfig.of(config)
        tokenizer, mesh, ends = self._prompts.tokenizer, self._sampling_mesh, self._prompts.end_ids
        self._roller = Roller(self._rollout, tokenizer, mesh, num_pairs, batch.num_generations, ends)
        self._workshop = Workshop(
            batch=batch,
            prompts=self._prompts,
            roller=self._roller,
            rewards=self._rewards,
            learner=self._learner,
            timeline=self._timeline,
            # Two threads of several hosts may dispatch the programs of two meshes in different orders.
            takes_turns=must_take_turns(samplers) and (shares_devices or jax.process_count() > 1),
            temperature=config.decode_sampling_temperature,
            length=config.max_target_length,
        )

    def open_held_out(self) -> None:
        self._held_out = self._source.held_out if self._config.eval_interval > 0 else None

    def identities(self) -> dict[str, str]:
        found = identity_of(self._config.reward)
        found["end tokens of a response"] = str(self._prompts.end_ids)
        if self._held_out:
            found |= {f"{name} of the held-out prompts": str(value) for name, value in self._held_out.identity.items()}
        return found

    @property
    def start(self) -> tuple[str, str]:
        if self._config.warm_start_steps:
            return "warm_start_steps", warm_start_folder(self._config.run_dir)
        return self._context.start

    def open_start(self, start: Start, is_new: bool) -> None:
        config = self._config
        if is_new:
            reads = not config.warm_start_steps  # which opens what it starts from
        else:  # for the reference that the divergence is measured from, and for the model that adapters adapt
            reads = bool(config.grpo_beta or config.lora_rank)
        if reads:
            self._context.open_parameters(self.abstract.model)

    def feed(self, start: Start) -> AbstractContextManager[Iterator[PolicyBatch]]:
        """Returns the updates ahead; the pairs of a batch are collected while its first update is taken."""
        manager, batch = start.plan.manager, self._workshop.batch
        self._settings = UpdatePlan.from_config(PlanConfig.of(self._config), manager)

        def num_prompts(first: int) -> int:
            # Behind the end of the run, whose last checkpoint serves a longer one, batches are whole.
            return manager.rows_at(first) // batch.num_generations or batch.batch_size

        ahead = BatchesAhead(
            self._workshop, start.position.samples_seen, num_prompts, not self._shares_devices, start.ahead
        )
        self._ahead = self._context.stack.enter_context(ahead)
        if ahead.left_out:
            warn(
                "the responses of the checkpoint are those of other batches than the ones ahead, which are sampled anew"
            )
        return nullcontext(self._updates(start))

    def _updates(self, start: Start) -> Iterator[PolicyBatch]:
        update = 0
        for planned in start.plan.manager.steps_from(start.position.step):
            yield PolicyBatch(planned, update)
            update = 0 if planned.end_sample > planned.first_sample else update + 1

    def _collected_for(self, batch: PolicyBatch, params: State) -> CollectedBatch:
        """Returns the pairs of the batch of an update."""
        if batch.update == 0:
            self._collected = self._ahead.next(params)
        return self._collected

    def introduction(self, plan: BatchPlan) -> Iterable[str]:
        return ()

    def prepare(self, restored: TrainState | None, start: Start) -> TrainState:
        """Makes the first state, and the reference that the divergence is measured from; evaluates a new policy."""
        config, context, abstract = self._config, self._context, self.abstract
        state = self._state(restored)
        if config.grpo_beta:
            self._learner.refer_to(first_parameters(context, abstract))
        period = config.rl.transcript_period
        transcripts = Transcripts(context.folder, context.board, start.position.step, period)
        self._transcripts = context.stack.enter_context(closing(transcripts))
        if self._held_out:
            evaluation = config.evaluation
            self._evaluator = open_evaluator(
                evaluation, self._rollout, self._held_out, start.plan, self._sampling_mesh, self._rewards
            )
            self.evaluates = True
        if self.evaluates and start.position.step == 0:
            with context.sessions.during(TimePart.EVAL):
                found = self.evaluate(state, 1)
            self._before_training = {Metric.BEFORE_TRAINING.of(name): value for name, value in found.items()}
            context.console.print(
                f"before the first update: pass@1 {found[Metric.EVAL_PASS_AT_1]:.3f} "
                f"(greedy {found[Metric.EVAL_GREEDY_PASS_AT_1]:.3f}), reward {found[Metric.EVAL_REWARD]:.3f}"
            )
        return state

    def _state(self, restored: TrainState | None) -> TrainState:
        """Returns the state to start from: a restored one, with the model that its adapters adapt, or a first one."""
        if restored and self.abstract.frozen is None:
            return restored
        model = first_parameters(self._context, self.abstract)
        if restored:
            return restored._replace(frozen=model)
        return init_opt_state(UpdateConfig.of(self._config), self.abstract, model)

    def step(self, state: TrainState, batch: PolicyBatch, settings: UpdateSettings) -> tuple[TrainState, Dispatched]:
        """Takes an update; the first on a batch also samples and scores its pairs."""
        started = time.perf_counter()
        # Later updates of a batch sample nothing, so that adapters need not be merged for them.
        policy = state.params if batch.update else self._learner.policy(state)
        collected = self._collected_for(batch, policy)
        waited = time.perf_counter() - started
        part, num_chunks = batch.update % self._workshop.batch.num_minibatches, 0
        for pairs in collected.chunks(part, policy):
            num_chunks += 1
            done = self._learner.add(state, pairs)
            self._timeline.watch("trainer", done)
            if self._workshop.takes_turns:
                jax.block_until_ready(done)
        if batch.update == 0:
            self._write_transcripts(batch.planned.step, collected)
        if collected.problem and not self._warned:
            warn(f"a reward has no value: {collected.problem}; such a response scores reward_on_failure")
            self._warned = True
        planned = self._as_collected(batch.planned, collected, part)
        if planned.num_rows != batch.planned.num_rows or not planned.num_rows:
            # One without pairs changes nothing, but its decays must be finite.
            settings = self._settings.at(batch.planned.first_sample, planned.num_rows or None)
        state, metrics = self._learner.step(state, settings)
        jax.block_until_ready(metrics)
        shares = self._timeline.shares(started, time.perf_counter())
        figures = collected.figures() | _objective_figures(metrics) | self._before_training
        figures |= {Metric.BUSY_FRACTION.of(side): share for side, share in shares.items()}
        self._before_training = {}
        return state, Dispatched(
            planned=planned,
            micro_batch_size=self._workshop.batch.micro_batch_size,
            num_micro_batches=num_chunks,
            learning_rate=settings.learning_rate,
            data_wait_s=waited,
            metrics=metrics,
            figures=figures,
        )

    def _write_transcripts(self, step: int, collected: CollectedBatch) -> None:
        batch = self._workshop.batch
        number = (step - 1) // batch.updates_per_batch
        version = max(0, number - batch.off_policy_steps) * batch.updates_per_batch
        self._transcripts.write_batch(step, number, version, collected)

    def _as_collected(self, planned: PlannedStep, collected: CollectedBatch, part: int) -> PlannedStep:
        """Returns an update with the prompts that its batch has read and the pairs that it trains on."""
        ends_batch = planned.end_sample > planned.first_sample
        if ends_batch:
            rewards = collected.read.rewards_R
            self._rewards_seen |= {float(rewards.min()), float(rewards.max())}
            if collected.groups_missing:
                most = f"max_prompts_per_batch={self._workshop.batch.max_prompts_per_batch}"
                reason = f"among {most} prompts, no others have responses with different rewards"
                if rewards.min() == rewards.max():
                    every = f"{rewards[0]:g} for all {rewards.size} responses to {most} prompts"
                    reason = f"the reward is constant, {every}"
                warn(f"the batch from prompt {collected.first} trains on {collected.num_groups} groups: {reason}")
        end = collected.end if ends_batch else collected.first
        return planned._replace(first_sample=collected.first, num_rows=collected.num_pairs(part), end_sample=end)

    def compile_rest(self) -> None:
        """Does nothing: each program is compiled when it first runs."""

    def evaluate(self, state: TrainState, step: int) -> Mapping[str, float]:
        """Returns the policy's pass rates on held-out prompts; writes some of its responses."""
        assert self._evaluator is not None, "an eval was asked for"
        self._ahead.settle()  # the devices that sample do one thing at a time
        evaluation = self._evaluator(self._roller.take(self._learner.policy(state)))
        self._transcripts.write_eval(step, evaluation)
        return evaluation.figures

    def ahead(self) -> str | None:
        """Returns the responses of the next `off_policy_steps` batches."""
        return self._ahead.saved()

    def why_untrained(self) -> str:
        reward = f"reward={self._config.reward}"
        if len(self._rewards_seen) == 1:
            return f"the reward is constant, {next(iter(self._rewards_seen)):g} for every response; look at {reward}"
        return f"the responses to each prompt all had one reward; look at {reward}, or sample more (num_generations)"

    def conclusion(self, state: TrainState) -> Iterable[str]:
        return [f"next: maxbatch report {self._config.run_dir}"]


def _objective_figures(metrics: StepMetrics) -> dict[str, float]:
    """Returns the objective's other sums as means over the tokens of the responses."""
    sums = {name: float(total) for name, total in jax.device_get(metrics.others).items()}
    tokens = max(sums.pop("tokens"), 1.0)
    return {name: total / tokens for name, total in sums.items()}
