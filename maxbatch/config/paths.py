"""The folder of configs, and rules for paths in configs and arguments: local paths, object stores,
and mixtures.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from maxbatch.system.storage.storage import is_remote, scheme_of, url_fault

# Linux's PATH_MAX, its closing zero included, and NAME_MAX
_MOST_BYTES, _MOST_NAME_BYTES = 4096, 255
_MIXTURE_FILES = (".yml", ".yaml", ".json")


def configs_dir() -> Path:
    """Returns the folder of base.yml and models/: inside an installed package, at the top of a
    checkout.
    """
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "configs"
    return checkout if (checkout / "base.yml").is_file() else package / "configs"


def presets() -> dict[str, Path]:
    """Returns the files of the presets by name, in the order of their names."""
    return {path.stem: path for path in sorted((configs_dir() / "models").glob("*.yml"))}


def local_fault(path: str) -> str | None:
    """Returns the rule broken by a path that is not local; None for a local path."""
    if url_fault(path) or is_remote(path):
        return f"a local path ({path.strip().partition(':')[0]}:// is not supported here)"
    return _too_long(path)


def place_fault(path: str, may_hold_pattern: bool = False) -> str | None:
    """Returns the rule broken by a path that is neither local nor in an object store, or None.

    `may_hold_pattern`: the path may name several files, as in `gs://bucket/*.jsonl`.
    """
    return url_fault(path, may_hold_pattern) or (None if is_remote(path) else _too_long(path))


def _too_long(path: str) -> str | None:
    """Returns the rule broken by a path too long for a local file system, or None."""
    names = os.fsencode(path).split(b"/")
    is_short = (
        sum(map(len, names)) + len(names) <= _MOST_BYTES
        and max(map(len, names)) <= _MOST_NAME_BYTES
    )
    return (
        None
        if is_short
        else f"a path of at most {_MOST_BYTES:,} bytes, {_MOST_NAME_BYTES} between slashes"
    )


def data_fault(paths: str) -> str | None:
    """Returns the rule broken by one of several data paths, which are joined by ";" or in a
    mapping.
    """
    texts = re.findall(r"[^\s{},\"']+", paths) if is_staged(paths) else paths.split(";")
    urls = [path.strip() for path in texts if scheme_of(path)]
    return next(filter(None, (place_fault(url, may_hold_pattern=True) for url in urls)), None)


def is_staged(paths: str) -> bool:
    """Returns whether a dataset path is a mapping of positions to mixtures, in braces."""
    return paths.lstrip().startswith("{")


def is_mixture_file(path: str, dataset_type: str) -> bool:
    """Returns whether a dataset path names a file that lists the sources of a mixture; of `json`
    only YAML does.
    """
    suffixes = tuple(suffix for suffix in _MIXTURE_FILES if suffix != f".{dataset_type}")
    return path.lower().endswith(suffixes) and not glob.has_magic(path) and ";" not in path
