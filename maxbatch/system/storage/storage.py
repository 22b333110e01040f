"""The one interface to storage: local paths, Google Cloud Storage (gs://) and S3 (s3://).

`as_path` makes a path from text. It has pathlib's methods on a disk and in a store, so other
modules need not distinguish them. A local path is a `pathlib.Path`.

In an object store, objects appear atomically, and a folder exists while objects are below it; it is
never created.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, overload

from maxbatch.system.errors import ConfigError, StoreRefused
from maxbatch.system.processes.threads import in_threads
from maxbatch.system.storage.object_stores import file_system
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.stores import STORES
from maxbatch.system.storage.stores.store import MAX_REQUESTS, split

if TYPE_CHECKING:
    from typing_extensions import Buffer, TypeIs

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)")
_SCHEMES = " or ".join(f"{scheme}://" for scheme in STORES)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# clients read these as a query, a version, a pattern or a slash, each in its own way
_SPECIAL = "?#*[]\\"
_LOOK_S = 5.0
_MOST_BYTES = 800  # bound of a name; stores allow 1,024, and a run appends its own names


AnyPath = Path | RemotePath


def scheme_of(text: str) -> str | None:
    """Returns the scheme of a URL; None for a local path."""
    url = _URL.match(text.strip())
    return url[1] if url and url[2] else None


def url_fault(text: str, may_hold_pattern: bool = False) -> str | None:
    """Returns the rule broken by a URL; None for a valid URL and for text without a scheme.

    Applies to URLs in config keys, arguments and data. Text with one slash after its scheme counts
    as a URL.

    Args:
      may_hold_pattern: the URL may name several objects, as in `gs://bucket/*.jsonl`.
    """
    url = _URL.match(text.strip())
    if url is None:
        return None
    if url[1] not in STORES:
        return f"a local path, {_SCHEMES} ({url[1]}:// is not supported)"
    return _store_fault(text if url[2] else f"{url[1]}://", may_hold_pattern)


@overload
def is_remote(path: AnyPath) -> TypeIs[RemotePath]: ...
@overload
def is_remote(path: str) -> bool: ...
def is_remote(path: AnyPath | str) -> bool:
    """Returns whether a path is in an object store.

    For messages, for options of libraries with their own store clients, and where the two kinds of
    storage need different algorithms. All other code uses this module's functions or the paths'
    common methods.
    """
    return isinstance(path, RemotePath) or scheme_of(str(path)) in STORES


def _store_fault(url: str, may_hold_pattern: bool) -> str | None:
    """Returns the rule broken by a store's URL and a URL that works, or None."""
    scheme, bucket, name = split(url.strip())
    if not bucket:
        return f"a local path or a URL with a bucket, such as {scheme}://bucket/{name or 'folder'}"
    if not _BUCKET.fullmatch(bucket):
        return (
            "a URL whose bucket is letters, digits, '.', '_' and '-', such as "
            f"{scheme}://bucket/folder"
        )
    names = name.removesuffix("/").split("/") if name else []
    special = "" if may_hold_pattern else _SPECIAL
    if any(folder in ("", ".", "..") for folder in names):
        rule = "a URL without '//', '.' and '..' in its name"
    elif any(not letter.isprintable() or letter in special for letter in name):
        rule = (
            f"a URL without {' '.join(special) + ' and ' if special else ''}unprintable characters"
        )
    elif not may_hold_pattern and len(name.encode(errors="surrogatepass")) > _MOST_BYTES:
        return f"a URL whose name has at most {_MOST_BYTES} bytes"
    else:
        return None
    kept: list[str] = []
    for folder in names:
        if folder == "..":
            kept = kept[:-1]
        elif folder not in ("", "."):
            kept.append("".join(c if c.isprintable() and c not in special else "_" for c in folder))
    return f"{rule}, such as {'/'.join([f'{scheme}://{bucket}', *kept])}"


