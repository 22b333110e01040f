"""What a run is made of, in the order in which it can be refused: data, checkpoint, batch, devices, programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from maxbatch.data.feed.placement import BatchShape, is_loading
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.parallel.hosts import broadcast, gather, is_first
from maxbatch.plan.batch import BatchPlan, Resume, expansion_factor
from maxbatch.runs.run_folder import RunFolder
from maxbatch.system.errors import ConfigError
from maxbatch.training.checkpoints import Checkpoints, Newest, Position, model_identity
from maxbatch.training.compile.ladder import Background, StepLadder, compile_here
from maxbatch.training.compile.lowering import INIT, Programs, checked_mesh_shape, step_name
from maxbatch.training.compile.saved import SavedPrograms
from maxbatch.training.evaluation import Evaluator
from maxbatch.training.parameters import restore_parameters
from maxbatch.training.state import TrainState, init_opt_state, num_parameters


def warn(message: str) -> None:
    """One line on standard error; the run goes on."""
    if is_first():
        print(f"maxbatch: warning: {message}", file=sys.stderr, flush=True)


class Run:
    """A run that is ready to take its next step.

    Attributes:
      stream: the training stream; None on a host that does not load data.
      samples_per_epoch: samples of an epoch; None for a mixture, which has no epoch of its own.
      checkpoints: the run's checkpoints, None where `enable_checkpointing` is false.
      position: where training stands.
      plan: the batch plan, anchored at `position`.
      devices: what it trains on.
      mesh: the device mesh.
      placement: how batches get onto the mesh.
      state: parameters and optimizer state at `position`, from `prepare` on.

    Raises:
      ConfigError: something in the config, the data or the checkpoint cannot be used.
    """

    state: TrainState

    def __init__(
        self, config: ConfigDict, folder: RunFolder, stack: ExitStack, devices: Sequence[jax.Device]
    ) -> None:
        self.config, self.devices = config, devices
        self._mesh_shape = checked_mesh_shape(config, devices)
        expansion = max(1, int(expansion_factor(config, jax.process_count())))
        self._loads = is_loading(jax.process_index(), expansion)
        self.stream: Stream | None = open_stream(config) if self._loads else None
        self.samples_per_epoch, data_identity = self._agree_on_data()
        self.checkpoints: Checkpoints | None = None
        if config.enable_checkpointing:
            identity = {"data": data_identity, "model": model_identity(config)}
            checkpoints = Checkpoints(
                folder.path,
                config.max_num_checkpoints_to_keep,
                identity,
                warn,
                jax.process_count() // expansion,
            )
            self.checkpoints = stack.enter_context(closing(checkpoints))
        newest = self.checkpoints.newest() if self.checkpoints else None
        self._stand_at(newest.position if newest else Position(), newest)
        for message in self.plan.warnings:
            warn(message)
        self._programs = Programs(config, devices, self._mesh_shape, expansion)
        self.mesh, self.placement = self._programs.mesh, self._programs.placement
        self._abstract = self._programs.abstract
        self._saved = SavedPrograms(config.compiled_dir, config, self.mesh) if config.compiled_dir else None
        self._restored = (
            self.checkpoints.restore(self._abstract, self._executable) if self.checkpoints else None
        )
        position = self._restored.position if self._restored else Position()
        if position != self.position:  # the newest checkpoint was damaged
            self._stand_at(position, newest)

    def _agree_on_data(self) -> tuple[int | None, dict[str, Any]]:
        """Samples of an epoch and the stream's identity, from the first host; the others must read the same."""

        def facts() -> list[Any]:
            assert self.stream is not None, "the first host loads data"
            return [self.stream.samples_per_epoch, self.stream.identity]

        samples_per_epoch, identity = broadcast(facts)
        differing = [
            f"{key} on host {host}"
            for host, theirs in enumerate(gather(self.stream.identity if self.stream else identity))
            for key in sorted(identity.keys() | theirs.keys())
            if identity.get(key) != theirs.get(key)
        ]
        if differing:
            raise ConfigError(
                f"dataset_path={self.config.dataset_path!r}: the hosts see different data ({', '.join(differing[:8])} "
                "differ from host 0); give every host the same files"
            )
        return samples_per_epoch, identity

    def _stand_at(self, position: Position, newest: Newest | None) -> None:
        self.position = position
        hosts = newest.hosts if newest else ()
        self.plan = BatchPlan.on_mesh(
            self.config,
            self._mesh_shape,
            jax.process_count(),
            samples_per_epoch=self.samples_per_epoch,
            resume=Resume(position.step, position.samples_seen, *hosts),
        )

    @property
    def total_steps(self) -> int:
        """Updates of the whole run, those before a resume included."""
        total = self.plan.total_steps
        assert total is not None, "a stream that is here has known epochs"
        return total

    @property
    def is_complete(self) -> bool:
        return self.position.step >= self.total_steps

    @property
    def num_parameters(self) -> int:
        return num_parameters(self._abstract.params)

    def plan_steps(self) -> StepLadder:
        """The executables that the stages ahead need, none compiled or loaded yet."""

        def compile_step(shape: BatchShape) -> Any:
            return self._executable(step_name(shape), lambda: self._programs.step(shape))

        manager = self.plan.manager
        ahead = manager.stages[manager.stage_at(self.position.samples_seen) :]
        # What was compiled ahead was planned from the run's start, and its first shape runs every stage.
        return StepLadder(
            compile_step,
            [stage for stage in ahead if stage.num_steps],
            all_first=jax.process_count() > 1 or self._saved is not None,
            shapes=self._saved.shapes if self._saved else None,
        )

    def _executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> Any:
        if self._saved is not None and name in self._saved:
            return self._saved.load(name, lower)
        return compile_here(name, lower)

    def prepare(self, steps: StepLadder, background: Background) -> None:
        """Compiles the first step while the state is made, and warms it up."""
        making_state = background.start(self._first_state)
        compiled = steps.compile_first()
        self.state = making_state.result()
        for shape, step in compiled:
            # A batch without weight changes nothing.
            nothing = (self.placement.padding(shape), np.int32(1), np.float32(0), np.float32(1))
            self.state, metrics = step(self.state, *nothing)
            jax.block_until_ready(metrics)

    def _first_state(self) -> TrainState:
        if self._restored:
            return self._restored.state
        if self.config.load_parameters_path:
            params = restore_parameters(self.config.load_parameters_path, self._abstract.params)
            return init_opt_state(self.config, self._abstract, params)
        return self._executable(INIT, self._programs.init)()

    def evaluator(self) -> Evaluator | None:
        """The evaluator; None where no eval is wanted or nothing is held out."""
        if self.config.eval_interval <= 0:
            return None
        held_out = open_stream(self.config, split="eval") if self._loads else None
        num_rows = broadcast(lambda: held_out.samples_per_epoch if held_out else 0)
        if not num_rows:
            return None
        return Evaluator(
            self.config, self.mesh, self.placement, held_out, num_rows, self.plan.eval_batch_size
        )

    def compile_later(self, steps: StepLadder, evaluator: Evaluator | None, background: Background) -> None:
        """Starts compiling what training wants after its first update: later stages, eval, saves."""
        steps.compile_rest(background)
        if evaluator:
            evaluator.compile(self._abstract.params, background, self._executable)
        if self.checkpoints:
            self.checkpoints.compile(self._abstract, background, self._executable)
