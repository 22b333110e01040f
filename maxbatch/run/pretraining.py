"""Pre-training: steps that feed on rows of the stream and learn to predict each next token."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.config.combined import PlanConfig, ProgramsConfig, StreamConfig
from maxbatch.config.config import Config
from maxbatch.config.model_forms import context_length, end_tokens
from maxbatch.config.pins import program_keys
from maxbatch.config.rules import check_vocabulary
from maxbatch.config.sections import KEYS, EvaluationConfig
from maxbatch.config.values import shown
from maxbatch.data.feed.feed import Feed, StagedBatch
from maxbatch.data.feed.placement import BatchShape, is_loading
from maxbatch.data.store.store import IDS
from maxbatch.data.stream.own import as_held_out, as_stream, held_out_of
from maxbatch.data.stream.stream import ReadPart, Stream, open_stream
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import tokenizer_of
from maxbatch.parallel.agreement import check_agreed
from maxbatch.parallel.hosts import broadcast, gather, is_first, warn
from maxbatch.parallel.mesh import must_take_turns
from maxbatch.parallel.trees import State
from maxbatch.plan.batch import BatchPlan, ResumePoint, expansion_factor
from maxbatch.plan.holes import NO_HOLES, SKIP_SAMPLES
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.plan.place import Place
from maxbatch.plan.skip_samples import holes_of
from maxbatch.plan.stages import check_epochs
from maxbatch.plan.update_settings import UpdatePlan
from maxbatch.run.compile.copies import executables
from maxbatch.run.compile.flags import INIT
from maxbatch.run.compile.ladder import StepLadder, Update
from maxbatch.run.compile.saved import SavedPrograms
from maxbatch.run.context import RunContext
from maxbatch.run.evaluation import Evaluator, num_evaluated
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.sessions import TimePart
from maxbatch.run.observers import (
    EvalTasks,
    ScoreTasks,
    continued_text,
    open_answers,
    open_tasks,
)
from maxbatch.run.opening import opened_run
from maxbatch.run.own import (
    CONFIGURED,
    Parts,
    check_parts,
    code_of,
    module_maker,
    name_of,
    objective_of,
    optimizer_maker,
    task_model,
)
from maxbatch.run.programs import Programs, checked_mesh_shape, step_name
from maxbatch.run.record.own_end import OwnFeed
from maxbatch.run.record.questions import Answers, AnswersLog, Question, questions_of
from maxbatch.run.session import Outcome, Session
from maxbatch.run.taking_over import state_taken_over
from maxbatch.run.task import Dispatched, ShowText, Start, TaskData, TaskModel, check_same_data
from maxbatch.run.weights.checkpoint_reading import StoredCheckpoint
from maxbatch.run.weights.foreign import ForeignState
from maxbatch.run.weights.origin import Source
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.terminal.folding import folded_command
from maxbatch.update.gradients import Objective
from maxbatch.update.optimizers import AT_REST, OptimizerMaker
from maxbatch.update.recipe import TrainedRecipe
from maxbatch.update.state import (
    TrainState,
    adapted_shapes,
    compile_adapting,
    first_average,
    init_opt_state,
    with_spike_window,
)

if TYPE_CHECKING:
    from maxbatch.update.reference import FoundReference


def train(
    config: Config,
    devices: Sequence[jax.Device] | None = None,
    parts: Parts = CONFIGURED,
    concludes: bool = True,
) -> Outcome:
    """Trains a config's run, from the newest checkpoint of `run_dir` if there is one.

    Args:
      config: a resolved config (`maxbatch.load_config`).
      devices: the devices to train on, all by default.
      parts: a user's own model, loss, optimizer, data and loggers.
      concludes: whether to print a sample of the model's text and the next command to type.

    Returns:
      The run's position, and the signal that stopped it, if one did.

    Raises:
      ConfigError: the config, the data or the checkpoint cannot be used.
      TrainingError: `max_consecutive_skips` updates in a row were not finite, or the disk is full.
    """
    with opened_run("train", config, devices, parts) as context:
        context.own_end.watch(
            bool(parts.outputs) or parts.stream is not None or parts.eval_stream is not None
        )
        return Session(context, open_pretraining(context, parts, concludes), parts.outputs).run()


def open_pretraining(
    context: RunContext, parts: Parts = CONFIGURED, concludes: bool = True
) -> OpenedPretraining:
    """Opens the data of a run, once its parts and its mesh are known to fit.

    Raises:
      ConfigError: the config, the parts or the data cannot be used, or the hosts have different
        data.
    """
    config = context.config
    keys, planning, recipe = config.programs, config.plan, TrainedRecipe.of(config.recipe)

    # refusals that need no data come first
    _check(parts, config.compiled_dir, recipe, config.reproducible_sums)
    if config.max_tokens_per_pass is not None and not parts.are_config_rows:
        raise config.fault(
            "max_tokens_per_pass",
            "null, since train() was given a model, a loss or a stream, whose rows it does not know",
            "null",
        )
    packs_on_hosts = config.max_tokens_per_pass is not None and jax.process_count() > 1
    if packs_on_hosts and config.grain_worker_count:
        rule = "0 beside max_tokens_per_pass on several hosts, which read the rows they pack"
        raise config.fault("grain_worker_count", rule, 0)
    tasks = _open_tasks(config.evaluation, parts)
    mesh_shape = checked_mesh_shape(planning, keys, context.devices)
    expansion = max(1, int(expansion_factor(planning, jax.process_count())))

    make_model = (
        module_maker(partial(parts.model, config), name_of(parts.model)) if parts.model else None
    )
    own_optimizer = optimizer_maker(parts.optimizer, keys.optimizer)
    model = task_model(make_model, keys, mesh_shape, own_optimizer)
    objective = objective_of(parts.objective, make_model, config.model) or recipe.objective(keys)

    stream = None
    if is_loading(jax.process_index(), expansion):
        own_stream = parts.stream
        stream = open_stream(config) if own_stream is None else as_stream(own_stream, config.stream)
    data = _agree_on_data(stream, config.stream, jax.process_count() // expansion)
    return OpenedPretraining(
        context,
        parts,
        concludes,
        keys,
        recipe,
        planning,
        tasks,
        mesh_shape,
        expansion,
        own_optimizer,
        model,
        objective,
        stream,
        data,
    )


def _check(parts: Parts, compiled_dir: str, recipe: TrainedRecipe, is_reproducible: bool) -> None:
    check_parts(parts)
    is_own = parts.model or parts.objective or parts.optimizer
    if is_reproducible and is_own:
        raise ConfigError(
            "reproducible_sums=true: holds for the config's own model, loss and optimizer, and "
            "train() was given others; works: reproducible_sums=false"
        )
    if not recipe.takes_parts and (
        parts.model or parts.objective or parts.stream or parts.eval_stream
    ):
        raise ConfigError(
            f"{recipe.key}=true: trains the config's own model on {recipe.unit}s of its own data, "
            f"and train() was given a model, a loss or a stream; works: {recipe.key}=false"
        )
    if compiled_dir and is_own:
        raise ConfigError(
            f"compiled_dir={compiled_dir}: holds programs of the config's own model, loss and optimizer, and train() "
            'was given others; works: compiled_dir=""'
        )


def _open_tasks(evaluation: EvaluationConfig, parts: Parts) -> EvalTasks | None:
    """Returns the tasks that evals score; None if the config states none."""
    if not evaluation.eval_tasks:
        return None
    if parts.model or parts.stream:
        raise ConfigError(
            f"eval_tasks={shown(evaluation.eval_tasks)}: scores the config's own model with its "
            'tokenizer, and train() was given a model or a stream; works: eval_tasks=""'
        )
    return open_tasks(evaluation)


def _agree_on_data(stream: Stream | None, config: StreamConfig, num_loading_hosts: int) -> TaskData:
    """Returns the facts of the first host; the others must read the same data.

    A host without a stream still reads the holes, since its plan needs them.
    """
    holes = holes_of(config) if stream is None else stream.holes

    def facts() -> tuple[Mapping[str, object], int | None, Sequence[str]]:
        assert stream is not None, "the first host loads data"
        return stream.identity, stream.samples_per_epoch, stream.notes

    identity, samples_per_epoch, notes = broadcast(facts)
    own_identity = dict(identity if stream is None else stream.identity)
    own_identity.pop(SKIP_SAMPLES, None)
    where, unit = f"dataset_path={config.dataset_path!r}", f"{config.recipe.unit}s"
    check_same_data(where, own_identity | {SKIP_SAMPLES: holes.digest})
    return TaskData(own_identity, samples_per_epoch, num_loading_hosts, unit, tuple(notes), holes)


@dataclass(frozen=True, eq=False)
class OpenedPretraining:
    """Pre-training whose data are open (`maxbatch.run.task.Opened`)."""

    context: RunContext
    parts: Parts
    concludes: bool  # whether a sample of text and the next command end the run
    keys: ProgramsConfig
    recipe: TrainedRecipe
    planning: PlanConfig
    tasks: EvalTasks | None  # that evals score
    mesh_shape: MeshShape
    expansion: int  # e: one of every e hosts loads data
    own_optimizer: OptimizerMaker | None
    model: TaskModel
    objective: Objective
    stream: Stream | None  # None if another host loads
    data: TaskData

    why_untrained: ClassVar[str] = (
        "no batch had a loss weight; look at the data with `maxbatch data`"
    )

    @property
    def source(self) -> tuple[str, str]:
        return self.context.source

    @property
    def is_own(self) -> bool:
        """Whether the model or the stream is a user's, so that nothing is sampled."""
        return self.parts.model is not None or self.parts.stream is not None

    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.context.config.stream)

    def plan(self, resume: ResumePoint) -> PlannedPretraining:
        """Plans the run; `compiled_dir` must fit."""
        context = self.context
        check_epochs(self.planning, self.data.samples_per_epoch)
        plan = BatchPlan.from_config(
            self.planning,
            len(context.devices),
            jax.process_count(),
            num_slices=self.mesh_shape.num_slices,
            samples_per_epoch=self.data.samples_per_epoch,
            resume=resume,
        )
        return self.planned_as(plan)

    def planned_as(self, plan: BatchPlan) -> PlannedPretraining:
        """Returns the programs of a plan; its batches may be those of a run on other devices."""
        context, config = self.context, self.context.config
        programs = Programs(
            self.keys,
            context.devices,
            self.mesh_shape,
            self.objective,
            self.expansion,
            self.own_optimizer,
        )
        saved = None
        if config.compiled_dir:
            saved = SavedPrograms(config.compiled_dir, program_keys(config), programs.mesh)
        return PlannedPretraining(self, plan, programs, saved, self._score_tasks(programs))

    def _score_tasks(self, programs: Programs) -> ScoreTasks | None:
        if self.tasks is None:
            return None
        config, tokenizer = self.context.config, self.tokenizer()
        ends, params = (
            end_tokens(config.load_parameters_path),
            adapted_shapes(self.keys, programs.abstract),
        )
        check_vocabulary(config, tokenizer.vocab_size)
        return self.tasks.on_model(
            config.text,
            programs.mesh,
            tokenizer,
            context_length(config.decoder, config.load_parameters_path),
            ends,
            params,
        )

    def answers_to(self, stream: Stream | None, mesh: Mesh) -> Answers | None:
        """Returns the answers to records of a stream, if it has questions and the config asks for
        samples of text.

        The answer of a pair's record is the chosen one.
        """
        config = self.context.config
        if not (self.recipe.has_answers and config.generate_prompt) or self.is_own:
            return None
        questions = [
            Question(*tokens)
            for tokens in broadcast(lambda: questions_of(stream) if stream is not None else [])
        ]
        if not questions:
            return None
        return open_answers(
            self.keys, self.tokenizer(), mesh, end_tokens(config.load_parameters_path), questions
        )


