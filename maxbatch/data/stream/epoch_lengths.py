"""The samples of an epoch, cached when a dataset was last opened.

Plans read them here, since the stream needs NumPy, and its import takes as long as a plan.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from maxbatch.config.combined import StreamConfig
from maxbatch.config.hub import folder_of
from maxbatch.config.keys import Fixes
from maxbatch.config.sections import STORES, names_fixing
from maxbatch.data.store.cache_folder import cache_file, keep, recall
from maxbatch.data.store.documents import DocumentSource
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.contents import content_stamp
from maxbatch.system.storage.storage import is_remote

_VERSION = 3  # version of the cut of documents into rows
_FIXING = [
    name
    for name in names_fixing((Fixes.STREAM & ~Fixes.ORDER) | Fixes.CONTENT)
    if name != "deduplicate"
]


def remembered_length(config: StreamConfig) -> int | None:
    """Returns the samples of an epoch of a single source, or None if not cached."""
    # opening the dataset reports the fault
    with contextlib.suppress(ConfigError, OSError, ValueError):
        if _is_made_here(config) and type(number := recall(_path(config))) is int:
            return number
    return None


def remember_length(config: StreamConfig, num_samples: int) -> None:
    """Caches the samples of an epoch, unless the cache is read-only."""
    with contextlib.suppress(OSError):
        if _is_made_here(config):
            keep(_path(config), num_samples)


def _is_made_here(config: StreamConfig) -> bool:
    """Returns whether an epoch comes from the local files of `dataset_path`; those of a store take
    requests to list.
    """
    # Without duplicates it also depends on the held-out files.
    made_otherwise = (
        config.recipe.has_answers
        or config.deduplicate
        or config.dataset_type in ("synthetic", *STORES)
    )
    paths = (config.tokenizer_path, *f"{config.dataset_path};{config.eval_dataset_path}".split(";"))
    return not made_otherwise and not any(map(is_remote, paths))


def _path(config: StreamConfig) -> Path:
    """Returns the cache file for the dataset's files and all settings that determine its rows."""
    source = DocumentSource.from_config(config)
    settings = {name: config[name] for name in _FIXING}
    facts = [
        _VERSION,
        source.files,
        source.missing_shards,
        _tokenizer_files(config.tokenizer_path),
        settings,
    ]
    return cache_file(config.data_cache_dir, "epoch-lengths", facts)


def _tokenizer_files(tokenizer_path: str) -> list[tuple[str, object]]:
    """Returns the paths of a tokenizer's files, with stamps that change with their content."""
    if not tokenizer_path:
        return []
    path = Path(str(folder_of(tokenizer_path)))
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(str(file), content_stamp(file)) for file in files]
