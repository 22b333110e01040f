"""Paths that a config or an argument names: which are of this machine, which of a store, which name a mixture."""

from __future__ import annotations

import glob
import re

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)")
_NOT_YET = ("gs", "s3")
_MIXTURE_FILES = (".yml", ".yaml", ".json")


def local_fault(path: str) -> str | None:
    """Returns the rule that a path of another place than this machine breaks; None for a path of this machine."""
    scheme = _URL.match(path.strip())
    if scheme is None:
        return None
    later = " yet" if scheme[1].lower() in _NOT_YET else ""
    return f"a local path ({scheme[1]}:// is not supported{later})"


def data_fault(paths: str) -> str | None:
    """Returns the rule that paths of data joined by ";" break: a scheme is one that fsspec reads."""
    urls = (_URL.match(path.strip()) for path in paths.split(";"))
    schemes = [url[1] for url in urls if url and url[2]]
    if schemes:
        import fsspec  # late: only such paths need it

        for scheme in schemes:
            if scheme not in fsspec.available_protocols():
                return f"a local path or a URL that fsspec reads, such as gs:// or s3:// ({scheme}:// is unknown)"
    return None


def is_mixture_file(path: str) -> bool:
    """Returns whether a dataset path names a file that lists the sources of a mixture."""
    return path.lower().endswith(_MIXTURE_FILES) and not glob.has_magic(path) and ";" not in path
