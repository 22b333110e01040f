"""Operations of an object store beyond fsspec's, and code shared by stores."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

LOST = {409, 412}  # HTTP statuses: a precondition failed, or another client is writing
MAX_REQUESTS = 32  # at the same time
CONNECT_S, READ_S = 10, 30  # a request silent for longer has failed


class FileSystem(Protocol):
    """The methods used of fsspec's file systems; a file's description is the client's own
    record.
    """

    def info(self, path: str) -> dict[str, Any]: ...
    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]: ...
    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]: ...
    def glob(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]: ...
    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...
    def pipe_file(self, path: str, value: bytes) -> object: ...
    def put_file(self, lpath: str, rpath: str) -> object: ...
    def get_file(self, rpath: str, lpath: str) -> object: ...
    def cp_file(self, path1: str, path2: str) -> object: ...
    def rm_file(self, path: str) -> object: ...


class Content(NamedTuple):
    """The content of an object."""

    data: bytes
    version: str  # "" if the store does not state it beside the content
    expected: object  # the store's hash or length of the content
    actual: object  # the same of `data`


Files = TypeVar("Files", bound=FileSystem, contravariant=True)


class ObjectStore(Protocol[Files]):
    """One kind of object store. `files` is its fsspec file system, `bucket` and `name` are the
    parts of a URL.

    Methods raise the client's exceptions. A version changes with every write of an object.
    """

    package: str  # Python package of the client
    extra: str  # maxbatch's extra that installs the package
    sign_in: str  # how to get credentials, for messages
    needs: str  # rights needed by a run, for messages
    # of the environment: where the store is, and credentials, but not names of files
    variables: tuple[str, ...]
    make_bucket: str  # command that makes a bucket; the bucket's name follows

    def configure(self, conf: dict[str, object]) -> None:
        """Completes fsspec's settings of the scheme, and the environment, before a client is
        made.
        """

    def try_once(self, files: Files) -> None:
        """Leaves further tries of a request to `persist`.

        A request that its client repeats unseen may meet its own effect: a removed object is not
        found, and a condition on a version no longer holds. `persist` counts the tries, and so can
        tell.
        """

    def version(self, files: Files, bucket: str, name: str) -> str:
        """Returns the version of an object; raises FileNotFoundError if there is none."""

    def read(self, files: Files, bucket: str, name: str) -> Content:
        """Returns the content of an object, by one request."""

    def write(self, files: Files, bucket: str, name: str, data: bytes, version: str | None) -> str:
        """Writes an object if it has this version, or does not exist (None); returns its new
        version.
        """

    def remove(self, files: Files, bucket: str, name: str, version: str) -> bool:
        """Removes an object if it has this version; returns whether it did."""

    def join(
        self, files: Files, bucket: str, name: str, version: str, size: int, data: bytes
    ) -> None:
        """Appends bytes, inside the store, to an object of `size` bytes if it has this version."""

    def status(self, error: BaseException) -> int | None:
        """Returns the HTTP status of a client's exception, also of one without a response; None for
        any other.
        """


def split(url: str) -> tuple[str, str, str]:
    """Splits a URL into scheme, bucket and name."""
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    return scheme, bucket, name


def chain(error: BaseException | None) -> list[BaseException]:
    """Returns an exception and its causes, the nearest first."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes[:4]
