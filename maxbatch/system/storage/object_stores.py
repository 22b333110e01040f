"""Clients of object stores: settings, retries, classified errors, requests conditional on a
version.

The packages of `maxbatch.system.storage.stores` are used through fsspec, in whose own configuration
their settings are.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from http import HTTPStatus
from typing import TypeVar

from maxbatch.system.errors import (
    ConfigError,
    StoreFailed,
    StoreFull,
    StoreRefused,
    TrainingError,
    one_line,
)
from maxbatch.system.storage.patience import Patience, patience
from maxbatch.system.storage.stores import STORES
from maxbatch.system.storage.stores.store import (
    LOST,
    Content,
    FileSystem,
    ObjectStore,
    chain,
    split,
)
from maxbatch.system.terminal.warning import warn

T = TypeVar("T")

_LOOK_S = 0.25  # interval at which a waiting request checks for a request to stop
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0
_PASSING = {408, 425, 429, 500, 502, 503, 504}


def persist(url: str, request: Callable[[], T]) -> T:
    """Makes a request, and retries temporary failures with growing, jittered pauses.

    Raises:
      FileNotFoundError, FileExistsError: as the store reports about the object.
      StoreRefused: the store refuses permanently.
      StoreFailed: it does not respond within the patience of the command.
    """
    mine = patience()
    with mine.trying():
        return _persist(url, request, mine)


def _persist(url: str, request: Callable[[], T], patience: Patience) -> T:
    started, attempt = time.monotonic(), 0
    while True:
        try:
            return _answer(url, request, started, patience)
        except Exception as error:  # each client has its own exceptions
            failure = meaning(error, url)
            if failure is error:
                raise  # not the store's fault, or already retried by a request inside this one
            left = patience.ends(started) - time.monotonic()
            if not isinstance(failure, StoreFailed) or left <= 0:
                raise _given_up(failure, started, patience) from error
            waited = time.monotonic() - started
            if attempt and waited > _LONGEST_PAUSE_S:
                warn(f"{failure}; trying again, for {left:.0f} s more")
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.5)
        patience.sleep(min(pause, max(0.0, left)))
        attempt += 1


def gone_is_done(remove: Callable[[], object]) -> Callable[[], None]:
    """Makes a removal repeatable: an earlier try with a lost response may have removed the
    object.
    """
    tries = 0

    def remove_again() -> None:
        nonlocal tries
        tries += 1
        try:
            remove()
        except FileNotFoundError:
            if tries == 1:
                raise

    return remove_again


def _answer(url: str, request: Callable[[], T], started: float, patience: Patience) -> T:
    """Makes a request on its own thread, since a store may hang and clients retry for minutes.

    Raises:
      StoreFailed: no response came, and the command was asked to stop.
    """
    done: Future[T] = Future()

    def make() -> None:
        try:
            done.set_result(request())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=make, name="maxbatch-request", daemon=True).start()
    begun = time.monotonic()
    while not wait([done], _LOOK_S).done:
        if patience.is_over(started):
            patience.leave_behind()
            raise StoreFailed(
                f"{url}: the store does not answer (it is silent for "
                f"{time.monotonic() - begun:.0f} s)"
            )
    return done.result()


def _given_up(failure: BaseException, started: float, patience: Patience) -> BaseException:
    seconds = time.monotonic() - started
    if isinstance(failure, StoreFailed):
        patience.give_up()
    if isinstance(failure, StoreFailed) and seconds >= 1:
        return StoreFailed(
            f"{failure} (tried for {seconds:.0f} s); run the same command again later"
        )
    return failure


def meaning(error: BaseException, url: str) -> BaseException:
    """Translates a client's exception into one line about the store.

    FileNotFoundError, FileExistsError and errors of other origin are returned unchanged.
    """
    if isinstance(error, FileNotFoundError | FileExistsError | ConfigError | TrainingError):
        return error
    scheme, bucket = split(url)[:2]
    store, status = STORES[scheme], _status(error, scheme)
    if status == HTTPStatus.UNAUTHORIZED:
        return StoreRefused(
            f"{url}: the credentials are missing, expired or wrong ({_short(error)}); "
            f"{store.sign_in}"
        )
    if status == HTTPStatus.FORBIDDEN:
        return StoreRefused(
            f"{url}: no permission in bucket {bucket}; give this identity {store.needs}"
        )
    if status == HTTPStatus.INSUFFICIENT_STORAGE:
        return StoreFull(
            f"{url}: bucket {bucket} is full; free some space and run the same command again"
        )
    if status in _PASSING:
        return StoreFailed(f"{url}: the store does not answer ({_short(error)})")
    if status or isinstance(error, OSError | ValueError):
        return StoreRefused(f"{url}: the store refuses ({_short(error)})")
    return error


def _status(error: BaseException, scheme: str) -> int | None:
    """Returns the HTTP status of the nearest client's exception among an error and its causes, or
    None.
    """
    errors = chain(error)
    for cause in errors:
        if isinstance(cause, ConnectionError | TimeoutError | InterruptedError):
            return HTTPStatus.SERVICE_UNAVAILABLE
        if status := STORES[scheme].status(cause):
            return status
    return (
        HTTPStatus.FORBIDDEN
        if any(isinstance(cause, PermissionError) for cause in errors)
        else None
    )


@contextlib.contextmanager
def naming_missing_bucket(url: str) -> Iterator[None]:
    """Names the bucket of an object if it cannot be written because the bucket is missing."""
    try:
        yield
    except FileNotFoundError:
        scheme, bucket, _ = split(url)
        make = f"{STORES[scheme].make_bucket}{bucket}"
        message = f"{url}: there is no bucket {bucket}; make it ({make}) or correct its name"
        raise StoreRefused(message) from None


def _short(error: BaseException) -> str:
    text = one_line(error)
    return text if len(text) <= 160 else text[:157] + "..."


@functools.cache
def file_system(scheme: str) -> FileSystem:
    """Returns the fsspec file system of a scheme.

    Raises:
      ConfigError: its package is not installed; the message names the extra.
    """
    package, extra = STORES[scheme].package, STORES[scheme].extra
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{scheme}:// needs {package}, which is not installed: pip install 'maxbatch[{extra}]'"
        )
    configure()
    import fsspec

    try:
        files: FileSystem = fsspec.filesystem(scheme)
        STORES[scheme].try_once(files)
        return files
    except Exception as error:  # unreadable credentials, for example
        raise meaning(error, f"{scheme}://") from error


def configure() -> None:
    """Configures the clients before they are made."""
    from fsspec.config import conf

    for name in ("gcsfs", "s3fs", "aiobotocore", "botocore"):
        # they also raise what they log with a traceback
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for scheme, store in STORES.items():
        settings = conf.setdefault(scheme, {})
        # other processes write to the same folders
        settings.setdefault("use_listings_cache", False)
        store.configure(settings)


def _at(url: str) -> tuple[ObjectStore[FileSystem], tuple[FileSystem, str, str]]:
    """Returns the store of a URL, its fsspec file system, the bucket and the object's name."""
    scheme, bucket, name = split(url)
    return STORES[scheme], (file_system(scheme), bucket, name)


