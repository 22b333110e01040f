"""Clients of object stores: settings, retries, classified errors, requests conditional on a version.

The packages of `maxbatch.system.stores` are used through fsspec, in whose own configuration their settings are.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from maxbatch.system.errors import ConfigError, StoreFailed, StoreFull, StoreRefused, TrainingError
from maxbatch.system.patience import Patience, patience
from maxbatch.system.stores import STORES
from maxbatch.system.stores.store import FileSystem, ObjectStore, chain, has_lost, split, status_of
from maxbatch.system.warning import warn

T = TypeVar("T")

_LOOK_S = 0.25  # interval at which a waiting request checks for a request to stop
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0
_PASSING_CODES = {408, 425, 429, 500, 502, 503, 504}
_PASSING_TYPES = (
    "ClientConnectionError", "ClientConnectorError", "ServerDisconnectedError", "ClientOSError", "ClientPayloadError",
    "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError", "HTTPClientError",
    "ProxyError", "ReadTimeout", "ChunkedEncodingError", "ChecksumError", "IncompleteRead", "FSTimeoutError",
    "ResponseParserError", "ResponseStreamingError", "ServerTimeoutError", "SocketTimeoutError", "TransportError",
    "JSONDecodeError", "FlexibleChecksumError",  # truncated responses
)  # fmt: skip
_PASSING_TEXT = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|SlowDown|reduce your request rate|ServiceUnavailable|InternalError|"
    r"RequestTimeout\b"
)
_FORBIDDEN = re.compile(r"Forbidden|AccessDenied|PERMISSION_DENIED")
_CREDENTIALS = re.compile(
    r"NoCredentials|PartialCredentials|Unable to locate credentials|ExpiredToken|InvalidAccessKeyId|"
    r"SignatureDoesNotMatch|InvalidToken|TokenRefresh|DefaultCredentialsError|RefreshError|Invalid Credentials|"
    r"Unauthorized|UnauthorizedSSO|token.*expired",
    re.I,
)


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
    """Makes a removal repeatable: an earlier try with a lost response may have removed the object."""
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
        is_last = patience.gave_up and time.monotonic() >= begun + patience.last_seconds
        if is_last or patience.is_over(started):
            patience.leave_behind()
            raise StoreFailed(f"{url}: the store does not answer (it is silent for {time.monotonic() - begun:.0f} s)")
    return done.result()


def _given_up(failure: BaseException, started: float, patience: Patience) -> BaseException:
    seconds = time.monotonic() - started
    if isinstance(failure, StoreFailed):
        patience.give_up()
    if isinstance(failure, StoreFailed) and seconds >= 1:
        return StoreFailed(f"{failure} (tried for {seconds:.0f} s); run the same command again later")
    return failure


def meaning(error: BaseException, url: str) -> BaseException:
    """Translates a client's exception into one line about the store.

    FileNotFoundError, FileExistsError and errors of other origin are returned unchanged.
    """
    if isinstance(error, FileNotFoundError | FileExistsError | ConfigError | TrainingError):
        return error
    if known := refusal(error, url):
        return known
    is_clients = any(status_of(one) for one in chain(error)) or type(error).__name__ in ("HttpError", "ClientError")
    if isinstance(error, OSError | ValueError) or is_clients:
        return StoreRefused(f"{url}: the store refuses ({_short(error)})")
    return error


def refusal(error: BaseException, url: str) -> StoreRefused | StoreFailed | StoreFull | None:
    """Classifies an error as refused, failed or full, in one line; None if it concerns the content."""
    scheme, bucket = split(url)[:2]
    if isinstance(error, StoreRefused | StoreFailed | StoreFull):
        return error
    errors = chain(error)
    said = " ".join(f"{type(one).__name__}: {one}" for one in errors)
    code = next(filter(None, map(status_of, errors)), None)
    if _CREDENTIALS.search(said) or code == 401:
        return StoreRefused(f"{url}: the credentials are missing, expired or wrong ({_short(error)}); "
                            f"{STORES[scheme].sign_in}")  # fmt: skip
    if code == 403 or isinstance(error, PermissionError) or _FORBIDDEN.search(said):
        return StoreRefused(f"{url}: no permission in bucket {bucket}; give this identity {STORES[scheme].needs}")
    if code == 507 or "QuotaExceeded" in said:
        return StoreFull(f"{url}: bucket {bucket} is full; free some space and run the same command again")
    if "NoSuchBucket" in said:
        return missing_bucket(url)
    if code in _PASSING_CODES or _PASSING_TEXT.search(said) or any(map(_is_passing, errors)):
        return StoreFailed(f"{url}: the store does not answer ({_short(error)})")
    return None


def missing_bucket(url: str) -> StoreRefused:
    """Returns the exception for an object in a missing bucket."""
    scheme, bucket, _ = split(url)
    make = STORES[scheme].make_bucket
    return StoreRefused(f"{url}: there is no bucket {bucket}; make it ({make}{bucket}) or correct its name")


def _is_passing(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    is_system = isinstance(error, ConnectionError | TimeoutError | InterruptedError)
    return is_system or bool(names.intersection(_PASSING_TYPES))


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


@functools.cache
def file_system(scheme: str) -> FileSystem:
    """Returns the fsspec file system of a scheme.

    Raises:
      ConfigError: its package is not installed; the message names the extra.
    """
    package, extra = STORES[scheme].package, STORES[scheme].extra
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{scheme}:// needs {package}, which is not installed: pip install 'maxbatch[{extra}]'")
    configure()
    import fsspec

    try:
        found: FileSystem = fsspec.filesystem(scheme)
        return found
    except Exception as error:  # unreadable credentials, for example
        raise meaning(error, f"{scheme}://") from error


def configure() -> None:
    """Configures the clients before they are made."""
    from fsspec.config import conf

    for name in ("gcsfs", "s3fs", "aiobotocore", "botocore"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they also raise what they log with a traceback
    for scheme, store in STORES.items():
        settings = conf.setdefault(scheme, {})
        settings.setdefault("use_listings_cache", False)  # other processes write to the same folders
        store.configure(settings)


def _at(url: str) -> tuple[ObjectStore[FileSystem], tuple[FileSystem, str, str]]:
    """Returns the store of a URL, its fsspec file system, the bucket and the object's name."""
    scheme, bucket, name = split(url)
    return STORES[scheme], (file_system(scheme), bucket, name)


def read_version(url: str, most: int) -> tuple[bytes, str]:
    """Returns the first `most` bytes of an object, and its version, which changes with every write."""
    store, at = _at(url)
    return persist(url, lambda: store.read(*at, most))


def read_whole(url: str) -> bytes:
    """Returns the content of an object, read by one request and checked against the store's hash or length."""
    store, at = _at(url)

    def read() -> bytes:
        content, stated, found = store.read_checked(*at)
        if stated != found:  # the next try may return all of it
            raise ConnectionError(f"{len(content)} bytes came, which are not the whole object")
        return content

    return persist(url, read)


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

    Raises:
      FileNotFoundError: there is no bucket.
    """
    store, at = _at(url)

    def write() -> str | None:
        try:
            return store.write(*at, data, version)
        except Exception as error:
            if has_lost(error) or (isinstance(error, FileNotFoundError) and version is not None):
                return None
            raise

    return persist(url, write)


def remove_if(url: str, version: str) -> bool:
    """Removes an object that has a version; returns whether it did."""
    store, at = _at(url)

    def remove() -> bool:
        try:
            return store.remove(*at, version)
        except Exception as error:
            if has_lost(error) or isinstance(error, FileNotFoundError):
                return False
            raise

    return persist(url, remove)