@dataclass(frozen=True, eq=False)
class PlannedPretraining:
    """Pre-training with its plan and its programs, none of them lowered
    (`maxbatch.run.task.Planned`).
    """

    opened: OpenedPretraining
    plan: BatchPlan
    programs: Programs
    saved: SavedPrograms | None  # those of `compiled_dir`
    score_tasks: ScoreTasks | None  # on the tasks, if there are any

    @property
    def mesh(self) -> Mesh:
        return self.programs.mesh

    @property
    def abstract(self) -> TrainState:
        return self.programs.abstract

    def executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        if self.saved is not None and name in self.saved:
            return self.saved.load(name, lower)
        return self.opened.context.executable(name, lower)

    def executables(
        self, name: str, lower: Callable[[], jax.stages.Lowered], devices: Sequence[jax.Device]
    ) -> dict[jax.Device, jax.stages.Compiled]:
        """Compiles a program for the first of some devices, and loads it on all."""
        if self.saved is not None and name in self.saved:
            return self.saved.load_on(name, lower, devices)
        return executables(self.opened.context.executable, name, lower, devices)

    def _update(self, shape: BatchShape) -> Update:
        """Compiles the update for a batch shape."""
        if self.programs.config.optimizer.reproducible_sums:
            return self.programs.reproducible_update(shape, self.executable, self.executables)
        return self.executable(step_name(shape), lambda: self.programs.step(shape))

    def build(self, start: Start) -> BuiltPretraining:
        opened, config = self.opened, self.opened.context.config
        held_out = self._open_held_out()
        reads = self._reads(held_out)
        check_agreed(reads, "give every host the same files")

        with opened.context.sessions.during(TimePart.RESTORING):
            reference = self._find_reference(start, held_out)
            # A checkpoint lacks the model that adapters adapt.
            if (
                start.is_new
                or (reference and reference.missing)
                or self.abstract.frozen is not None
            ):
                if config.load_full_state_path:
                    start.parameters.origin.source()
                else:
                    start.parameters.open(self.abstract.model)

        manager = self.plan.manager
        stages_ahead = manager.stages[manager.stage_at(start.position.samples_seen) :]
        # What was compiled ahead was planned from the run's start, and its first shape runs every
        # stage.
        steps = StepLadder(
            self._update,
            [stage for stage in stages_ahead if stage.num_steps],
            all_first=jax.process_count() > 1 or self.saved is not None,
            shapes=self.saved.shapes_for(manager.stages) if self.saved else None,
        )

        return BuiltPretraining(opened, self, start, held_out, reads, reference, steps)

    def _open_held_out(self) -> ReadPart:
        """Returns the held-out data, none if the config has no eval."""
        config, opened = self.opened.context.config, self.opened
        own_stream, own_held_out = opened.parts.stream, opened.parts.eval_stream
        if config.eval_interval <= 0:
            return ReadPart(None, 0)

        held_out: Stream | None
        if opened.stream is None:  # another host loads
            held_out = None
        elif own_held_out is not None:
            held_out = as_held_out(own_held_out, config.stream)
        elif own_stream is not None and not config.eval_dataset_path:
            held_out = held_out_of(own_stream, config.stream)
        else:
            held_out = open_stream(config, split="eval")
        return ReadPart(
            held_out, broadcast(lambda: 0 if held_out is None else held_out.samples_per_epoch or 0)
        )

    def _reads(self, held_out: ReadPart) -> dict[str, str]:
        """Returns the content of what this host, or the first one in its place, reads besides its
        training data.
        """
        opened, config = self.opened, self.opened.context.config
        own_identity = held_out.stream.identity if held_out.stream is not None else {}
        first = broadcast(lambda: own_identity)
        key = "eval_dataset_path" if config.eval_dataset_path else "eval_fraction"
        key = key if opened.parts.eval_stream is None else "eval_stream"
        loads = opened.stream is not None
        reads = {
            f"{name} of {key}": str(value)
            for name, value in (own_identity if loads else first).items()
        }

        given = code_of(opened.parts).items()
        reads |= {
            f"the file of {name}": code
            for name, code in given
            if getattr(opened.parts, name) is not None
        }
        reads |= opened.data.holes_read(config.skip_samples)

        if self.saved:
            reads["shapes in compiled_dir"] = str([tuple(shape) for shape in self.saved.shapes])
        if config.generate_prompt and not opened.is_own:  # the sample at the end
            tokenizer = opened.stream.tokenizer if opened.stream is not None else opened.tokenizer()
            reads["content of tokenizer_path"] = tokenizer.identity
            reads["end tokens of load_parameters_path"] = str(
                end_tokens(config.load_parameters_path)
            )
            if opened.recipe.has_answers:
                # a tokenizer without a template writes no question of its own
                with suppress(ConfigError):
                    reads["chat template of tokenizer_path"] = tokenizer.chat_template().identity

        return reads

    def _find_reference(self, start: Start, held_out: ReadPart) -> FoundReference | None:
        opened, total = self.opened, self.plan.total_samples
        reference = opened.objective.reference
        if reference is None:
            return None
        assert total is not None, "data that are here have known epochs"
        # The first epoch has every sample; the sources of a mixture have epochs of their own.
        # Own numbers, so that rows of a hole that return later have theirs: a hole may change.
        end = opened.data.holes.position_after(total)
        last = min(end, opened.data.samples_per_epoch or end)
        stream = opened.stream and dataclasses.replace(opened.stream, holes=NO_HOLES)
        bounds = opened.context.config.evaluation
        return reference.find(
            opened.context.folder.path,
            start.parameters.origin.mark,
            start.position.step > 0,
            ReadPart(stream, last),
            ReadPart(
                held_out.stream,
                num_evaluated(bounds, held_out.num_samples, self.plan.eval_batch_size),
            ),
        )