def read(url: str) -> Content:
    """Returns the content of an object, read by one request and checked against the store's hash or
    length.
    """
    store, at = _at(url)

    def read() -> Content:
        content = store.read(*at)
        if content.expected != content.actual:  # the next try may return all of it
            raise ConnectionError(f"{len(content.data)} bytes came, which are not the whole object")
        return content

    return persist(url, read)


def read_version(url: str) -> tuple[bytes, str]:
    """Returns the content of an object, and its version, which changes with every write."""
    store, at = _at(url)
    content = read(url)
    version: str | None = content.version
    # Emulators send no version with the content: read it before and after, until both agree.
    while not version:
        before = persist(url, lambda: store.version(*at))
        content = read(url)
        version = before if persist(url, lambda: store.version(*at)) == before else None
    return content.data, version


def version_of(url: str) -> str | None:
    """Returns the version of an object, None if there is none."""
    store, at = _at(url)
    with contextlib.suppress(FileNotFoundError):
        return persist(url, lambda: store.version(*at))
    return None


def write_if(url: str, data: bytes, version: str | None) -> str | None:
    """Writes an object that has a version, or that is not there (None).

    Returns:
      Its new version; None if another process was faster, and nothing was written.
    """
    store, at = _at(url)
    with naming_missing_bucket(url):
        return _unless_lost(
            url, lambda: store.write(*at, data, version), is_there=version is not None
        )


def remove_if(url: str, version: str) -> bool:
    """Removes an object that has a version; returns whether it did."""
    store, at = _at(url)
    return bool(_unless_lost(url, lambda: store.remove(*at, version)))


def join(url: str, version: str, size: int, data: bytes) -> bool:
    """Appends bytes, inside the store, to an object of `size` bytes if it has a version; returns
    whether it did.
    """
    store, at = _at(url)

    def append() -> bool:
        store.join(*at, version, size, data)
        return True

    return bool(_unless_lost(url, append))


def _unless_lost(url: str, request: Callable[[], T], is_there: bool = True) -> T | None:
    """Makes a request about an object that has a version; returns None if another process changed
    it before.
    """

    def make() -> T | None:
        try:
            return request()
        except Exception as error:
            is_lost = isinstance(error, FileExistsError) or _status(error, split(url)[0]) in LOST
            if is_lost or (is_there and isinstance(error, FileNotFoundError)):
                return None
            raise

    return persist(url, make)
