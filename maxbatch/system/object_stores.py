"""The clients of object stores: their settings, what is tried again, and what an error means.

gcsfs and s3fs come through fsspec. Orbax reaches the same clients through fsspec by itself, so their settings stand in
fsspec's own configuration. TensorStore reads environment variables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import quote

from maxbatch.system.errors import ConfigError, StoreFailed, StoreFull, StoreRefused, TrainingError
from maxbatch.system.folding import printable

T = TypeVar("T")

SCHEMES = {"gs": "gcsfs", "s3": "s3fs"}  # and the package that reaches them
EXTRAS = {"gs": "gcs", "s3": "s3"}
MAX_REQUESTS = 32  # at the same time
_CONNECT_S, _READ_S = 10, 30  # a request that is silent for longer has failed
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0
_SLICE_S = 0.5
_PASSING_CODES = {408, 425, 429, 500, 502, 503, 504}
_PASSING_TYPES = (
    "ClientConnectionError", "ClientConnectorError", "ServerDisconnectedError", "ClientOSError", "ClientPayloadError",
    "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError", "HTTPClientError",
    "ProxyError", "ReadTimeout", "ChunkedEncodingError", "ChecksumError", "IncompleteRead", "FSTimeoutError",
    "ResponseParserError", "ResponseStreamingError", "ServerTimeoutError", "SocketTimeoutError", "TransportError",
    "JSONDecodeError", "FlexibleChecksumError",  # of an answer that was cut off
)  # fmt: skip
_TENSORSTORE = re.compile(r"HTTP (?:response )?(?:code:? ?|status:? ?)?(4\d\d|5\d\d)")  # it raises a text
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
_HOW_TO_SIGN_IN = {
    "gs": "sign in with `gcloud auth application-default login`, or give the machine a service account",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), or give the machine a role",
}
_WHAT_IT_NEEDS = {
    "gs": "roles/storage.objectUser and roles/storage.legacyBucketReader on the bucket",
    "s3": "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on the bucket",
}


class Patience:
    """How long a request that fails for a passing reason is tried again."""

    seconds = 300.0
    hurried_seconds = 20.0  # once somebody asked to stop, for all requests together
    last_seconds = 2.0  # after that, for each

    def __init__(self) -> None:
        self._hurried_at: float | None = None
        self.gave_up = False  # after somebody asked to stop
        self.left_behind = False  # whether a thread still waits for a store on which the command gave up
        self._trying = 0  # threads that make a request
        self._lock = threading.Lock()

    def hurry(self) -> None:
        """Shortens the bound, since somebody asked the process to stop."""
        self._hurried_at = self._hurried_at or time.monotonic()

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Counts a thread that makes a request, which may be tried again for long."""
        with self._lock:
            self._trying += 1
        try:
            yield
        finally:
            with self._lock:
                self._trying -= 1

    @property
    def keeps_threads(self) -> bool:
        """Whether threads of this process still wait for a store."""
        return self.left_behind or self._trying > 0

    def renew(self) -> None:
        """Forgets that somebody asked to stop: another command begins."""
        self._hurried_at, self.gave_up = None, False

    def ends(self, started: float) -> float:
        """Returns when a request that started then is given up, in time.monotonic()."""
        end = started + self.seconds
        if self._hurried_at is None:
            return end
        return min(end, max(started + self.last_seconds, self._hurried_at + self.hurried_seconds))

    def give_up(self) -> None:
        """Notes that a request was given up; once somebody asked to stop, those after it get less time."""
        self.gave_up = self._hurried_at is not None

    def sleep(self, seconds: float) -> None:
        """Pauses between two tries; once somebody asks to stop the pause is over."""
        end, was_hurried = time.monotonic() + seconds, self._hurried_at
        while (left := end - time.monotonic()) > 0 and self._hurried_at == was_hurried:
            time.sleep(min(left, _SLICE_S))


PATIENCE = Patience()


def persist(url: str, request: Callable[[], T]) -> T:
    """Makes a request of a store, and makes it again with growing, jittered pauses while it fails for a passing reason.

    Raises:
      FileNotFoundError, FileExistsError: what the store says of the object.
      StoreRefused: the store refuses for good.
      StoreFailed: it does not answer for as long as `PATIENCE` says.
    """
    with PATIENCE.trying():
        return _persist(url, request)


def _persist(url: str, request: Callable[[], T]) -> T:
    started, attempt = time.monotonic(), 0
    while True:
        try:
            return _within(PATIENCE.last_seconds, request) if PATIENCE.gave_up else request()
        except Exception as error:  # each client has exceptions of its own
            failure = meaning(error, url)
            if failure is error:
                raise  # no fault of the store, or that of a request within this one, which was tried for as long
            left = PATIENCE.ends(started) - time.monotonic()
            if not isinstance(failure, StoreFailed) or left <= 0:
                raise _given_up(failure, started) from error
            waited = time.monotonic() - started
            if attempt and waited > _LONGEST_PAUSE_S:
                told = f"maxbatch: warning: {printable(str(failure))}; trying again, for {left:.0f} s more"
                print(told, file=sys.stderr, flush=True)
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.5)
        PATIENCE.sleep(min(pause, max(0.0, left)))
        attempt += 1


def gone_is_done(remove: Callable[[], None]) -> Callable[[], None]:
    """Returns a removal that may be tried again: of what an earlier try removed, whose answer was lost."""
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


