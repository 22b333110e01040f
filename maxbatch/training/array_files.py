"""Arrays on disk, written and read by Orbax, and the causes of its errors."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

_DAMAGED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # a file is missing, or is something else


def arrays_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns a handler that writes each shard from one of its replicas.

    Slicing a shard over all its replicas, which is Orbax's default, would compile during training.
    """
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def restore_as(abstract: Any) -> ocp.args.PyTreeRestore:
    """Returns Orbax's request for arrays that are placed as `abstract` says."""
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    return ocp.args.PyTreeRestore(abstract, restore_args=restore_args)


@contextlib.contextmanager
def plain_path(folder: Path) -> Iterator[Path]:
    """Yields a path to a folder that Orbax and TensorStore do not misread.

    They take `[` for a pattern, `\\` for a separator and `gs:` for a scheme, wherever it stands in a path; such a
    folder is reached through a link.
    """
    if not re.search(r"[][*?\\:]", str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="maxbatch-") as temporary:
        link = Path(temporary, "link")
        link.symlink_to(folder, target_is_directory=True)
        yield link


def os_error(error: Exception) -> OSError | None:
    """Returns the system's error behind a failed read or write; None if a file is missing or its content is bad.

    TensorStore raises ValueError and names the system's error in its text.
    """
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        error = OSError(int(code[1]), os.strerror(int(code[1])))
    return error if isinstance(error, OSError) and error.errno not in _DAMAGED else None


def reason(error: Exception) -> str:
    """Returns the first line of an error, or its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
