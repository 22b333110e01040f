"""A path in an object store, with the methods of pathlib that make sense there."""

from __future__ import annotations

import base64
import dataclasses
import fnmatch
import io
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple, ParamSpec, Self, TypeVar

from maxbatch.system.storage import fences, object_stores
from maxbatch.system.storage.fences import BUILDING
from maxbatch.system.storage.object_stores import (
    file_system,
    gone_is_done,
    naming_missing_bucket,
    persist,
)
from maxbatch.system.storage.stores.store import FileSystem, split

if TYPE_CHECKING:
    from typing_extensions import Buffer

_READ_AHEAD_BYTES = 4 << 20  # read by one request of a streamed object

P = ParamSpec("P")
T = TypeVar("T")


class Status(NamedTuple):
    """Fields of pathlib's `stat()` known to a store."""

    st_size: int  # bytes
    st_mtime: float  # seconds since 1970; 0 if the store states none
    version: str  # changes with every write
    md5: str  # of the content, as hexadecimal digits; "" if the store states none


@dataclasses.dataclass(frozen=True, order=True)
class RemotePath:
    """A path in an object store, with the methods of pathlib that make sense there.

    Methods raise FileNotFoundError as pathlib's do, and one-line errors otherwise: ConfigError if
    the store refuses (permission, credentials, no such bucket), TrainingError if it does not answer
    or is full. In a folder leased by this process (`maxbatch.system.storage.fences`), writes raise
    LeaseLost once the lease is lost.
    """

    url: str  # scheme://bucket/name, no slash at the end

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str | PurePosixPath) -> RemotePath:
        return RemotePath(f"{self.url}/{str(name).strip('/')}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        above = self.url.rpartition("/")[0]
        return self if above.endswith(("/", ":")) else RemotePath(above)

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def relative_to(self, folder: RemotePath) -> PurePosixPath:
        """Returns the rest of the path below a folder."""
        return PurePosixPath(self.url.removeprefix(folder.url + "/"))

    def absolute(self) -> Self:
        return self

    def resolve(self) -> Self:
        return self

    @property
    def file_system(self) -> FileSystem:
        return file_system(split(self.url)[0])

    def ask(self, request: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Makes a request, and retries it as `persist` does; messages name this path."""
        return persist(self.url, partial(request, *arguments, **options))

    def exists(self) -> bool:
        """Returns whether the object, or objects below it, exist."""
        return self._kind() is not None

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        try:
            return str(self.info()["type"])
        except FileNotFoundError:
            return None

    def info(self) -> dict[str, Any]:
        """Returns the client's own description of the object."""
        return self.ask(self.file_system.info, self.url)

    def stat(self) -> Status:
        info = self.info()
        version = next(
            (info[key] for key in ("generation", "etag", "ETag", "md5Hash") if info.get(key)), ""
        )
        written = info.get("mtime") or info.get("LastModified")
        size, seconds = int(info["size"] or 0), written.timestamp() if written else 0.0
        return Status(size, seconds, str(version).strip('"'), _md5_of(info))

    def iterdir(self) -> Iterator[RemotePath]:
        """Yields the direct entries of the folder, sorted by name."""
        for url, _ in self._entries():
            yield RemotePath(url)

    def folders(self) -> list[RemotePath]:
        """Returns the folders directly in this one, by one listing."""
        return [RemotePath(url) for url, kind in self._entries() if kind == "directory"]

    def file_sizes(self) -> dict[str, int]:
        """Returns the sizes in bytes of the folder's direct objects, by name, from one listing."""
        entries = self.ask(self.file_system.ls, self.url, detail=True)
        return {
            self._url_of(entry).rpartition("/")[2]: int(entry["size"] or 0)
            for entry in entries
            if entry["type"] == "file"
        }

    def _entries(self) -> list[tuple[str, str]]:
        listing = self.ask(self.file_system.ls, self.url, detail=True)
        entries = {self._url_of(entry): entry["type"] for entry in listing}
        return sorted((url, kind) for url, kind in entries.items() if url != self.url)

    def files(self) -> list[tuple[RemotePath, int]]:
        """Returns the objects below the folder with their sizes, sorted by name."""

        listing = self.ask(self.file_system.find, self.url, detail=True).values()
        entries = {
            self._url_of(entry): int(entry["size"] or 0)
            for entry in listing
            if entry["type"] == "file"
        }
        return sorted((RemotePath(url), size) for url, size in entries.items())

    def _url_of(self, entry: dict[str, Any]) -> str:
        return f"{split(self.url)[0]}://{entry['name'].rstrip('/')}"

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yields matches of the pattern below the folder, sorted by name; `*` does not cross a
        slash.
        """
        head, _, rest = pattern.partition("/")
        if not re.search(r"[*?[]", head):
            below = self / head
            yield from below.glob(rest) if rest else ([below] if below.exists() else [])
            return
        try:
            entries = self._entries()
        except FileNotFoundError:
            return
        for url, kind in entries:
            if fnmatch.fnmatchcase(url.rpartition("/")[2], head):
                if not rest:
                    yield RemotePath(url)
                elif kind == "directory":
                    yield from RemotePath(url).glob(rest)

    def read_bytes(self) -> bytes:
        return object_stores.read(self.url).data

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, begin: int, end: int) -> bytes:
        """Returns the bytes from `begin` to before `end`, by one request."""

        def read() -> bytes:
            data: bytes = self.file_system.cat_file(self.url, start=begin, end=end)
            if len(data) != end - begin:
                raise ConnectionError(f"{len(data)} of {end - begin} bytes came")
            return data

        return self.ask(read) if end > begin else b""

    def write_bytes(self, data: bytes) -> int:
        """Writes the object atomically."""
        fence = fences.fence_of(self.url)
        if fence and f"/{BUILDING}" not in self.url:
            fence.write(self.url, partial(object_stores.write_if, self.url, data))
        else:
            fences.ask(self.url)
            with naming_missing_bucket(self.url):
                self.ask(self.file_system.pipe_file, self.url, data)
        return len(data)

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        return self.write_bytes(text.encode(encoding))

    def upload(self, file: Path) -> None:
        """Uploads a local file atomically."""
        fences.ask(self.url)
        with naming_missing_bucket(self.url):
            self.ask(self.file_system.put_file, str(file), self.url)

    def open(self, mode: str = "rb") -> IO[Any]:
        """Opens the object for reading, in mode r or rb."""
        if mode not in ("r", "rb"):
            raise ValueError(f"mode {mode!r}: objects are written whole")
        file = io.BufferedReader(_Ranges(self), _READ_AHEAD_BYTES)
        return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")

    def unlink(self, missing_ok: bool = False) -> None:
        fences.ask(self.url)
        try:
            self.ask(gone_is_done(lambda: self.file_system.rm_file(self.url)))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a folder exists once it has an object."""

    def copy(self, target: RemotePath) -> None:
        """Copies the object inside the store."""
        fences.ask(target.url)
        self.ask(self.file_system.cp_file, self.url, target.url)

    def rename(self, target: RemotePath) -> RemotePath:
        """Moves the object, or every object of the folder, one after another, not atomically."""
        moved = [(self, 0)] if self.is_file() else self.files()
        if not moved:
            raise FileNotFoundError(self.url)
        for path, _ in moved:
            goal = target.url + path.url.removeprefix(self.url)
            path.copy(RemotePath(goal))
        for path, _ in moved:
            path.unlink(missing_ok=True)
        return target


class _Ranges(io.RawIOBase):
    """The content of an object; each read is a separate request."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._size, self._place = path, path.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, begin + offset)
        return self._place

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._path.read_range(self._place, min(self._size, self._place + len(view)))
        view[: len(data)] = data
        self._place += len(data)
        return len(data)


def _md5_of(info: Mapping[str, Any]) -> str:
    """Returns a store's MD5 of an object: Google's field, or the ETag of an S3 object uploaded
    whole.
    """
    if info.get("md5Hash"):
        return base64.b64decode(info["md5Hash"]).hex()
    etag = str(info.get("ETag") or "").strip('"')
    return etag if re.fullmatch("[0-9a-f]{32}", etag) else ""
