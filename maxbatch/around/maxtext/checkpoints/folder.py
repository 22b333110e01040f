"""The folder of a MaxText checkpoint, which Orbax wrote: where it is, which step it is of, what it
lists.

A run of MaxText has `checkpoints/STEP/items`; a checkpoint of parameters alone has the same files
without `STEP`. Layout of the files:
https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html.
"""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from typing import NamedTuple

from maxbatch.config.values import shown_path
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.bounded import read_json
from maxbatch.system.storage.storage import AnyPath, as_path, subfolders

METADATA = "_METADATA"  # of a tree of arrays: its names and its format
_ITEMS = "items"  # the tree of arrays in a checkpoint of several items
_CHECKPOINT = "_CHECKPOINT_METADATA"  # beside the items
_OWN_ITEM = "position"  # in our checkpoints alone
_EMERGENCY = "process_metadata"  # of a checkpoint that each host wrote for itself


class ItemsFolder(NamedTuple):
    """A tree of arrays on disk or in an object store."""

    path: AnyPath
    stated: str  # "key=path" as the config states it, for messages
    # the number of its folder, the updates before the last; None in a folder without one
    folder_step: int | None
    names: frozenset[str]  # of its arrays, parts joined by dots
    uses_ocdbt: bool  # whether one key-value store holds all arrays
    uses_zarr3: bool  # whether the arrays are zarr 3, not zarr 2


def is_maxtext(path: str | Path) -> bool:
    """Returns whether a path is a MaxText run, one of its checkpoints, or that checkpoint's
    items.
    """
    folder = as_path(path)
    return _is_checkpoint(folder) or _newest(folder) is not None


def open_items(path: str, key: str) -> ItemsFolder:
    """Finds the arrays of a checkpoint: of the named one, or of a run's newest.

    Args:
      path: a run of MaxText, its `checkpoints`, `checkpoints/STEP`, or `checkpoints/STEP/items`.
      key: the config key that states the path, for messages.

    Raises:
      ConfigError: there is no whole checkpoint, or it has another form.
    """
    where = f"{key}={shown_path(path)}"
    folder = as_path(path).absolute()
    if not _is_checkpoint(folder):
        newest = _newest(folder)
        if newest is None:
            raise ConfigError(
                f"{where}: no MaxText checkpoint here; give checkpoints/STEP of a MaxText run"
            )
        folder = newest
    if (folder / _EMERGENCY).exists():
        raise ConfigError(
            f"{where}: is an emergency checkpoint, which holds one host's shards; give one that "
            "all hosts wrote"
        )
    items = folder if (folder / METADATA).is_file() else folder / _ITEMS
    step_folder = items.parent if items.name == _ITEMS else items
    step = int(step_folder.name) if step_folder.name.isdigit() else None
    if not (items / METADATA).is_file():
        raise ConfigError(
            f"{where}: {shown_path(folder)} has no {_ITEMS}/{METADATA}; it is not a whole "
            "checkpoint"
        )
    return _read_metadata(items, step, where)


def _read_metadata(items: AnyPath, step: int | None, where: str) -> ItemsFolder:
    try:
        with reading(items / METADATA):
            metadata = read_json(items / METADATA, str(items / METADATA), most_bytes=256 << 20)
        entries = metadata["tree_metadata"].items()
        # Empty parts of an optimizer's state are listed too.
        paths = [
            ast.literal_eval(name)
            for name, entry in entries
            if entry["value_metadata"]["value_type"] != "None"
        ]
        names = frozenset(".".join(map(str, path)) for path in paths)
        uses_ocdbt, uses_zarr3 = metadata.get("use_ocdbt", True), metadata.get("use_zarr3", False)
        if not names or not isinstance(uses_ocdbt, bool) or not isinstance(uses_zarr3, bool):
            raise ValueError("no arrays")
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ):
        raise ConfigError(
            f"{where}: {items.name}/{METADATA} does not list the arrays of a checkpoint"
        ) from None
    return ItemsFolder(items, where, step, names, uses_ocdbt, uses_zarr3)


def _is_checkpoint(folder: AnyPath) -> bool:
    """Returns whether a folder is a checkpoint of Orbax, or its items; a half-written one is
    none.
    """
    if (folder / _OWN_ITEM).is_dir():  # maxbatch 0.4 wrote with Orbax too
        return False
    return any(
        (folder / name).is_file() for name in (METADATA, f"{_ITEMS}/{METADATA}", _CHECKPOINT)
    )


def _newest(folder: AnyPath) -> AnyPath | None:
    """Returns the newest MaxText checkpoint of a run folder, or of its `checkpoints`; None if it
    has none.

    A run of ours is known by its newest checkpoint, so that no other of its folders is asked for.
    """
    for inside in (folder / "checkpoints", folder):
        numbers: list[int] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            numbers = sorted(
                (int(name) for name in subfolders(inside) if name.isdigit()), reverse=True
            )
        for number in numbers:
            checkpoint = inside / str(number)
            if (checkpoint / _OWN_ITEM).is_dir():
                return None
            if _is_checkpoint(checkpoint):
                return checkpoint
    return None
