"""Models and tokenizers that a name of the Hugging Face hub states, in the cache of
`huggingface_hub` (extra `text`).

Only the files of the named model are fetched, by that package and into its cache, which also serves
without a network.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath, as_path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_SMALL = ["*.json", "*.jinja", "*.model", "merges.txt"]  # configs and tokenizers
_WEIGHTS = ["*.safetensors"]
_BELOW = "*/*"  # files in folders of a repository, which hold the model in other formats


def hub_name(path: str | os.PathLike[str]) -> str | None:
    """Returns the name `owner/name` that a path states, None for other paths.

    A file or folder of that name on this machine takes precedence. So does a folder `owner`: the
    path is then local and does not exist.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    is_name = (
        _NAME.fullmatch(text)
        and not os.path.lexists(text)
        and not os.path.isdir(text.partition("/")[0])
    )
    return text if is_name else None


def folder_of(path: str | os.PathLike[str], *, weights: bool = False) -> AnyPath:
    """Returns the folder or file at a path, or the cached folder of the hub's model of that name.

    Args:
      path: a path, or a name of the hub.
      weights: whether the tensors are needed as well; without them only configs and tokenizers are
        fetched.

    Raises:
      ConfigError: the hub has no such model, or it cannot be reached and the cache lacks it.
    """
    name = hub_name(path)
    if name is None:
        return as_path(path)
    folder = _lookup(name, weights)
    if isinstance(folder, str):
        raise ConfigError(f"{shown(name)}: {folder}")
    return folder


def hub_problem(path: str | os.PathLike[str]) -> str | None:
    """Returns why a hub name cannot be used; None if it can, or for other paths."""
    name = hub_name(path)
    folder = _lookup(name, False) if name else None
    return folder if isinstance(folder, str) else None


@functools.cache
def _lookup(name: str, weights: bool) -> Path | str:
    """Returns the folder of a model, or the reason why there is none; looked up once in a
    process.
    """
    problem = f"no such file or folder (seen from {os.getcwd()})"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return (
            f"{problem}; a name of the Hugging Face hub needs huggingface_hub, which is not "
            "installed; pip install 'maxbatch[text]'"
        )
    revision = None
    if weights:
        small = _lookup(name, False)
        if isinstance(small, str):
            return small
        revision = small.name  # of the same commit, even if the model changes meanwhile
    try:
        wanted = _SMALL + _WEIGHTS if weights else _SMALL
        folder = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=[_BELOW]
        )
    except Exception as error:  # errors of the hub, of the network and of the disk
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return f"{problem}, and the Hugging Face hub gives none of that name ({cause})"
    return Path(folder)