def as_path(text: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Returns the path named by a text: absolute, with `~` expanded, or in an object store.

    Raises:
      ConfigError: a scheme other than gs:// and s3://, an invalid URL, or a missing package.
    """
    if isinstance(text, RemotePath):
        return text
    text = os.fspath(text)
    scheme = scheme_of(text)
    if scheme is None:
        return Path(os.path.expanduser(text)).absolute()  # `~name` of an unknown user is kept
    if rule := url_fault(text):
        raise ConfigError(f"{text[:80]}: must be {rule}")
    file_system(scheme)  # a missing package raises here
    return RemotePath(text.strip().rstrip("/"))


def as_typed(text: str) -> AnyPath:
    """Returns the path named by a text; a relative path is kept as typed, for printing."""
    return as_path(text) if is_remote(text) else Path(text)


def user_cache() -> Path:
    """Returns maxbatch's folder in the user's cache: XDG_CACHE_HOME/maxbatch, else
    ~/.cache/maxbatch.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "maxbatch"


def kept_here(folder: AnyPath) -> Path:
    """Returns the local folder for a folder's files that cannot be in an object store, such as
    locks.

    It is the folder itself, or a new one in the user's cache.
    """
    if isinstance(folder, Path):
        return folder
    local = (
        user_cache() / "stores" / hashlib.blake2b(folder.url.encode(), digest_size=8).hexdigest()
    )
    local.mkdir(parents=True, exist_ok=True)
    return local


def remove_tree(path: AnyPath) -> None:
    """Removes a folder with its content, or a file; does nothing if there is none."""
    if isinstance(path, Path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        return
    paths = [file for file, _ in path.files()]
    if path.is_file():
        paths.append(path)
    in_threads(lambda file: file.unlink(missing_ok=True), paths, MAX_REQUESTS)


def move_tree(source: AnyPath, target: AnyPath) -> None:
    """Moves a folder within its disk or bucket."""
    source.rename(target)  # type: ignore[arg-type]  # both are of one kind


def subfolders(folder: AnyPath) -> list[str]:
    """Returns the names of the folders directly in a folder; FileNotFoundError if there is no such
    folder.
    """
    if isinstance(folder, RemotePath):
        return [entry.name for entry in folder.folders()]
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir()]


def file_sizes(folder: AnyPath) -> dict[str, int]:
    """Returns the sizes in bytes of a folder's direct files, by name, from one listing.

    Raises:
      FileNotFoundError: there is no such folder on a disk; object stores have no empty folders.
    """
    if isinstance(folder, RemotePath):
        try:
            return folder.file_sizes()
        except FileNotFoundError:
            return {}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def is_misplaced(path: AnyPath, is_folder: bool) -> bool:
    """Returns whether a path is of the wrong kind, file or folder; object stores only hold
    files.
    """
    if isinstance(path, RemotePath):
        return False
    return os.path.lexists(path) and not (path.is_dir() if is_folder else path.is_file())


def missing_folder(path: AnyPath) -> str | None:
    """Returns a message if no folder is at a path, or None."""
    if path.is_dir():
        return None
    seen_from = "" if isinstance(path, RemotePath) else f" (seen from {os.getcwd()})"
    return "is not a folder" if path.exists() else f"no such folder{seen_from}"


def open_whole(path: AnyPath) -> BinaryIO:
    """Opens a file for reading. An object is read by one request, so that all bytes are of one
    version.

    Raises:
      ConfigError: the path is not a file.
      OSError: the file cannot be read.
    """
    if is_misplaced(path, is_folder=False):
        raise ConfigError(f"{path}: must be a file")
    return io.BytesIO(path.read_bytes()) if isinstance(path, RemotePath) else path.open("rb")


def read_range(path: AnyPath, begin: int, end: int) -> bytes:
    """Returns the bytes of a file from `begin` to before `end`; fewer if a local file is
    shorter.
    """
    if isinstance(path, RemotePath):
        return path.read_range(begin, end)
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def look_period(path: AnyPath) -> float:
    """Returns the seconds between two reads of a growing file; in an object store each read is a
    request.
    """
    return _LOOK_S if isinstance(path, RemotePath) else 0.0


@contextlib.contextmanager
def place_here(folder: AnyPath) -> Iterator[Path]:
    """Yields a local folder for a folder's growing files.

    It is the folder itself, or a temporary one for an object store; `send` or `copy_tree` then
    copies the files.
    """
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="maxbatch-") as temporary:
        yield Path(temporary)


