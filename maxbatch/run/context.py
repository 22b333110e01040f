"""The parts of a run that its task and its session share: its folder, its clock, its console, its
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import jax

from maxbatch.config.config import Config
from maxbatch.data.store.cache_folder import cache_folder
from maxbatch.parallel.hosts import broadcast, is_first
from maxbatch.run.agreement import share_folder
from maxbatch.run.beginning import check_beginning, last_line
from maxbatch.run.compile.background import Background, compile_here
from maxbatch.run.compile.cache import use_persistent_cache
from maxbatch.run.compile.flags import program_options
from maxbatch.run.folder.position import last_saved
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.run.folder.sessions import SessionLog, leave_sessions
from maxbatch.run.record.loggers import check_loggers
from maxbatch.run.record.own_end import OwnEnd
from maxbatch.run.signals import StopRequest
from maxbatch.system.hardware.versions import computing_versions
from maxbatch.system.processes.command_start import command_text, take_start
from maxbatch.system.storage.watched_files import watching
from maxbatch.system.terminal.terminal import TrainingConsole

if TYPE_CHECKING:
    from maxbatch.run.weights.local_files import LostState


class RunContext:
    """The parts of a run that its task and its session share.

    Args:
      stack: closes the files and threads of the run.

    Raises:
      ConfigError: the folder or a logger cannot be used; nothing is written before.
    """

    def __init__(self, config: Config, devices: Sequence[jax.Device], stack: ExitStack) -> None:
        self.config, self.devices, self.stack = config, devices, stack
        use_persistent_cache(
            config.compilation_cache_dir, cache_folder(config.data_cache_dir, "xla")
        )
        if is_first():
            check_loggers(config.log_to)
        self.console = TrainingConsole(quiet=not is_first())
        started = take_start()
        self.folder = stack.enter_context(RunFolder(config.run_dir, writes=is_first()))
        self.lines_cut = 0  # updates whose lines this start cuts, since no state stands for them
        # else a local state may go on
        if not (config.enable_checkpointing and config.local_checkpoint_directory):
            self._take_folder()
        self.identity = share_folder(self.folder)
        # before the line of the session exists: a signal that ends the process also ends the line
        self.stop = StopRequest()
        self.stop.record_end = leave_sessions
        self.stop.end_unless_saving(self._leave)
        stack.enter_context(self.stop)
        facts = computing_versions(), command_text()
        log = SessionLog(
            self.folder, started, jax.process_count(), len(devices), is_first(), *facts
        )
        self.sessions = stack.enter_context(log)
        stack.enter_context(watching())
        self.background = stack.enter_context(Background())
        self.own_end = OwnEnd()

    def _leave(self, signal_name: str) -> None:
        """Ends the session's line and frees the folder, for a process that a signal ends before its
        first update.
        """
        leave_sessions(signal_name)
        self.folder.leave()

    def _take_folder(self, lost: LostState | None = None) -> bool:
        """Refuses a start that would begin anew over lines that states stand for, or removes both
        as configured.

        Args:
          lost: the newest local state, if none can be used.

        Returns:
          Whether they were removed.
        """

        def look() -> tuple[bool, int]:
            if (
                self.config.enable_checkpointing and last_saved(self.folder.path) is not None
            ) or self.folder.forked_from:
                return False, 0
            overwrites, cut = (
                check_beginning(self.folder, self.config.checkpoint, lost),
                last_line(self.folder.path),
            )
            if overwrites:
                self.folder.discard_run()
            return overwrites, cut

        overwrites, self.lines_cut = broadcast(look)
        return bool(overwrites)

    def begin_without_local_state(self, lost: LostState | None) -> bool:
        """Checks the folder as `_take_folder` does where no local state can be used; returns
        whether it was emptied.
        """
        if not self._take_folder(lost):
            return False
        self.identity = share_folder(self.folder)
        self.sessions.begin_anew()
        return True

    def executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Compiles a program for the devices, with the compiler's flags of the config."""
        return compile_here(
            name, lower, program_options(self.config.libtpu_flags, self.devices, name)
        )

    @property
    def source(self) -> tuple[str, str]:
        """The config key and the path of the source of the first parameters; an empty path if they
        are made.
        """
        keys = ("load_full_state_path", "load_parameters_path")
        return next(
            ((key, self.config[key]) for key in keys if self.config[key]), ("init_weights_seed", "")
        )
