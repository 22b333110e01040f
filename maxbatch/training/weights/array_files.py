"""Arrays on disk and in object stores, written and read by Orbax, and the causes of its errors."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from maxbatch.system.object_stores import kvstore, refusal
from maxbatch.system.storage import AnyPath, is_remote
from maxbatch.system.stores import STORES
from maxbatch.training.weights.orbax_files import let_failed_arrays_end_quietly, let_orbax_wait_for_stores

T = TypeVar("T")

_DAMAGED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # a file is missing, or is something else
OTHER_ARRAYS = "tree structures do not match"  # Orbax, where the arrays are not those that were asked for


def arrays_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns a handler that writes each shard from one of its replicas.

    Slicing a shard over all its replicas, which is Orbax's default, would compile during training.
    """
    let_failed_arrays_end_quietly()
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def restore_as(abstract: Any, partial: bool = False) -> ocp.args.PyTreeRestore:
    """Returns Orbax's request for arrays that are placed as `abstract` says; `partial`: there may be others."""
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    return ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=partial)


@functools.cache
def let_orbax_reach_stores() -> None:
    """Teaches Orbax the place of every store: it knows their commit protocol, but names only gs:// to TensorStore.

    Orbax has no public way to say it; it asks these two functions for the place of every array (0.12.8).
    """
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    # By here its own normalisation has made one slash of two after any scheme but gs.
    tensorstore_utils._use_gcs_driver = lambda folder: folder.partition(":/")[0] in STORES
    gcs_utils.get_kvstore_for_gcs = kvstore
    let_orbax_wait_for_stores()


@contextlib.contextmanager
def plain_path(folder: AnyPath) -> Iterator[Path]:
    """Yields a path to a folder that Orbax and TensorStore do not misread.

    They take `[` for a pattern, `\\` for a separator and `gs:` for a scheme, wherever it stands in a path; such a
    folder is reached through a link.
    """
    if is_remote(folder):
        let_orbax_reach_stores()
        yield epath.Path(str(folder))
        return
    if not re.search(r"[][*?\\:]", str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="maxbatch-") as temporary:
        link = Path(temporary, "link")
        link.symlink_to(folder, target_is_directory=True)
        yield link


def os_error(error: Exception, path: AnyPath) -> OSError | None:
    """Returns the system's error behind a failed read or write; None if a file is missing or its content is bad.

    TensorStore raises ValueError and names the system's error in its text.
    """
    if is_remote(path):
        return refusal(error, str(path))
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        error = OSError(int(code[1]), os.strerror(int(code[1])))
    if isinstance(error, FileNotFoundError):  # Orbax raises it without a number
        return None
    return error if isinstance(error, OSError) and error.errno not in _DAMAGED else None


def reason(error: Exception) -> str:
    """Returns the first line of an error, or its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
