"""Pre-training: steps that feed on rows of the stream and learn to predict each next token."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from maxbatch.config.loading import keys
from maxbatch.config.rules import check_vocabulary
from maxbatch.config.sections import Config, OptimizerConfig
from maxbatch.config.values import shown
from maxbatch.data.feed.feed import Feed, StagedBatch
from maxbatch.data.feed.placement import BatchShape, is_loading
from maxbatch.data.store.store import IDS
from maxbatch.data.store.tokenizers import Tokenizer, tokenizer_of
from maxbatch.data.stream.own import as_stream
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.data.stream.stream_config import StreamConfig
from maxbatch.huggingface.folder.config_json import context_length, end_tokens
from maxbatch.model.decoder_config import DecoderConfig
from maxbatch.parallel.absent_tpu import leave_out_absent_tpu
from maxbatch.parallel.cpu_devices import give_cpu_devices_threads
from maxbatch.parallel.hosts import broadcast, gather, is_first, warn
from maxbatch.parallel.mesh import must_take_turns
from maxbatch.parallel.trees import State
from maxbatch.plan.batch import BatchPlan, Resume, expansion_factor
from maxbatch.plan.plan_config import PlanConfig
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.runs.metrics_schema import Metric
from maxbatch.sampling.sampler import SamplingRules
from maxbatch.sampling.text import TextConfig, generate_text
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.folding import counted, folded_command
from maxbatch.training.agreement import check_same_start
from maxbatch.training.compile.background import compile_here
from maxbatch.training.compile.flags import program_options, state_flags, with_flags
from maxbatch.training.compile.ladder import StepLadder
from maxbatch.training.compile.saved import SavedPrograms, program_keys
from maxbatch.training.evaluation import Evaluator, num_evaluated
from maxbatch.training.harness.run_model import RunModel, RunModelConfig
from maxbatch.training.harness.tasks import Tasks
from maxbatch.training.own import Parts, check_parts, code_of, module_maker, objective_of, optimizer_maker, task_model
from maxbatch.training.programs import INIT, Programs, ProgramsConfig, checked_mesh_shape, step_name
from maxbatch.training.record.answers import Answers, AnswersLog, Question, questions_of
from maxbatch.training.reference import REFERENCE_FILE, Reference, digest_of, read_on_all_hosts, with_reference
from maxbatch.training.session import Outcome, RunContext, Session
from maxbatch.training.task import Dispatched, Start, TaskData, check_same_data
from maxbatch.training.update.optimizers import AT_REST
from maxbatch.training.update.recipe import TrainedRecipe
from maxbatch.training.update.state import TrainState, compile_merging, init_opt_state
from maxbatch.training.update.update_config import UpdateConfig
from maxbatch.training.weights.checkpoint_reading import StoredCheckpoint

CONFIGURED = Parts()  # all of it the config's


def train(
    config: Config,
    devices: Sequence[jax.Device] | None = None,
    parts: Parts = CONFIGURED,
    task: type[Pretraining] | None = None,
) -> Outcome:
    """Trains a config's run, from the newest checkpoint of `run_dir` if there is one.

    Args:
      config: a resolved config (`maxbatch.load_config`).
      devices: the devices to train on, all by default.
      parts: a user's own model, loss, optimizer, data and loggers.
      task: the kind of pre-training; None: `Pretraining`.

    Returns:
      The run's position, and the signal that stopped it, if one did.

    Raises:
      ConfigError: the config, the data or the checkpoint cannot be used.
      TrainingError: `max_consecutive_skips` updates in a row were not finite, or the disk is full.
    """
    give_cpu_devices_threads()
    leave_out_absent_tpu()
    state_flags(config)
    check_same_start(config, "train", code_of(parts))
    devices = devices or jax.devices()
    config = with_flags(config, devices)
    with ExitStack() as stack:
        context = RunContext(config, devices, stack)
        return Session(context, (task or Pretraining)(context, parts), parts.outputs).run()


def _check(parts: Parts, compiled_dir: str, recipe: TrainedRecipe) -> None:
    check_parts(parts)
    if not recipe.takes_parts and (parts.model or parts.objective or parts.stream):
        raise ConfigError(
            f"{recipe.key}=true: trains the config's own model on {recipe.unit}s of its own data, and train() was "
            f"given a model, a loss or a stream; works: {recipe.key}=false"
        )
    if compiled_dir and (parts.model or parts.objective or parts.optimizer):
        raise ConfigError(
            f"compiled_dir={compiled_dir}: holds programs of the config's own model, loss and optimizer, and train() "
            'was given others; works: compiled_dir=""'
        )


class _FoundReference(NamedTuple):
    """The reference of answers as an earlier start left it."""

    reference: Reference
    missing: list[tuple[Stream | None, int, int]]  # of which streams it lacks which samples: first, behind the last
    is_other: bool  # whether the file states other held-out samples


class Pretraining:
    """The task of pre-training (`maxbatch.training.task.Task`)."""

    evaluates = has_eval_loss = False
    steps: StepLadder  # the compiled updates of the stages ahead, from `feed` on

    def __init__(self, context: RunContext, parts: Parts = CONFIGURED) -> None:
        self._context, config, self._parts = context, context.config, parts
        self._recipe = TrainedRecipe.of(config)
        _check(parts, config.compiled_dir, self._recipe)
        self._tasks = self._open_tasks()
        self.takes_turns = must_take_turns(context.devices)
        self._mesh_shape = checked_mesh_shape(PlanConfig.of(config), DecoderConfig.of(config), context.devices)
        self._expansion = max(1, int(expansion_factor(PlanConfig.of(config), jax.process_count())))
        self._loads = is_loading(jax.process_index(), self._expansion)
        make_model = module_maker(parts.model, config) if parts.model else None
        self._own_optimizer = optimizer_maker(parts.optimizer, OptimizerConfig.of(config))
        self.model = task_model(make_model, UpdateConfig.of(config), self._mesh_shape, self._own_optimizer)
        own_objective = objective_of(parts.objective, make_model, config.model)
        self._objective = own_objective or self._recipe.objective(config)
        self.stream: Stream | None = self._open_stream() if self._loads else None  # None if another host loads
        self.data = self._agree_on_data()
        self._held_out: Stream | None = None  # once opened, on a host that loads
        self._num_held_out = 0
        self._found_reference: _FoundReference | None = None  # once the start is opened
        self._evaluator: Evaluator | None = None
        self._tasks_model: RunModel | None = None  # from `build` on, if there are tasks
        self._answers: Answers | None = None  # to held-out records at each eval
        self._answers_log: AnswersLog | None = None  # on the first host

    def _open_stream(self) -> Stream:
        config, own = self._context.config, self._parts.stream
        return open_stream(config) if own is None else as_stream(own, StreamConfig.of(config))

    def _open_tasks(self) -> Tasks | None:
        """Returns the tasks that evals score; None if the config states none."""
        stated = self._context.config.evaluation
        if not stated.eval_tasks:
            return None
        if self._parts.model or self._parts.stream:
            raise ConfigError(
                f"eval_tasks={shown(stated.eval_tasks)}: asks the config's own model in its tokenizer's words, and "
                'train() was given a model or a stream; works: eval_tasks=""'
            )
        names = [name for name in stated.eval_tasks.split(",") if name]
        os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's bars, beside the run's own lines
        return Tasks(names, "eval_tasks=", limit=stated.eval_tasks_limit)

    def _agree_on_data(self) -> TaskData:
        """Returns the facts of the first host; the others must read the same data."""

        def facts() -> tuple[Mapping[str, object], int | None]:
            assert self.stream is not None, "the first host loads data"
            return self.stream.identity, self.stream.samples_per_epoch

        identity, samples_per_epoch = broadcast(facts)
        own = self.stream.identity if self.stream is not None else identity
        check_same_data(f"dataset_path={self._context.config.dataset_path!r}", own)
        return TaskData(identity, samples_per_epoch, jax.process_count() // self._expansion)

    def plan(self, resume: Resume) -> BatchPlan:
        return BatchPlan.on_mesh(
            self._context.config,
            self._mesh_shape,
            jax.process_count(),
            samples_per_epoch=self.data.samples_per_epoch,
            resume=resume,
        )

    def build(self, plan: BatchPlan) -> None:
        """Opens `compiled_dir`, which must fit; lowers nothing yet."""
        config = self._context.config
        self._programs = Programs(
            ProgramsConfig.of(config), self._context.devices, self._mesh_shape, self._objective, self._expansion,
            self._own_optimizer,
        )  # fmt: skip
        self.mesh, self.abstract = self._programs.mesh, self._programs.abstract
        self.placement = self._programs.placement
        self._saved = (
            SavedPrograms(config.compiled_dir, program_keys(config), self.mesh) if config.compiled_dir else None
        )
        if self._tasks:
            tokenizer, ends = self._tokenizer(), end_tokens(config.load_parameters_path)
            check_vocabulary(config, tokenizer.vocab_size)
            self._tasks_model = RunModel(
                RunModelConfig.of(config), self.mesh, tokenizer, context_length(config), ends, self.abstract.model
            )
            self._tasks.check(self._tasks_model)

    def identities(self) -> dict[str, str]:
        config, own_parts = self._context.config, self._parts.model is not None or self._parts.stream is not None
        held_out = self._held_out.identity if self._held_out is not None else {}
        first = broadcast(lambda: held_out)
        key = "eval_dataset_path" if config.eval_dataset_path else "eval_fraction"
        found = {f"{name} of {key}": str(value) for name, value in (held_out if self._loads else first).items()}
        given = code_of(self._parts).items()
        found |= {f"the file of {name}": code for name, code in given if getattr(self._parts, name) is not None}
        if self._saved:
            found["shapes in compiled_dir"] = str([tuple(shape) for shape in self._saved.shapes])
        if config.generate_prompt and not own_parts:  # the sample at the end
            tokenizer = self.stream.tokenizer if self.stream is not None else self._tokenizer()
            found["content of tokenizer_path"] = tokenizer.identity
            found["end tokens of load_parameters_path"] = str(end_tokens(config.load_parameters_path))
            if self._recipe.has_answers:
                with suppress(ConfigError):  # a tokenizer without a template writes no question of its own
                    found["chat template of tokenizer_path"] = tokenizer.chat_template().identity
        return found

    def _tokenizer(self) -> Tokenizer:
        return tokenizer_of(self._context.config)

    def executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        if self._saved is not None and name in self._saved:
            return self._saved.load(name, lower)
        return compile_here(name, lower, program_options(self._context.config.libtpu_flags, self._context.devices))

    def feed(self, start: Start) -> Feed:
        """Returns the batches ahead; none of the executables that they need is compiled or loaded yet."""

        def compile_step(shape: BatchShape) -> jax.stages.Compiled:
            return self.executable(step_name(shape), lambda: self._programs.step(shape))

        manager, position = start.plan.manager, start.position
        ahead = manager.stages[manager.stage_at(position.samples_seen) :]
        # What was compiled ahead was planned from the run's start, and its first shape runs every stage.
        self.steps = StepLadder(
            compile_step,
            [stage for stage in ahead if stage.num_steps],
            all_first=jax.process_count() > 1 or self._saved is not None,
            shapes=self._saved.shapes_for(manager.stages) if self._saved else None,
        )
        stream = self.stream
        if self._found_reference:
            reference = self._completed(self._found_reference, start.plan)
            stream = None if stream is None else with_reference(stream, reference)
            held_out = self._held_out
            self._held_out = None if held_out is None else with_reference(held_out, reference)
        return Feed(stream, manager, self.steps.shape_for, self.placement, position.step)

    def _find_reference(self, start: Start) -> _FoundReference:
        """Returns what is known of the reference of all samples that the run will read: the file of an earlier start.

        A new run computes it from its parameters, whatever an attempt that was killed before its first checkpoint left.
        """
        path, plan = self._context.folder.path / REFERENCE_FILE, start.plan
        nothing = Reference(self._recipe.unit, self._objective.num_referred)
        known = read_on_all_hosts(path, nothing.unit, nothing.num_answers) if start.position.step else nothing
        origin = self._context.origin.mark
        if known is None or (known.origin and origin and known.origin != origin):
            why = "missing or damaged" if known is None else "of another run"
            warn(f"{path}: {why}; the reference is computed again from the first parameters")
            known = nothing
        assert plan.total_samples is not None, "data that are here have known epochs"
        # The first epoch has every sample; the sources of a mixture have epochs of their own.
        last = min(plan.total_samples, self.data.samples_per_epoch or plan.total_samples)
        bounds = self._context.config.evaluation
        last_held_out = num_evaluated(bounds, self._num_held_out, plan.eval_batch_size)
        held_out = broadcast(lambda: digest_of(self._held_out.identity if self._held_out is not None else None))
        is_other = held_out != known.held_out  # other samples, or a file made before it stated them
        if is_other:
            read = self._held_out
            is_known = all(gather(known.knows(read.samples, last_held_out) if read else True))
            known.num_held_out, known.held_out = last_held_out if is_known else 0, held_out
        parts = [(self.stream, known.num_samples, last), (self._held_out, known.num_held_out, last_held_out)]
        known.num_samples = max(known.num_samples, last)
        known.num_held_out = max(known.num_held_out, last_held_out)
        return _FoundReference(known, [part for part in parts if part[2] > part[1]], is_other)

    def _completed(self, found: _FoundReference, plan: BatchPlan) -> Reference:
        """Returns a reference once the samples that it lacks are computed and its file holds all."""
        reference = found.reference
        if found.missing:
            count = sum(end - first for _, first, end in found.missing)
            self._context.console.print(f"reference: {counted(count, self._recipe.unit)} under the first parameters")
            params = self._first_params()
            reading = self._programs.reference_pass(plan.eval_batch_size)
            score = self.executable(reading.name, lambda: reading.lower(self.abstract.model))
            for stream, first, end in found.missing:
                reference.add(*reading(score, params, stream, first, end))
            reference.origin = self._context.origin.mark
        is_new = found.is_other or found.missing
        if is_new and is_first() and self._context.config.enable_checkpointing:
            self._context.folder.write(REFERENCE_FILE, reference.to_bytes())
        return reference

    @property
    def start(self) -> tuple[str, str]:
        return self._context.start

    def open_start(self, start: Start, is_new: bool) -> None:
        if self._objective.num_referred:
            self._found_reference = self._find_reference(start)
        lacks_samples = self._found_reference is not None and bool(self._found_reference.missing)
        # A checkpoint lacks the model that adapters adapt.
        if not (is_new or lacks_samples or self.abstract.frozen is not None):
            return
        if self._context.config.load_full_state_path:
            self._context.origin.source()
        else:
            self._context.open_parameters(self.abstract.model)

    def _full_state(self) -> TrainState | None:
        """Returns the state that `load_full_state_path` names; None if it is empty."""
        if not self._context.config.load_full_state_path:
            return None
        source = self._context.origin.source()
        assert isinstance(source, StoredCheckpoint), "it is opened as a checkpoint"
        return source.full_state(self.abstract)

    def _first_params(self) -> State:
        """Returns the parameters of the model that the run started from, without adapters."""
        if full := self._full_state():
            return full.model
        if read := self._context.open_parameters(self.abstract.model):
            return read(self.abstract.model)
        made: TrainState = self.executable(INIT, self._programs.init)()
        return made.model

    def introduction(self, plan: BatchPlan) -> Iterable[str]:
        return [self.steps.describe()] if len(plan.manager.stages) > 1 else []

    def prepare(self, restored: TrainState | None, start: Start) -> TrainState:
        """Compiles the first step while the state is made, and warms it up."""
        making_state = self._context.background.start(partial(self._state, restored))
        compiled = self.steps.compile_first()
        state: TrainState = making_state.result()
        gather(None)  # hosts compile for unequal times, and CPUs wait for each other in a program for 30 s at most
        for shape, step in compiled:
            # A batch without weight changes nothing.
            nothing = (self.placement.padding(shape), np.int32(1), jax.tree.map(np.float32, AT_REST))
            state, metrics = step(state, *nothing)
            jax.block_until_ready(metrics)
        if self.abstract.frozen is not None:
            self._merging = compile_merging(self._context.config.adapters, self.abstract)
        self._evaluator = self._open_evaluator(start.plan.eval_batch_size)
        self.evaluates = self.has_eval_loss or self._tasks is not None
        if self._answers and self._evaluator and is_first():
            log = AnswersLog(self._context.folder, self._context.board, start.position.step)
            self._answers_log = self._context.stack.enter_context(closing(log))
        return state

    def _state(self, restored: TrainState | None) -> TrainState:
        if restored is None:
            return self._first_state()
        if self.abstract.frozen is None:
            return restored
        read = self._context.open_parameters(self.abstract.model)
        assert read is not None, "adapters adapt a loaded model"
        return restored._replace(frozen=read(self.abstract.frozen))

    def _first_state(self) -> TrainState:
        if full := self._full_state():
            return full
        if read := self._context.open_parameters(self.abstract.model):
            keys, params = UpdateConfig.of(self._context.config), read(self.abstract.model)
            return init_opt_state(keys, self.abstract, params, self._own_optimizer)
        made: TrainState = self.executable(INIT, self._programs.init)()
        return made

    def open_held_out(self) -> None:
        config = self._context.config
        has_own_data = self._parts.stream is not None and not config.eval_dataset_path
        if config.eval_interval <= 0 or has_own_data:
            return
        held_out = open_stream(config, split="eval") if self._loads else None
        self._num_held_out = broadcast(lambda: 0 if held_out is None else held_out.samples_per_epoch or 0)
        self._held_out = held_out
        self.has_eval_loss = bool(self._num_held_out)

    def _open_evaluator(self, batch_size: int) -> Evaluator | None:
        """Returns None if the config has no eval or nothing is held out."""
        config, held_out, num_rows = self._context.config, self._held_out, self._num_held_out
        if not num_rows:
            return None
        self._answers = self._open_answers(held_out) if self._recipe.answers_evals else None
        update, bounds = UpdateConfig.of(config), config.evaluation
        return Evaluator(update, bounds, self.placement, held_out, num_rows, batch_size, self._objective)

    def step(self, state: TrainState, batch: StagedBatch, settings: UpdateSettings) -> tuple[TrainState, Dispatched]:
        numbers = np.int32(batch.num_micro_batches), jax.tree.map(np.float32, settings)
        state, metrics = self.steps[batch.shape](state, batch.batch, *numbers)
        counts = self.stream.samples_by_source(batch.planned.end_sample) if self.stream is not None else None
        return state, Dispatched(
            planned=batch.planned,
            micro_batch_size=batch.shape.micro_batch,
            num_micro_batches=batch.num_micro_batches,
            learning_rate=settings.learning_rate,
            data_wait_s=batch.waited_s,
            metrics=metrics,
            figures={} if counts is None else {Metric.SAMPLES_BY_SOURCE: counts},
        )

    def compile_rest(self) -> None:
        self.steps.compile_rest(self._context.background)
        if self._evaluator:
            self._evaluator.compile(self.abstract.model, self._context.background, self.executable)
        if self._answers:
            self._answers.compile(self.abstract.model, self._context.background, self.executable)

    def evaluate(self, state: TrainState, step: int) -> Mapping[str, object]:
        params = self._merged(state)
        if self._answers:
            with suppress(TrainingError):  # answers are no part of what the run is for
                answers = self._answers(params)
                if self._answers_log:
                    self._answers_log.write(step, answers)
        found: dict[str, object] = {}
        if self._evaluator:
            found[Metric.EVAL_LOSS] = self._evaluator(params).loss
            if state.average is not None:
                found[Metric.EVAL_LOSS_AVERAGED] = self._evaluator(self._merged(state.averaged)).loss
        if self._tasks and self._tasks_model:
            try:
                found |= self._tasks_model.ask(self._tasks, params)
            except (ConfigError, TrainingError) as error:  # of a task, or of parameters that are not finite
                warn(f"step {step}: eval_tasks have no scores: {error}")
        return found

    def _merged(self, state: TrainState) -> State:
        """Returns the parameters of the model, its adapters merged into them."""
        return state.params if state.frozen is None else self._merging(state.frozen, state.params)

    def _open_answers(self, stream: Stream | None) -> Answers | None:
        """Returns the answers to records of a stream, if it has questions and the config asks for samples of text.

        The answer of a pair's record is the chosen one.
        """
        config = self._context.config
        if not (self._recipe.has_answers and config.generate_prompt) or self._parts.model or self._parts.stream:
            return None
        questions = [Question(*one) for one in broadcast(lambda: questions_of(stream) if stream is not None else [])]
        if not questions:
            return None
        ends = end_tokens(config.load_parameters_path)
        return Answers(DecoderConfig.of(config), self._tokenizer(), self.mesh, ends, questions)

    def ahead(self) -> None:
        """Returns None: a batch is a function of its position."""

    def why_untrained(self) -> str:
        return "no batch had a loss weight; look at the data with `maxbatch data`"

    def conclusion(self, state: TrainState) -> Iterator[str]:
        """Yields a sample of the model's text, and the next command to type."""
        config = self._context.config
        # A sample needs the cache of the config's own model, and a tokenizer of the data.
        is_own = self._parts.model is not None or self._parts.stream is not None or self._tokenizer().identity == IDS
        asks = _prompt_flag(config.generate_prompt)
        if config.generate_prompt and not is_own and not self._context.stop.is_asked:
            params = self._merged(state)
            try:
                found = self._answer_sample(params) if self._recipe.has_answers else None
                text, asks = found or (self._text_sample(params), asks)
            except TrainingError as error:  # a sample is no part of what the run is for
                text = f"none: {error}"
            yield f"{'--- a sample ':-<80}\n{text}\n{'':-<80}"
        can_generate = config.enable_checkpointing and not is_own
        generating = [f"maxbatch generate {config.run_dir}{asks}"] * can_generate
        console = self._context.console
        width = console.width if console.is_terminal else None
        commands = *generating, f"pip install tensorboard && tensorboard --logdir {config.run_dir}"
        for place, command in enumerate(commands):
            yield folded_command(f"{' ' * 6 if place else 'next: '}{command}", 8, width)

    def _text_sample(self, params: State) -> str:
        """Returns a text that continues `generate_prompt`."""
        config = self._context.config
        rules = SamplingRules(end_ids=end_tokens(config.load_parameters_path))
        return generate_text(params, self._tokenizer(), config.generate_prompt, TextConfig.of(config), rules, self.mesh)

    def _answer_sample(self, params: State) -> tuple[str, str] | None:
        """Returns an answer in the form of the data, and the flags of `generate` that ask for the like.

        The question is `generate_prompt` if the config states one and the data are chats, else that of a record; None
        if no record has a question.
        """
        config = self._context.config
        self._answers = self._answers or self._open_answers(self.stream)
        if self._answers is None:
            return None
        question, prompts = self._answers.questions[0], self._answers.prompts
        if prompts is None or not prompts.is_prompt(question.prompt):
            asks = _prompt_flag(self._answers.tokenizer.decode(question.prompt))
        else:
            asks = " --chat"
            if config.generate_prompt != keys()["generate_prompt"].default:
                asks += _prompt_flag(config.generate_prompt)
                ids = prompts.ids([{"role": "user", "content": config.generate_prompt}])
                question = Question(ids.tolist()[: config.max_target_length - 1], [])
        answer = self._answers.to(question, params)
        return f"{answer.question}{answer.answer}", asks


def _prompt_flag(prompt: str) -> str:
    """Returns a flag that a shell reads as a prompt."""
    if not prompt:
        return ""
    if set(prompt) & set('"$`!\\\n'):
        escaped = prompt.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        return f" --prompt $'{escaped}'"
    return f' --prompt "{prompt}"'