@dataclass(frozen=True, eq=False)
class BuiltPretraining:
    """Pre-training with all that its updates read open (`maxbatch.run.task.Built`)."""

    opened: OpenedPretraining
    planned: PlannedPretraining
    start: Start
    held_out: ReadPart  # empty without an eval
    reads: Mapping[str, str]
    found_reference: FoundReference | None  # of objectives that have one
    steps: StepLadder  # the compiled updates of the stages ahead

    @property
    def has_eval_loss(self) -> bool:
        return bool(self.held_out.num_samples)

    @property
    def introduction(self) -> Sequence[str]:
        return [self.steps.describe()] if len(self.planned.plan.manager.stages) > 1 else []

    def run(
        self, restored: TrainState | None, show: ShowText, stack: ExitStack
    ) -> tuple[RunningPretraining, TrainState]:
        """Compiles the first update while the state is made, and warms it up."""
        opened, planned, context = self.opened, self.planned, self.opened.context
        programs = planned.programs
        placement = programs.trained_placement
        stream, held_out = self._referred_streams()
        feed = Feed(
            stream,
            planned.plan.manager,
            self.steps.shape_for,
            placement,
            self.start.position.step,
            programs.packs,
            programs.rows_of_atom,
        )
        stack.enter_context(feed)
        # reads the first batch
        batches = feed if opened.parts.stream is None else OwnFeed(feed, context.own_end)
        making_state = context.background.start(partial(self._state, restored))
        compiled = self.steps.compile_first()
        spikes = self.start.position.spikes
        state = with_spike_window(
            making_state.result(), planned.abstract, spikes.losses, spikes.grad_norms
        )
        # hosts compile for unequal times, and CPUs wait for each other in a program for 30 s at
        # most
        gather(None)
        for shape, step in compiled:
            # A batch without weight changes nothing.
            nothing = (placement.padding(shape), np.int32(1), jax.tree.map(np.float32, AT_REST))
            state, metrics = step(state, *nothing)
            jax.block_until_ready(metrics)
        adapting = None
        if planned.abstract.frozen is not None:
            adapting = compile_adapting(opened.keys, planned.abstract)
        evaluator = self._evaluator(held_out) if self.has_eval_loss else None
        answers, log = None, None
        if evaluator and opened.recipe.answers_evals:
            answers = opened.answers_to(held_out, planned.mesh)
        if answers and is_first():
            log = stack.enter_context(
                closing(AnswersLog(context.folder, show, self.start.position.step))
            )
        return RunningPretraining(
            opened, planned, self.steps, stream, batches, evaluator, answers, log, adapting
        ), state

    def _evaluator(self, held_out: Stream | None) -> Evaluator:
        opened, plan, placement = self.opened, self.planned.plan, self.planned.programs.placement
        keys, bounds = opened.keys, opened.keys.evaluation
        num_rows, batch_size = self.held_out.num_samples, plan.eval_batch_size
        has_own_rows = opened.parts.stream is not None or opened.parts.eval_stream is not None
        until = opened.context.own_end.until if has_own_rows else iter
        return Evaluator(
            keys, bounds, placement, held_out, num_rows, batch_size, opened.objective, until
        )

    def _referred_streams(self) -> tuple[Stream | None, Stream | None]:
        """Returns the training stream and the held-out one, beside their reference if the objective
        has one.
        """
        opened = self.opened
        reference, streams = self.found_reference, (opened.stream, self.held_out.stream)
        if reference is None:
            return streams
        with opened.context.sessions.during(TimePart.START_UP):
            self._complete(reference)
        training, held_out = (stream and reference.beside(stream) for stream in streams)
        return training, held_out

    def _complete(self, reference: FoundReference) -> None:
        """Computes what a reference lacks, and writes its file if it has changed."""
        planned, context = self.planned, self.opened.context
        if reference.missing:
            context.console.print(reference.introduction)
            params = self._first_params()
            reading = planned.programs.reference_pass(planned.plan.eval_batch_size)
            scores = planned.programs.reference_scores(
                reading, planned.executable, planned.executables
            )
            reference.complete(partial(reading, scores(params)))
        file = reference.changed_file()
        if file and is_first() and context.config.enable_checkpointing:
            context.folder.write(*file)

    def _full_state(self) -> TrainState | None:
        """Returns the state that `load_full_state_path` names; None if it is empty."""
        if not self.opened.context.config.load_full_state_path:
            return None
        return self.start.parameters.origin.read_from(self._full_state_of)

    def _full_state_of(self, source: Source) -> TrainState:
        if isinstance(source, ForeignState):
            return state_taken_over(self.opened.context.config.model, source, self.planned.abstract)
        assert isinstance(source, StoredCheckpoint), "it is opened as a checkpoint"
        return source.full_state(self.planned.abstract)

    def _first_params(self) -> State:
        """Returns the parameters of the model that the run started from, without adapters."""
        abstract = self.planned.abstract
        if full := self._full_state():
            return full.model
        if read := self.start.parameters.open(abstract.model):
            return read(abstract.model)
        return self._initial_state().model

    def _state(self, restored: TrainState | None) -> TrainState:
        """Returns the state to start from: a restored one, with the model that its adapters adapt,
        or a first one.
        """
        abstract = self.planned.abstract
        if restored is None and (full := self._full_state()):
            return full
        if restored and abstract.frozen is None:
            return restored
        read = self.start.parameters.open(abstract.model)
        if restored:
            assert read is not None and abstract.frozen is not None, "adapters adapt a loaded model"
            return restored._replace(frozen=read(abstract.frozen))
        if read:
            return self._fresh(read(abstract.model))
        return self._initial_state()

    def _fresh(self, model: State) -> TrainState:
        """Returns a state of a model's parameters with a fresh optimizer, and fresh adapters if any
        are trained.
        """
        opened, planned = self.opened, self.planned
        state = init_opt_state(opened.keys, planned.abstract, model, opened.own_optimizer)
        if state.frozen is None or not opened.keys.optimizer.reproducible_sums:
            return state
        params = planned.programs.reproducible_init(planned.executables)()
        average = None if state.average is None else first_average(params)
        return state._replace(params=params, average=average)

    def _initial_state(self) -> TrainState:
        if self.opened.keys.optimizer.reproducible_sums:
            return self._fresh(self.planned.programs.reproducible_init(self.planned.executables)())
        made: TrainState = self.planned.executable(INIT, self.planned.programs.init)()
        return made


