"""The folder of tokenised data. Imports nothing slow, so that a plan can tell at once that nothing is cached."""

from __future__ import annotations

import os
from pathlib import Path

from ml_collections import ConfigDict

from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError, TrainingError, cannot_write
from maxbatch.system.storage import user_cache


def cache_folder(config: ConfigDict) -> Path:
    """Returns the folder of all stores: in `data_cache_dir`, else XDG_CACHE_HOME/maxbatch, else ~/.cache/maxbatch."""
    if config.data_cache_dir:
        return Path(os.path.expanduser(config.data_cache_dir)) / "tokens"
    return user_cache() / "tokens"


def cannot_write_cache(config: ConfigDict, path: Path, error: OSError) -> ConfigError | TrainingError:
    """Returns what to raise where tokenised data, or what is computed from them, could not be written."""
    where = f"data_cache_dir={shown(repr(config.data_cache_dir))}: {path}"
    return cannot_write(where, error, "data_cache_dir=/a/writable/folder puts it elsewhere")
