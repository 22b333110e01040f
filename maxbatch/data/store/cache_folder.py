"""The folder of tokenised data. Imports nothing slow, so that a plan can tell at once that nothing is cached."""

from __future__ import annotations

import os
from pathlib import Path

from ml_collections import ConfigDict

from maxbatch.system.storage import user_cache


def cache_folder(config: ConfigDict) -> Path:
    """Returns the folder of all stores: in `data_cache_dir`, else XDG_CACHE_HOME/maxbatch, else ~/.cache/maxbatch."""
    if config.data_cache_dir:
        return Path(os.path.expanduser(config.data_cache_dir)) / "tokens"
    return user_cache() / "tokens"
