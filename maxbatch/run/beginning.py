"""A start without a state to resume from: whether the run may begin at step 0 in its folder.

Lines of `metrics.jsonl` that a checkpoint stands for are never cut, unless the config states
`overwrite_run`.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from maxbatch.config.pins import read_written
from maxbatch.config.sections import CheckpointConfig
from maxbatch.run.folder.foreign import new_folder
from maxbatch.run.folder.metrics import METRICS_FILE, parse_line, read_lines
from maxbatch.run.folder.position import DamagedError, last_saved, read_record
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.run.folder.sessions import UNKNOWN_STEP, read_sessions, saved_of
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath
from maxbatch.system.terminal.folding import counted

if TYPE_CHECKING:
    from maxbatch.run.weights.local_files import LostState

# files that begin a phrase about checkpoints that are not there
_SPOKEN = ("sessions.jsonl", METRICS_FILE)
_OVERWRITES = "overwrite_run=true removes the lines and checkpoints of this run"


def check_beginning(
    folder: RunFolder, config: CheckpointConfig, lost: LostState | None = None
) -> bool:
    """Checks that a run may begin at step 0, where it has nothing to resume from; the host that
    writes calls it.

    Args:
      lost: the newest local checkpoint, if none can be used.

    Returns:
      Whether `overwrite_run` is needed for it.

    Raises:
      ConfigError: states stand for the lines of the run, and the config does not state
        `overwrite_run`.
    """
    why = _states_at_stake(folder, config)
    if why is None and not (lost and lost.step <= last_line(folder.path)):
        return False
    if config.overwrite_run:
        return True
    other = f"run_dir={shlex.quote(new_folder(folder.run_dir))}"
    if why is None:
        assert lost is not None, "it stands for lines"
        raise ConfigError(
            f"run_dir={folder.run_dir}: its only state, the local checkpoint of step {lost.step}, "
            f"cannot be used ({lost.why}), so this start would begin at step 0 and cut the lines; "
            f"{_OVERWRITES}; works: {other}, or overwrite_run=true"
        )
    if config.enable_checkpointing or why.startswith(_SPOKEN):
        raise ConfigError(
            f"run_dir={folder.run_dir}: {why} and there is none, so this start would begin at "
            f"step 0 and cut the lines; mount checkpoints/ or put it back; {_OVERWRITES}; works: "
            f"{other}, or overwrite_run=true"
        )
    raise ConfigError(
        f"enable_checkpointing=false: {why} in run_dir={folder.run_dir}, and a start without "
        "checkpointing begins at step 0 and cuts the lines; enable_checkpointing=true resumes, "
        f"{_OVERWRITES}; works: {other}, or enable_checkpointing=true, or overwrite_run=true"
    )


def check_same_run(folder: RunFolder, step: int, run_id: str | None) -> None:
    """Raises ConfigError if the newest checkpoint is of another run than the lines beside it; all
    hosts may call it.
    """
    if folder.identity is None or folder.identity.wrote(run_id) or not last_line(folder.path):
        return
    other = f"run_dir={shlex.quote(new_folder(folder.run_dir))}"
    state = shlex.quote(f"{folder.run_dir.rstrip('/')}/checkpoints/{step}")
    raise ConfigError(
        f"run_dir={folder.run_dir}: its checkpoint of step {step} is of another run than "
        f"{METRICS_FILE} and run.json; move one of them away; works: {other}, or {other} "
        f"load_full_state_path={state}"
    )


def last_line(run_dir: AnyPath) -> int:
    """Returns the greatest step of the lines of `metrics.jsonl`; 0 if there are none."""
    records = filter(None, map(parse_line, read_lines(run_dir / METRICS_FILE)))
    return max((record["step"] for record in records), default=0)


def _states_at_stake(folder: RunFolder, config: CheckpointConfig) -> str | None:
    """Returns the states that stand for the run's lines, in words; None if there are none."""
    newest = last_saved(folder.path)
    if newest is not None:
        _refuse_of_another_run(folder, newest)
        return f"there is a checkpoint of step {newest}"
    saved = saved_of(read_sessions(folder.path))
    if saved is None:
        return _local_state(folder.path, config)
    if saved != UNKNOWN_STEP:
        return f"sessions.jsonl states a checkpoint of step {saved}"
    written, last = read_written(folder.path / "config.yml"), last_line(folder.path)
    if (
        written is None
        or not written.checkpoint.enable_checkpointing
        or last <= written.checkpoint.checkpoint_period
    ):
        return None
    period = counted(written.checkpoint.checkpoint_period, "update")
    return (
        f"{METRICS_FILE} has {counted(last, 'update')} of a run that saves a checkpoint every "
        f"{period}"
    )


def _local_state(run_dir: AnyPath, config: CheckpointConfig) -> str | None:
    """Returns the local checkpoint that a start without checkpointing would make useless; None if
    there is none.
    """
    written = read_written(run_dir / "config.yml")
    if (
        config.enable_checkpointing
        or written is None
        or not written.checkpoint.local_checkpoint_directory
    ):
        return None
    from maxbatch.run.weights.local_files import saved_here

    step = saved_here(written.checkpoint.local_checkpoint_directory, run_dir)
    return None if step is None else f"there is a local checkpoint of step {step}"


def _refuse_of_another_run(folder: RunFolder, step: int) -> None:
    try:
        record = read_record(folder.path / "checkpoints" / str(step))
    except DamagedError:
        return
    check_same_run(folder, step, record.run_id)
