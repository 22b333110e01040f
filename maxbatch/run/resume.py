"""The state from which a start of a run continues: the newest whole one of the checkpoints in
`run_dir` and the local ones; else a first state.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from maxbatch.parallel.hosts import is_first, warn
from maxbatch.plan.batch import NEW_RUN, ResumePoint
from maxbatch.run.beginning import check_same_run
from maxbatch.run.context import RunContext
from maxbatch.run.folder.position import CheckpointRecord, Position
from maxbatch.run.folder.sessions import TimePart
from maxbatch.run.taking_over import position_taken_over
from maxbatch.run.task import B, Opened, Planned, Start
from maxbatch.run.weights.checkpoints import Checkpoints, Restored
from maxbatch.run.weights.foreign import ForeignState
from maxbatch.run.weights.origin import RunOrigin
from maxbatch.run.weights.parameters import FirstParameters, open_source, open_state
from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    from maxbatch.run.weights.local_checkpoints import LocalCheckpoints

# where a state was found, for messages
IN_RUN_DIR, LOCAL = "checkpoints", "local checkpoints"


@dataclass(frozen=True, eq=False)
class Resume(Generic[B]):
    """The state that a start of a run continues from, and the plan from there on.

    Attributes:
      checkpoints: those of the run; None without checkpointing.
      local: the local ones; None if the config states no directory for them.
      planned: the task, planned from `position` on.
      position: 0 for a new run, or where the MaxText run stood that it takes over.
      restored: the state; None if there is no whole one.
      source: the checkpoints that hold it (`IN_RUN_DIR`, `LOCAL`); "" without one.
      parameters: the first parameters of the run.
    """

    checkpoints: Checkpoints | None
    local: LocalCheckpoints | None
    planned: Planned[B]
    position: Position
    restored: Restored | None
    source: str
    parameters: FirstParameters

    @classmethod
    def find(cls, context: RunContext, opened: Opened[B]) -> Resume[B]:
        """Finds the newest whole state of a run, restores it, and plans the run from there on.

        Warns of states that cannot be used; damaged checkpoints are moved away, and local ones that
        are newer than the state are removed. All hosts call it.

        Raises:
          ConfigError: the newest state is of another run, dataset or model, or cannot be read; or
            the run would begin at step 0 over lines that states stand for.
        """
        return _Search(context, opened).resume()

    @property
    def start(self) -> Start:
        """The position and what the task needs to start from it."""
        ahead = self.restored.ahead if self.restored else None
        return Start(self.position, ahead, self.restored is None, self.parameters)


class _Search(Generic[B]):
    """The search for the newest whole state of one run."""

    def __init__(self, context: RunContext, opened: Opened[B]) -> None:
        self._context, self._opened = context, opened
        self._config, self._folder = context.config, context.folder
        self._checkpoints = self._open_checkpoints()
        self._local: LocalCheckpoints | None = None

    def resume(self) -> Resume[B]:
        newest = self._newest()
        parameters = self._pin_origin(newest)
        expected = newest.position if newest else self._first_position(parameters)
        hosts = newest.hosts if newest else (None, None)
        planned = self._opened.plan(ResumePoint(expected.step, expected.place, *hosts))
        for message in planned.plan.warnings:
            warn(message)

        with self._context.sessions.during(TimePart.RESTORING):
            restored, source = self._restore(planned)
        if not restored and self._begin_without_local_state():
            parameters = self._pin_origin(None)
        if not restored:
            self._refuse_fork_without_state()

        position = restored.position if restored else expected
        if newest and not restored:  # no state was whole: the run begins anew
            position = self._first_position(parameters)
        if position != expected:  # the newest state was damaged
            planned = self._opened.plan(ResumePoint(position.step, position.place, *hosts))

        # The run begins anew beside its damaged checkpoints: its lines go there too.
        if self._has_set_aside and not restored and is_first():
            self._folder.keep_lines()
        if self._local:
            self._local.resumed(position.step)
        return Resume(
            self._checkpoints, self._local, planned, position, restored, source, parameters
        )

    def _newest(self) -> CheckpointRecord | None:
        """Returns the record of the newest state with sound JSON, over checkpoints and local ones;
        None if there is none.

        Opens the local ones only here: they are checked against the checkpoints.
        """
        with self._context.sessions.during(TimePart.RESTORING):
            newest = self._checkpoints.newest() if self._checkpoints else None
            if newest:
                check_same_run(self._folder, newest.position.step, newest.run_id)
            self._local = self._open_local_checkpoints()
        if not (newest or (self._local and self._local.states)):
            self._begin_without_local_state()
        local = self._local.states[0].record if self._local and self._local.states else None
        # Of two states of one step the local one is nearer.
        if local and (newest is None or local.position.step >= newest.position.step):
            return local
        return newest

    def _restore(self, planned: Planned[B]) -> tuple[Restored | None, str]:
        """Returns the newest state that is whole, and which checkpoints hold it."""
        if not self._checkpoints:
            return None, ""
        abstract, make = planned.abstract, planned.executable
        if self._local:
            for state in self._local.states:
                if newer := self._checkpoints.restore(abstract, make, after=state.step):
                    return newer, IN_RUN_DIR
                if restored := self._local.restore(state, abstract, make):
                    return restored, LOCAL
        restored = self._checkpoints.restore(abstract, make)
        return restored, IN_RUN_DIR if restored else ""

    def _begin_without_local_state(self) -> bool:
        """Checks that a run with local checkpoints may begin at step 0, and empties its folder as
        configured.

        Where checkpoints in `run_dir` are damaged, the lines are kept beside them instead.

        Returns:
          Whether the folder was emptied.

        Raises:
          ConfigError: states that cannot be used stand for the lines of the run.
        """
        if not self._local or self._has_set_aside:
            return False
        if not self._context.begin_without_local_state(self._local.lost):
            return False
        # Both had read the folder before it was emptied, and the run has another id now.
        self._checkpoints = self._open_checkpoints()
        self._local = self._open_local_checkpoints()
        return True

    @property
    def _has_set_aside(self) -> bool:
        return self._checkpoints is not None and self._checkpoints.has_set_aside

    def _refuse_fork_without_state(self) -> None:
        fork = self._context.identity.forked_from
        if fork is None:
            return
        if not self._checkpoints:
            raise self._config.fault(
                "enable_checkpointing", "true in a fork, which goes on from its checkpoint", "true"
            )
        raise ConfigError(
            f"{self._config.run_dir}: was forked from {fork['run']} at step {fork['step']}, and "
            "none of its checkpoints is whole; remove this folder, and fork again"
        )

    def _open_checkpoints(self) -> Checkpoints | None:
        if not self._config.enable_checkpointing:
            return None
        opened = self._opened
        checkpoints = Checkpoints(
            self._folder.path,
            self._config.max_num_checkpoints_to_keep,
            {"data": dict(opened.data.identity), "model": dict(opened.model.identity)},
            warn,
            opened.data.num_loading_hosts,
            self._context.identity.run_id,
            self._config.keep_best_checkpoint,
            on_commit=self._context.sessions.saved,
            forked_from=self._context.identity.forked_from,
            holes=opened.data.holes,
        )
        return self._context.stack.enter_context(closing(checkpoints))

    def _open_local_checkpoints(self) -> LocalCheckpoints | None:
        directory = self._config.local_checkpoint_directory
        if not (self._checkpoints and directory):
            return None
        # late, so that a run without them does not load their modules
        from maxbatch.run.weights.local_checkpoints import LocalCheckpoints

        local = LocalCheckpoints(
            directory, self._folder.path, self._context.identity, self._checkpoints, warn
        )
        return self._context.stack.enter_context(closing(local))

    def _pin_origin(self, newest: CheckpointRecord | None) -> FirstParameters:
        """Returns the first parameters of the run, from the source that its newest state records;
        later checkpoints record it too.
        """
        key, path = self._opened.source
        open_at = open_state if key == "load_full_state_path" else open_source
        origin = RunOrigin(open_at, key, path, self._folder.path, newest)
        if self._checkpoints:
            self._checkpoints.origin = origin
        return FirstParameters(origin, self._config.model)

    def _first_position(self, parameters: FirstParameters) -> Position:
        """Returns the position that a new run begins at: 0, or where a MaxText run stood whose
        state it takes over.
        """
        source = parameters.origin.source() if self._config.load_full_state_path else None
        if not isinstance(source, ForeignState):
            self._refuse_start_samples()
            return Position()
        start = self._config.start_samples
        return position_taken_over(
            self._config.plan,
            None if start is None else int(start),
            source,
            lambda: self._opened.plan(NEW_RUN).plan,
        )

    def _refuse_start_samples(self) -> None:
        if self._config.start_samples is not None:
            raise self._config.fault(
                "start_samples", "null unless load_full_state_path names a state of MaxText", "null"
            )
