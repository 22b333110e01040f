"""One door to storage: paths of this machine, of Google Cloud Storage (gs://) and of S3 (s3://), used alike.

`as_path` makes a path of a text. What it returns has pathlib's methods, wherever it lies, so the rest of the house
does not ask. A path of this machine is a `pathlib.Path` and costs what it always did.

In an object store an object appears whole or not at all, and there are no folders: one is there while an object lies
below it, and nothing needs to make it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from maxbatch.system.errors import ConfigError, StoreRefused
from maxbatch.system.object_stores import MAX_REQUESTS, SCHEMES, file_system, meaning, split
from maxbatch.system.remote_path import RemotePath

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SPECIAL = "?#*[]\\"  # clients of stores take these for a query, a version, a pattern or a slash, each its own way
_MOST_BYTES = 800  # of a name; stores end at 1,024, and a run adds names of its own


AnyPath = Path | RemotePath
T = TypeVar("T")


def scheme_of(text: str) -> str | None:
    """Returns the scheme of a URL, None for a path of this machine."""
    scheme = _URL.match(text.strip())
    return scheme[1] if scheme else None


def is_remote(text: object) -> bool:
    """Returns whether a path lies in an object store."""
    return isinstance(text, RemotePath) or scheme_of(str(text)) in SCHEMES


def url_fault(url: str, may_hold_pattern: bool = False) -> str | None:
    """Returns the rule that a gs:// or s3:// URL breaks, with a URL that keeps it; None if it breaks none.

    `may_hold_pattern`: the URL may name several objects, as in `gs://bucket/*.jsonl`.
    """
    scheme, bucket, name = split(url.strip())
    if not bucket:
        return f"a local path or a URL with a bucket, such as {scheme}://bucket/{name or 'folder'}"
    if not _BUCKET.fullmatch(bucket):
        return f"a URL whose bucket is letters, digits, '.', '_' and '-', such as {scheme}://bucket/folder"
    parts = name.removesuffix("/").split("/") if name else []
    special = "" if may_hold_pattern else _SPECIAL
    if any(part in ("", ".", "..") for part in parts):
        rule = "a URL without '//', '.' and '..' in its name"
    elif any(not letter.isprintable() or letter in special for letter in name):
        rule = f"a URL without {' '.join(special) + ' and ' if special else ''}unprintable characters"
    elif not may_hold_pattern and len(name.encode(errors="surrogatepass")) > _MOST_BYTES:
        return f"a URL whose name has at most {_MOST_BYTES} bytes"
    else:
        return None
    kept: list[str] = []
    for part in parts:
        if part == "..":
            kept = kept[:-1]
        elif part not in ("", "."):
            kept.append("".join(c if c.isprintable() and c not in special else "_" for c in part))
    return f"{rule}, such as {'/'.join([f'{scheme}://{bucket}', *kept])}"


def as_path(text: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Returns the path that a text names: absolute, `~` expanded, or an object store's.

    Raises:
      ConfigError: another scheme than gs:// and s3://, a URL that breaks a rule, or a package is missing.
    """
    if isinstance(text, RemotePath):
        return text
    text = os.fspath(text)
    scheme = scheme_of(text)
    if scheme is None:
        return Path(text).expanduser().absolute()
    if scheme not in SCHEMES:
        raise ConfigError(f"{text[:80]}: must be a local path, gs:// or s3:// ({scheme}:// is not supported)")
    if rule := url_fault(text):
        raise ConfigError(f"{text[:80]}: must be {rule}")
    file_system(scheme)  # a missing package is told here
    return RemotePath(text.strip().rstrip("/"))


def as_typed(text: str) -> AnyPath:
    """Returns the path that a text names; a relative one stays as it was typed, since it is printed."""
    return as_path(text) if is_remote(text) else Path(text)


def user_cache() -> Path:
    """Returns maxbatch's folder in the user's cache: XDG_CACHE_HOME/maxbatch, else ~/.cache/maxbatch."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "maxbatch"


def kept_here(folder: AnyPath) -> Path:
    """Returns the folder of this machine for what belongs to a folder but cannot lie in an object store: locks, files
    that grow. It is the folder itself, or one in the user's cache, which is made."""
    if isinstance(folder, Path):
        return folder
    found = user_cache() / "stores" / hashlib.blake2b(folder.url.encode(), digest_size=8).hexdigest()
    found.mkdir(parents=True, exist_ok=True)
    return found


def remove_tree(path: AnyPath) -> None:
    """Removes a folder and what lies below it, or a file; nothing where nothing is."""
    if isinstance(path, Path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        return
    paths = [found for found, _ in path.files()]
    if path.is_file():
        paths.append(path)
    _each(paths, lambda found: found.unlink(missing_ok=True))


def move_tree(source: AnyPath, target: AnyPath) -> None:
    """Moves a folder within the disk or the bucket that it lies in."""
    if isinstance(source, RemotePath) and isinstance(target, RemotePath):
        source.rename(target)
    else:
        Path(str(source)).rename(str(target))


def subfolders(folder: AnyPath) -> list[str]:
    """Returns the names of the folders that lie directly in a folder; FileNotFoundError if it is not there."""
    if isinstance(folder, RemotePath):
        return [entry.name for entry in folder.folders()]
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir()]


def copy_objects(source: RemotePath, target: RemotePath, last: str = "") -> None:
    """Copies the objects below a folder to another one, inside of the store; the one named `last` after all others."""
    names = [found.relative_to(source) for found, _ in source.files()]
    for group in ([n for n in names if str(n) != last], [n for n in names if str(n) == last]):
        _each(group, lambda name: (source / name).copy(target / name))


def _each(items: Iterable[T], do: Callable[[T], None]) -> None:
    """Makes the requests of a folder's objects side by side; raises what the first that failed raised."""
    with ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="maxbatch-objects") as pool:
        list(pool.map(do, items))


def copy_tree(source: Path, target: AnyPath, names: Sequence[str] | None = None) -> None:
    """Copies the files below a local folder, or those `names` of it, into another folder."""
    files = [path for path in source.rglob("*") if path.is_file()] if names is None else [source / n for n in names]
    for path in sorted(files):
        goal = target / path.relative_to(source).as_posix()
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_bytes(path.read_bytes())


def probe(folder: RemotePath) -> None:
    """Writes, reads and removes a small object, so that a missing right is told before anything starts.

    Raises:
      StoreRefused: the bucket is missing, or writing, reading or removing is not allowed.
      StoreFailed: the store does not answer.
    """
    import secrets

    path, content = folder / f".probe-{secrets.token_hex(4)}", b"maxbatch writes, reads and removes this\n"
    path.write_bytes(content)
    if path.read_bytes() != content:
        raise StoreRefused(f"{path}: reads back otherwise than it was written")
    path.unlink()


@contextlib.contextmanager
def storage_errors(path: object) -> Iterator[None]:
    """Turns what clients of stores raise in the block into one line; other exceptions pass."""
    try:
        yield
    except Exception as error:
        if not is_remote(path) or (understood := meaning(error, str(path))) is error:
            raise
        raise understood from error
