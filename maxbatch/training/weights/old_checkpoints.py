"""Checkpoints of versions before this one, which the next release does not read: arrays that Orbax
wrote, and JSON of batches ahead.

Orbax reads a folder of this machine: a link to it, since Orbax takes `[`, `\\` and `gs:` in a path
for a pattern, a separator and a scheme; or a copy, if it is in a bucket.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from maxbatch.parallel.trees import TreeOf
from maxbatch.runs.position import DamagedError
from maxbatch.system.bounded import read_json
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.storage import AnyPath, fetch_tree, is_remote
from maxbatch.training.weights.shard_files import DAMAGED, OTHER_ARRAYS

_MOST_AHEAD_BYTES = 4 << 30
_MARKS = ("_METADATA", "manifest.ocdbt", "d")
# Orbax's message if the stored arrays differ from the requested ones
_OTHER = "tree structures do not match"


def is_old(item: AnyPath) -> bool:
    """Returns whether Orbax wrote an item's arrays."""
    return any((item / name).exists() for name in _MARKS)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Filters errors that Orbax logs besides raising them."""
    return "orbax" not in record.pathname


@contextlib.contextmanager
def _here(item: AnyPath) -> Iterator[Path]:
    logging.getLogger("absl").addFilter(_is_not_of_orbax)
    with tempfile.TemporaryDirectory(prefix="maxbatch-") as temporary:
        here = Path(temporary, "item")
        if is_remote(item):
            fetch_tree(item, here)
        else:
            here.symlink_to(str(item), target_is_directory=True)
        yield here


def read_old(item: AnyPath, abstract: TreeOf, partial: bool) -> TreeOf:
    """Reads arrays onto the shardings of `abstract`; `partial`: there may be others.

    Raises:
      DamagedError: they are damaged, or others.
      OSError, ConfigError, TrainingError: the system or the store refuses the read.
    """
    import orbax.checkpoint as ocp

    hosts = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
    args = ocp.args.PyTreeRestore(
        abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=partial,
    )
    try:
        with _here(item) as here:
            found: TreeOf = ocp.PyTreeCheckpointHandler(multiprocessing_options=hosts).restore(
                here, args=args
            )
            return found
    except (MemoryError, jax.errors.JaxRuntimeError, ConfigError, TrainingError):
        raise
    except Exception as error:  # damaged files can raise anything
        # TensorStore's ValueError for a system's error
        if code := re.search(r"os_error_code='(\d+)'", str(error)):
            error = OSError(int(code[1]), os.strerror(int(code[1])))
        if isinstance(error, OSError) and error.errno and error.errno not in DAMAGED:
            raise error from None
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DamagedError(f"{OTHER_ARRAYS} ({said})" if _OTHER in said else said) from error


def old_ahead(file: AnyPath) -> tuple[bytes, bytes]:
    """Reads what a checkpoint holds for the batches ahead.

    Returns:
      It, and the text that the checkpoint's record has the hash of; both are empty if the file is
      missing or damaged.
    """
    try:
        text = read_json(file, str(file), most_bytes=_MOST_AHEAD_BYTES)["ahead"]
        return base64.b64decode(text), text.encode()
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return b"", b""
