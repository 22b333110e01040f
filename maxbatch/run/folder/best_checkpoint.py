"""`checkpoints/best`: a small file that names the checkpoint with the lowest eval loss; no JAX.

A path `RUN/checkpoints/best` is that checkpoint wherever a checkpoint is named. It is a file, not a
link, since a store has no links; readers of the folders of `checkpoints/` do not see it.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from maxbatch.run.folder.json_file import checked, read_json
from maxbatch.run.folder.position import is_committed
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath

BEST = "best"  # in `checkpoints/`
_FORM = {"step": int, "eval_loss": float, "is_extra": bool}


class BestCheckpoint(NamedTuple):
    """The content of `checkpoints/best`."""

    step: int
    eval_loss: float
    is_extra: bool  # saved for its eval loss alone, so that it goes once another one is better

    def to_bytes(self) -> bytes:
        """Returns the content of the file, JSON."""
        return json.dumps(self._asdict()).encode()


def read_best(checkpoints: AnyPath) -> BestCheckpoint | None:
    """Returns the content of the file in a run's `checkpoints/`; None if there is none.

    Raises:
      ConfigError: its content is invalid.
    """

    def parse(fields: dict[str, object]) -> BestCheckpoint:
        step, eval_loss, is_extra = (
            checked(fields, _FORM)[name] for name in BestCheckpoint._fields
        )
        return BestCheckpoint(step, float(eval_loss), is_extra)

    file = checkpoints / BEST
    return (
        read_json(file, "remove it, and name a checkpoint by its step", parse)
        if file.is_file()
        else None
    )


def names_best(path: AnyPath) -> bool:
    """Returns whether a path is `RUN/checkpoints/best`, and not a folder of that name."""
    return path.name == BEST and path.parent.name == "checkpoints" and not path.is_dir()


def find_best(path: AnyPath) -> AnyPath:
    """Returns the folder of the checkpoint that `RUN/checkpoints/best` names.

    Raises:
      ConfigError: there is none.
    """
    checkpoints = path.parent
    best = read_best(checkpoints)
    if best is None:
        raise ConfigError(
            f"{path}: the run has no best checkpoint: nothing was held out, or "
            f"keep_best_checkpoint=false; works: {checkpoints.parent} (its newest)"
        )
    folder = checkpoints / str(best.step)
    if not (folder.is_dir() and is_committed(folder)):
        raise ConfigError(
            f"{path}: names the checkpoint of step {best.step}, which is not there; put it back, "
            "or name another one"
        )
    return folder