def _within(seconds: float, request: Callable[[], T]) -> T:
    """Makes a request on a thread of its own, since clients try again for half a minute before they say anything."""
    done: Future[T] = Future()

    def make() -> None:
        try:
            done.set_result(request())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=make, name="maxbatch-last-request", daemon=True).start()
    return done.result(timeout=seconds)


def _given_up(failure: BaseException, started: float) -> BaseException:
    seconds = time.monotonic() - started
    if isinstance(failure, StoreFailed):
        PATIENCE.give_up()
    if isinstance(failure, StoreFailed) and seconds >= 1:
        return StoreFailed(f"{failure} (tried for {seconds:.0f} s); run the same command again later")
    return failure


def meaning(error: BaseException, url: str) -> BaseException:
    """Returns what an exception of a client says about a store, as an exception of one line.

    FileNotFoundError and FileExistsError stay what they are; an error that no store makes is returned as it is.
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
    """Returns what a store refuses or fails to do, in one line; None for an error about what lies in it."""
    scheme, bucket = split(url)[:2]
    if isinstance(error, StoreRefused | StoreFailed | StoreFull):
        return error
    errors = chain(error)
    said = " ".join(f"{type(one).__name__}: {one}" for one in errors)
    code = next(filter(None, map(status_of, errors)), None)
    if code is None and (told := _TENSORSTORE.search(said)):
        code = int(told[1])
    if _CREDENTIALS.search(said) or code == 401:
        return StoreRefused(f"{url}: the credentials are missing, expired or wrong ({_short(error)}); "
                            f"{_HOW_TO_SIGN_IN[scheme]}")  # fmt: skip
    if code == 403 or isinstance(error, PermissionError) or _FORBIDDEN.search(said):
        return StoreRefused(f"{url}: no permission in bucket {bucket}; give this identity {_WHAT_IT_NEEDS[scheme]}")
    if code == 507 or "QuotaExceeded" in said:
        return StoreFull(f"{url}: bucket {bucket} is full; free some space and run the same command again")
    if "NoSuchBucket" in said:
        return missing_bucket(url)
    if code in _PASSING_CODES or _PASSING_TEXT.search(said) or any(map(_is_passing, errors)):
        return StoreFailed(f"{url}: the store does not answer ({_short(error)})")
    return None


def missing_bucket(url: str) -> StoreRefused:
    """Returns what to raise for an object of a bucket that is not there."""
    scheme, bucket, _ = split(url)
    make = f"gcloud storage buckets create gs://{bucket}" if scheme == "gs" else f"aws s3 mb s3://{bucket}"
    return StoreRefused(f"{url}: there is no bucket {bucket}; make it ({make}) or correct its name")


def chain(error: BaseException | None) -> list[BaseException]:
    """Returns an exception and what caused it, the nearest first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found[:4]


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status that an exception of a client carries."""
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    for value in (getattr(error, "code", None), getattr(error, "status", None), metadata.get("HTTPStatusCode")):
        if isinstance(value, int | str) and str(value).isdigit():
            return int(value)
    return None


def _is_passing(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    is_system = isinstance(error, ConnectionError | TimeoutError | InterruptedError)
    return is_system or bool(names.intersection(_PASSING_TYPES))


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def split(url: str) -> tuple[str, str, str]:
    """Returns the scheme, the bucket and the name in the bucket."""
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    return scheme, bucket, name


def gcs_object(bucket: str, name: str) -> str:
    """Returns the place of an object in the JSON API of Google Cloud Storage."""
    return f"b/{quote(bucket)}/o/{quote(name, safe='')}"


@functools.cache
def file_system(scheme: str) -> Any:
    """Returns the fsspec file system of a scheme.

    Raises:
      ConfigError: its package is not installed; the message names the extra.
    """
    package = SCHEMES[scheme]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{scheme}:// needs {package}, which is not installed: pip install 'maxbatch[{EXTRAS[scheme]}]'"
        )
    configure()
    import fsspec

    try:
        return fsspec.filesystem(scheme)
    except Exception as error:  # credentials that cannot be read, for one
        raise meaning(error, f"{scheme}://") from error


def configure() -> None:
    """Sets the clients up before they are made: what the environment says holds for all, TensorStore included."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if emulator:
        emulator = emulator if "://" in emulator else f"http://{emulator}"
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator.rstrip("/"))
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "anonymous")
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    for name in ("gcsfs", "s3fs", "aiobotocore", "botocore"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they log with a traceback what they also raise
    from fsspec.config import conf

    google, amazon = conf.setdefault("gs", {}), conf.setdefault("s3", {})
    for settings in (google, amazon):
        settings.setdefault("use_listings_cache", False)  # other processes write to the same folders
    if emulator:
        google.setdefault("token", "anon")
    if "requests_timeout" not in google and importlib.util.find_spec("aiohttp"):
        import aiohttp

        google["requests_timeout"] = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
    pool = {"max_pool_connections": MAX_REQUESTS}
    amazon.setdefault("config_kwargs", {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, **pool})
    for key, variable in (("key", "AWS_ACCESS_KEY_ID"), ("secret", "AWS_SECRET_ACCESS_KEY")):
        if key in amazon:  # FSSPEC_S3_KEY: TensorStore knows the other name only
            os.environ.setdefault(variable, str(amazon[key]))


def s3_endpoint() -> tuple[str | None, str]:
    """Returns the endpoint of S3, None for Amazon's own, and its region; TensorStore has to be told both."""
    configure()
    from fsspec.config import conf

    environment, settings = os.environ, conf.get("s3", {})
    endpoint = (
        settings.get("endpoint_url") or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    )
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    return endpoint or None, region
