"""Folders of other programs in a run's `checkpoints/`, which a run never moves, renames, removes or
writes to.
"""

from __future__ import annotations

import contextlib
import os
import shlex

from maxbatch.config.values import shown
from maxbatch.run.folder.best_checkpoint import BEST, read_best
from maxbatch.run.folder.old_forms import refuse_old
from maxbatch.run.folder.position import COMMITTED_FILE, is_step
from maxbatch.system.errors import ConfigError, StoreRefused, TrainingError, reading
from maxbatch.system.storage.storage import AnyPath, as_path, is_remote, subfolders

# folders of every checkpoint of ours; a damaged one has at least one
ITEMS = ("params", "opt_state", "position")
# of ours too; a removal may have left them alone
_OTHER_NAMES = {"average", "ahead", COMMITTED_FILE}
# in a checkpoint that MaxText, or other code, wrote
_ORBAX_MARKS = ("_CHECKPOINT_METADATA", "items", "default")
_MOST_RUNS = 10_000  # numbers that are tried for the name of a new folder


def is_own(checkpoint: AnyPath) -> bool:
    """Returns whether a folder whose name is a step is a checkpoint of ours, whole or damaged.

    An empty folder counts as ours: it holds nothing of anybody else.
    """
    return _is_own(_names(checkpoint))


def _is_own(names: set[str]) -> bool:
    return any(item in names for item in ITEMS) or names <= _OTHER_NAMES


def refuse_foreign(run_dir: str) -> None:
    """Raises ConfigError if `checkpoints/` in a run's folder holds steps, or a `best`, that another
    program wrote, or if its newest checkpoint is in a form of maxbatch 0.4 or before.
    """
    folder = as_path(run_dir) / "checkpoints"
    names: list[str] = []
    with reading(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = subfolders(folder)
        _refuse_foreign_best(run_dir)
    is_newest = True
    for step in sorted(map(int, filter(is_step, names)), reverse=True):
        checkpoint = folder / str(step)
        with reading(folder):
            content = _names(checkpoint)
            if _is_own(content):
                if is_newest and (COMMITTED_FILE in content or not is_remote(checkpoint)):
                    refuse_old(checkpoint, content)
                    is_newest = False
                continue
        new = f"works: run_dir={shlex.quote(new_folder(run_dir))}"
        if content.isdisjoint(_ORBAX_MARKS):
            raise ConfigError(
                f"run_dir={run_dir}: checkpoints/{step} in it is not a checkpoint of maxbatch (it "
                f"holds {shown(min(content))}), so nothing is written beside it; move it away; "
                f"{new}"
            )
        state = shlex.quote(f"{run_dir.rstrip('/')}/checkpoints/{step}")
        raise ConfigError(
            f"run_dir={run_dir}: holds checkpoints of MaxText, which are never written to or "
            f"moved; {new} load_full_state_path={state}"
        )


def _refuse_foreign_best(run_dir: str) -> None:
    """Raises ConfigError if `checkpoints/best` is a folder, or a file whose content is not ours."""
    if why := foreign_best(as_path(run_dir) / "checkpoints"):
        raise ConfigError(
            f"run_dir={run_dir}: checkpoints/{BEST} in it is {why}, not what maxbatch writes "
            "under that name, so nothing is written over it; move it away; works: "
            f"run_dir={shlex.quote(new_folder(run_dir))}"
        )


def foreign_best(checkpoints: AnyPath) -> str:
    """Describes another program's `best` in a run's `checkpoints/`; "" if there is none."""
    file = checkpoints / BEST
    if file.is_dir():
        return "a folder"
    try:
        is_ours = read_best(checkpoints) is not None or not _is_there(file)
    except (StoreRefused, TrainingError):
        raise
    except ConfigError:
        is_ours = False
    return "" if is_ours else "a file with other content"


def new_folder(run_dir: str) -> str:
    """Returns the name of a folder that is not there, beside a run's folder."""
    names = (f"{run_dir.rstrip('/')}-{number}" for number in range(2, _MOST_RUNS))
    return next(name for name in names if not _is_there(as_path(name)))


def _is_there(path: AnyPath) -> bool:
    return path.exists() if is_remote(path) else os.path.lexists(path)


def _names(folder: AnyPath) -> set[str]:
    """Returns the names of the entries of a folder; none if it vanishes meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return {entry.name for entry in folder.iterdir()}
    return set()
