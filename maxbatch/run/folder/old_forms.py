"""Forms of maxbatch 0.4 and before, which version 0.5.0 was the last to read.

That version wrote none of them, so a run that it has continued is read like any other. A form is
known by its files and fields, not by a version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from maxbatch.run.folder.position import CheckpointRecord, last_saved
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.storage import AnyPath

_ORBAX_CHECKPOINT = "_CHECKPOINT_METADATA"  # beside the items of a checkpoint that Orbax wrote
_ORBAX_ARRAYS = ("_METADATA", "manifest.ocdbt", "d")  # in its items
_AHEAD, _AHEAD_JSON = "ahead", "metadata"
_BASE = "base"  # in the model's identity of adapters: the adapted model


def old_form(path: object, sign: str) -> ConfigError:
    """Returns the error for a file or folder in an old form; `sign` is what tells the form."""
    return ConfigError(
        f"{path}: is in a form of maxbatch 0.4 or before ({sign}), which this version does not "
        "read; maxbatch==0.5.0 still reads it, and what that version saves is read here"
    )


def is_old(checkpoint: AnyPath) -> bool:
    """Returns whether Orbax wrote a checkpoint."""
    return (checkpoint / _ORBAX_CHECKPOINT).exists()


def refuse_old(checkpoint: AnyPath, names: Collection[str]) -> None:
    """Raises ConfigError for a checkpoint whose files are in an old form.

    Args:
      names: the names of its entries.
    """
    if _ORBAX_CHECKPOINT in names:
        raise old_form(checkpoint, "Orbax wrote the arrays")
    if _AHEAD in names:
        refuse_old_ahead(checkpoint / _AHEAD)


def refuse_old_ahead(item: AnyPath) -> None:
    """Raises ConfigError if the responses that a checkpoint holds in a folder are text in JSON."""
    if (item / _AHEAD_JSON).is_file():
        raise old_form(item.parent, "responses sampled ahead are JSON")


def refuse_old_arrays(item: AnyPath) -> None:
    """Raises ConfigError if Orbax wrote the arrays of a checkpoint's item, such as `params`."""
    if any((item / name).exists() for name in _ORBAX_ARRAYS):
        raise old_form(item.parent, "Orbax wrote the arrays")


def refuse_old_record(checkpoint: AnyPath, record: CheckpointRecord) -> None:
    """Raises ConfigError for a record whose adapters identify their model in the old way."""
    if record.origin is None and _BASE in record.identity["model"]:
        raise old_form(checkpoint, "a part of the adapted model is its identity")


def refuse_old_checkpoint(checkpoint: AnyPath) -> None:
    """Raises what `refuse_old` does."""
    names: set[str] = set()
    with reading(checkpoint), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = {entry.name for entry in checkpoint.iterdir()}
    refuse_old(checkpoint, names)


def refuse_old_run(run_dir: AnyPath) -> None:
    """Raises ConfigError for a run whose newest checkpoint is in an old form."""
    if (step := last_saved(run_dir)) is not None:
        refuse_old_checkpoint(run_dir / "checkpoints" / str(step))