@dataclass(frozen=True, eq=False)
class RunningPretraining:
    """Pre-training under way (`maxbatch.run.task.Running`)."""

    opened: OpenedPretraining
    planned: PlannedPretraining
    steps: StepLadder
    stream: Stream | None  # of the samples beside their reference; None on a host without rows
    feed: Iterator[StagedBatch]
    evaluator: Evaluator | None  # of the loss on held-out data
    answers: Answers | None  # to held-out records at each eval
    answers_log: AnswersLog | None  # on the first host
    adapting: Callable[[State, State], State] | None  # of a model by adapters

    why_untrained: ClassVar[str] = OpenedPretraining.why_untrained

    @property
    def takes_turns(self) -> bool:
        return must_take_turns(self.opened.context.devices)

    @property
    def evaluates(self) -> bool:
        return self.evaluator is not None or self.planned.score_tasks is not None

    def step(
        self, state: TrainState, batch: StagedBatch, settings: UpdatePlan
    ) -> tuple[TrainState, Dispatched]:
        planned, stream = batch.planned, self.stream
        at = settings.at(planned.first_sample, planned.num_rows)
        taken = batch.num_micro_batches
        programs = self.planned.programs
        if programs.packs and not programs.config.optimizer.reproducible_sums:
            # a host without rows does not know the passes of lengths; the program counts them
            taken = batch.shape.max_micro_batches
        numbers = np.int32(taken), jax.tree.map(np.float32, at)
        state, metrics = self.steps[batch.shape](state, batch.batch, *numbers)
        counts = stream.samples_by_source(planned.end_sample) if stream is not None else None
        figures: dict[str, object] = {} if counts is None else {Metric.SAMPLES_BY_SOURCE: counts}
        if passes := batch.passes:
            figures |= {
                Metric.NUM_PASSES: passes.num_passes,
                Metric.ROW_SHARE: passes.row_share,
            }
        return state, Dispatched(
            planned=planned,
            place=Place(planned.end_sample),
            micro_batch_size=batch.shape.micro_batch,
            num_micro_batches=batch.num_micro_batches,
            learning_rate=at.learning_rate,
            data_wait_s=batch.waited_s,
            metrics=metrics,
            figures=figures,
        )

    def compile_rest(self) -> None:
        background = self.opened.context.background
        model = adapted_shapes(self.opened.keys, self.planned.abstract)
        self.steps.compile_rest(background)
        for observer in (self.evaluator, self.answers):
            if observer:
                observer.compile(model, background, self.planned.executable)

    def evaluate(self, state: TrainState, step: int) -> Mapping[str, object]:
        params = self._adapted(state)
        if self.answers:
            with suppress(TrainingError):  # answers are no part of what the run is for
                answers = self.answers(params)
                if self.answers_log:
                    self.answers_log.write(step, answers)
        figures = self._eval_losses(state, params)
        if self.planned.score_tasks is not None:
            try:
                figures |= self.planned.score_tasks(params)
            # of a task, or of parameters that are not finite
            except (ConfigError, TrainingError) as error:
                warn(f"step {step}: eval_tasks have no scores: {error}")
        return figures

    def _eval_losses(self, state: TrainState, params: State) -> dict[str, object]:
        """Returns the losses on held-out data; none if a user's rows raise on any host, which ends
        the run.
        """
        if self.evaluator is None:
            return {}
        own_end = self.opened.context.own_end
        losses: dict[str, object] = {Metric.EVAL_LOSS: self.evaluator(params).loss}
        if state.average is not None and not own_end.was_reached:
            losses[Metric.EVAL_LOSS_AVERAGED] = self.evaluator(self._adapted(state.averaged)).loss
        return {} if own_end.was_reached else losses

    def _adapted(self, state: TrainState) -> State:
        """Returns the parameters of the model, with its adapters."""
        return (
            self.adapting(state.frozen, state.params)
            if self.adapting and state.frozen is not None
            else state.params
        )

    def ahead(self) -> None:
        """Returns None: a batch is a function of its position."""

    def conclusion(self, state: TrainState) -> Iterator[str]:
        """Yields a sample of the model's text, and the next command to type."""
        opened = self.opened
        if not opened.concludes:
            return
        context, config = opened.context, opened.context.config
        # A sample needs the cache of the config's own model, and a tokenizer of the data: ids have
        # none, and synthetic rows may have fewer tokens than the config's.
        tokenizer = opened.tokenizer()
        is_of_data = tokenizer.identity != IDS and tokenizer.vocab_size <= config.vocab_size
        has_text = is_of_data and not opened.is_own
        asks = prompt_flag(config.generate_prompt)
        if config.generate_prompt and has_text and not context.stop.is_asked:
            params = self._adapted(state)
            try:
                answer = self._answer_sample(params) if opened.recipe.has_answers else None
                text, asks = answer or (self._text_sample(params), asks)
            except TrainingError as error:  # a sample is no part of what the run is for
                text = f"none: {error}"
            yield f"{'--- a sample ':-<80}\n{text}\n{'':-<80}"
        can_generate = config.enable_checkpointing and has_text
        run_dir = shlex.quote(config.run_dir)
        generating = [f"maxbatch generate {run_dir}{asks}"] * can_generate
        width = context.console.width if context.console.is_terminal else None
        commands = *generating, f"pip install tensorboard && tensorboard --logdir {run_dir}"
        for place, command in enumerate(commands):
            yield folded_command(f"{' ' * 6 if place else 'next: '}{command}", 8, width)

    def _text_sample(self, params: State) -> str:
        """Returns a text that continues `generate_prompt`."""
        opened, config = self.opened, self.opened.context.config
        ends = end_tokens(config.load_parameters_path)
        text, tokenizer = config.text, opened.tokenizer()
        return continued_text(
            params, tokenizer, config.generate_prompt, text, ends, self.planned.mesh
        )

    def _answer_sample(self, params: State) -> tuple[str, str] | None:
        """Returns an answer in the form of the data, and the flags of `generate` that ask for the
        like.

        The question is `generate_prompt` if the config states one and the data are chats, else that
        of a record; None if no record has a question.
        """
        opened, config = self.opened, self.opened.context.config
        answers = self.answers or opened.answers_to(opened.stream, self.planned.mesh)
        if answers is None:
            return None
        question, prompts = answers.questions[0], answers.prompts
        if prompts is None or not prompts.is_prompt(question.prompt):
            asks = prompt_flag(answers.tokenizer.decode(question.prompt))
        else:
            asks = " --chat"
            if config.generate_prompt != KEYS["generate_prompt"].default:
                asks += prompt_flag(config.generate_prompt)
                ids = prompts.ids([{"role": "user", "content": config.generate_prompt}])
                question = Question(ids.tolist()[: config.max_target_length - 1], [])
        answer = answers.to(question, params)
        return f"{answer.question}{answer.answer}", asks


def prompt_flag(prompt: str) -> str:
    """Returns a flag that a shell reads as a prompt."""
    if not prompt:
        return ""
    if set(prompt) & set('"$`!\\\n'):
        escaped = prompt.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        return f" --prompt $'{escaped}'"
    return f' --prompt "{prompt}"'