def send(file: Path, target: AnyPath) -> bool:
    """Copies a local file to its target; returns False if the file is `target` itself."""
    if file == target:
        return False
    target.write_bytes(file.read_bytes())
    return True


def upload(file: Path, target: AnyPath) -> None:
    """Copies a large local file in parts."""
    if isinstance(target, RemotePath):
        target.upload(file)
    else:
        shutil.copyfile(file, target)


def clone_files(source: AnyPath, target: AnyPath, leave_out: Collection[str] = ()) -> None:
    """Gives the files below a folder, which nobody changes, a second path below another folder.

    Args:
      leave_out: paths of files in the folder that are not cloned.

    Raises:
      FileNotFoundError: a file is gone.
      OSError: a file cannot be read or written.
    """
    if isinstance(source, RemotePath):
        files = [str(file.relative_to(source)) for file, _ in source.files()]
    else:
        files = [file.relative_to(source).as_posix() for file in _files_below(source)]
    names = [name for name in files if name not in leave_out]
    in_threads(lambda name: clone_file(source / name, target / name), names, MAX_REQUESTS)


def clone_file(source: AnyPath, target: AnyPath) -> None:
    """Gives a file that nobody changes a second path: a hard link, or a copy inside of its store.

    It is copied where neither is possible.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if (
        isinstance(source, RemotePath)
        and isinstance(target, RemotePath)
        and scheme_of(source.url) == scheme_of(target.url)
    ):
        source.copy(target)
    elif isinstance(source, Path) and isinstance(target, Path):
        _link_or_copy(str(source), str(target))
    elif isinstance(source, Path):
        upload(source, target)
    else:
        write_parts(target, [source.read_bytes()])


def _files_below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(parent, name) for name in names)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def is_whole(folder: AnyPath, last: str) -> bool:
    """Returns whether a folder made under another name is complete.

    It always is on a disk, which renames it; an object store copies it, the object `last` at the
    end.
    """
    return not isinstance(folder, RemotePath) or (folder / last).is_file()


def copy_tree(source: Path, target: AnyPath) -> None:
    """Copies the files below a local folder into another folder, unless both are the same."""
    if source == target:
        return
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        goal = target / path.relative_to(source).as_posix()
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_bytes(path.read_bytes())


def write_parts(path: AnyPath, buffers: Sequence[Buffer]) -> None:
    """Writes a new file from buffers: an object by one request, a file of a disk synced.

    Raises:
      OSError: the file cannot be written, or is there on a disk.
    """
    if isinstance(path, RemotePath):
        path.write_bytes(b"".join(buffers))
        return
    with path.open("xb") as file:
        for buffer in buffers:
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())


def probe(folder: AnyPath) -> None:
    """Writes, reads and removes a small object, to report a missing permission before work starts.

    Does nothing to a folder of a disk.

    Raises:
      StoreRefused: the bucket is missing, or writing, reading or removing is not allowed.
      StoreFailed: the store does not answer.
    """
    if not isinstance(folder, RemotePath):
        return
    path, content = (
        folder / f".probe-{secrets.token_hex(4)}",
        b"maxbatch writes, reads and removes this\n",
    )
    path.write_bytes(content)
    if path.read_bytes() != content:
        raise StoreRefused(f"{path}: the stored object differs from what was written")
    path.unlink()
