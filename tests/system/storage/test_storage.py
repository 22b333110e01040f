"""One door to storage: the same methods on a disk, on gs:// and on s3://."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from google.auth.exceptions import RefreshError, TransportError

from maxbatch.system.errors import ConfigError, StoreFailed, StoreFull, StoreRefused
from maxbatch.system.storage import object_stores
from maxbatch.system.storage.atomic_files import write_atomically, writing_atomically
from maxbatch.system.storage.object_stores import read_version, remove_if, write_if
from maxbatch.system.storage.patience import Patience
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import (
    AnyPath,
    as_path,
    is_remote,
    probe,
    remove_tree,
    subfolders,
)
from tests.helpers.stores import SCHEMES, Store


@pytest.fixture(params=["disk", *SCHEMES])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    if request.param == "disk":
        return tmp_path
    store: Store = request.getfixturevalue(request.param)
    return as_path(store.bucket() + "/a/folder")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "seconds", 1.0)


def test_the_same_methods_do_the_same_wherever_a_path_lies(folder: AnyPath) -> None:
    file = folder / "b" / "one.json"
    assert not file.exists() and not file.is_file() and not (folder / "b").is_dir()
    with pytest.raises(FileNotFoundError):
        file.read_bytes()
    with pytest.raises(FileNotFoundError):
        list((folder / "b").iterdir())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "one é\n")
    assert file.read_text(encoding="utf-8") == "one é\n" and file.stat().st_size == 7
    write_atomically(folder / "b" / "two.bin", bytes(range(256)))
    (folder / "b" / "c").mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "b" / "c" / "three.json", b"3")
    assert (
        (folder / "b").is_dir()
        and not (folder / "b").is_file()
        and file.is_file()
        and not file.is_dir()
    )
    assert sorted(p.name for p in (folder / "b").iterdir()) == ["c", "one.json", "two.bin"]
    assert subfolders(folder / "b") == ["c"] and subfolders(folder) == ["b"]
    assert [str(p) for p in folder.glob("b/*.json")] == [str(file)]
    assert [p.name for p in folder.glob("*/c/thr*")] == ["three.json"]
    assert (file.name, file.suffix, file.parent.name) == ("one.json", ".json", "b")
    assert str(file.relative_to(folder)) == "b/one.json"
    with (folder / "b" / "two.bin").open("rb") as opened:
        opened.seek(250)
        assert opened.read() == bytes(range(250, 256))
    with file.open("r") as opened:
        assert opened.readlines() == ["one é\n"]
    (folder / "b").rename(folder / "moved")
    assert (folder / "moved" / "c" / "three.json").read_bytes() == b"3" and not (
        folder / "b"
    ).exists()
    (folder / "moved" / "one.json").unlink()
    (folder / "moved" / "one.json").unlink(missing_ok=True)
    remove_tree(folder / "moved")
    remove_tree(folder / "moved")
    assert not (folder / "moved").exists()


def test_a_file_that_is_written_bit_by_bit_appears_whole_or_not_at_all(folder: AnyPath) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = bytes(range(256)) * (6 << 12)  # 6 MiB: several parts of an upload
    with writing_atomically(folder / "large") as file:
        for begin in range(0, len(content), 1 << 20):
            file.write(content[begin : begin + (1 << 20)])
        assert not (folder / "large").exists()
    assert (folder / "large").read_bytes() == content
    with pytest.raises(KeyError), writing_atomically(folder / "broken") as file:
        file.write(b"not the whole")
        raise KeyError
    assert [p.name for p in folder.iterdir()] == ["large"]


def test_a_range_is_read_by_one_request(store: Store) -> None:
    path = as_path(store.bucket() + "/x")
    assert isinstance(path, RemotePath)
    path.write_bytes(bytes(range(100)))
    store.forget()
    assert path.read_range(10, 20) == bytes(range(10, 20)) and path.read_range(3, 3) == b""
    assert [(method, size) for _, method, _, size, _ in store.requests()] == [("GET", 10)]
    assert pickle.loads(pickle.dumps(path)) == path and is_remote(path) and is_remote(str(path))


# What no client would try again by itself; 503, 429 and broken connections they would, were it not
# left to us.
OURS_ALONE = ("425",)
REQUESTS: dict[str, Callable[[RemotePath, Path], object]] = {
    "write_bytes": lambda there, here: there.write_bytes(b"new"),
    "upload": lambda there, here: there.upload(here),
    "write_if": lambda there, here: write_if(there.url, b"new", read_version(there.url)[1]),
    "read_bytes": lambda there, here: there.read_bytes(),
    "read_range": lambda there, here: there.read_range(0, 2),
    "read_version": lambda there, here: read_version(there.url),
    "is_file": lambda there, here: there.is_file(),
    "stat": lambda there, here: there.stat().st_size,
    "iterdir": lambda there, here: list(there.parent.iterdir()),
    "file_sizes": lambda there, here: there.parent.file_sizes(),
    "files": lambda there, here: there.parent.files(),
    "copy": lambda there, here: there.copy(there.with_name("copy")),
    "unlink": lambda there, here: there.unlink(),
    "remove_if": lambda there, here: remove_if(there.url, read_version(there.url)[1]),
}


def an_object_and_a_file(store: Store, folder: Path) -> tuple[RemotePath, Path]:
    """An object that says "old" and a file that says "new"; the requests so far are forgotten."""
    there, here = as_path(store.bucket() + "/folder/x"), folder / "new"
    assert isinstance(there, RemotePath)
    there.write_bytes(b"old")
    here.write_bytes(b"new")
    store.forget()
    return there, here


@pytest.mark.parametrize("name", REQUESTS)
def test_what_fails_for_a_passing_reason_is_tried_again(
    store: Store, name: str, tmp_path: Path
) -> None:
    there, here = an_object_and_a_file(store, tmp_path)
    with store.failing(share=1.0, at_most=2, kinds=OURS_ALONE):
        assert REQUESTS[name](there, here) is not False
    assert [status for *_, status in store.requests()].count(425) == 2
    if name in ("write_bytes", "upload", "write_if"):
        assert there.read_bytes() == b"new"
    elif name in ("unlink", "remove_if"):
        assert not there.exists()


@pytest.mark.parametrize(
    "name", ["read_bytes", "read_range", "iterdir", "files", "file_sizes", "is_file"]
)
@pytest.mark.parametrize("kind", ["half", "truncate"])
def test_an_answer_of_200_with_half_a_body_is_asked_for_again(
    store: Store, name: str, kind: str, tmp_path: Path
) -> None:
    there, here = an_object_and_a_file(store, tmp_path)
    there.write_bytes(b"a whole object\n")
    expected = REQUESTS[name](there, here)
    with store.failing(share=1.0, at_most=2, kinds=(kind,), matching="^GET"):
        assert REQUESTS[name](there, here) == expected
    assert expected


@pytest.mark.parametrize(("kind", "status"), [("lost", 425), ("lost-503", 503), ("lost-reset", 0)])
@pytest.mark.parametrize("name", ["write_bytes", "upload", "copy", "unlink"])
def test_what_was_done_and_whose_answer_was_lost_is_done(
    store: Store, name: str, kind: str, status: int, tmp_path: Path
) -> None:
    there, here = an_object_and_a_file(store, tmp_path)
    with store.failing(share=1.0, at_most=2, kinds=(kind,), matching="^(PUT|POST|DELETE)"):
        REQUESTS[name](there, here)
    assert [answered for *_, answered in store.requests()].count(status) == 2
    expected = {"copy": {"copy": b"old", "x": b"old"}, "unlink": {}}.get(name, {"x": b"new"})
    assert {path.name: path.read_bytes() for path, _ in there.parent.files()} == expected


def test_whatever_way_a_request_fails_nothing_is_lost(store: Store) -> None:
    folder = as_path(store.bucket())
    with store.failing(share=0.15, seed=4):
        for number in range(10):
            path = folder / f"{number}"
            path.write_bytes(bytes([number]) * 1000)
            assert path.read_bytes() == bytes([number]) * 1000
    assert any(status not in (200, 204, 206, 404) for *_, status in store.requests())


def test_a_store_that_does_not_answer_is_given_up_after_a_bound_that_the_line_names(
    s3: Store, impatient: None
) -> None:
    path = as_path(s3.bucket() + "/x")
    with s3.failing(down=True), pytest.raises(StoreFailed) as caught:
        path.write_bytes(b"x")
    assert str(caught.value).startswith(f"{path}: the store does not answer (")
    assert "run the same command again" in str(caught.value) and "\n" not in str(caught.value)


def test_a_store_that_answers_again_is_waited_for(s3: Store) -> None:
    path = as_path(s3.bucket() + "/x")
    with s3.failing(share=1.0, kinds=OURS_ALONE):
        mended = threading.Timer(1.5, s3.plan)
        mended.start()
        path.write_bytes(b"x")
        mended.join()
    assert path.read_bytes() == b"x"


def test_a_refusal_is_one_line_with_the_bucket_and_what_to_do(store: Store) -> None:
    bucket = store.bucket()
    path = as_path(bucket + "/x")
    for fields, kind, words in (
        (
            {"denied": r"^(PUT|POST)"},
            StoreRefused,
            f"no permission in bucket {bucket[5:]}; give this identity",
        ),
        ({"full_after_bytes": 10, "full_status": 507}, StoreFull, f"bucket {bucket[5:]} is full"),
    ):
        started = time.monotonic()
        with store.failing(**fields), pytest.raises(kind) as caught:
            path.write_bytes(bytes(100))
        assert words in str(caught.value) and "\n" not in str(caught.value)
        assert time.monotonic() - started < 60
    missing = as_path(f"{store.scheme}://no-such-bucket-here/x")
    assert isinstance(missing, RemotePath)
    with pytest.raises(StoreRefused, match="there is no bucket no-such-bucket-here; make it"):
        probe(missing)


def answered(code: str, status: int) -> ClientError:
    return ClientError(
        {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject"
    )


@pytest.mark.parametrize(
    ("scheme", "error", "kind", "words"),
    [
        ("s3", NoCredentialsError(), StoreRefused, "the credentials are missing"),
        ("s3", answered("ExpiredToken", 400), StoreRefused, "the credentials are missing"),
        ("s3", answered("AccessDenied", 403), StoreRefused, "no permission in bucket b"),
        ("s3", answered("InternalError", 200), StoreFailed, "does not answer"),
        ("s3", answered("MalformedXML", 400), StoreRefused, "the store refuses"),
        ("s3", EndpointConnectionError(endpoint_url="x"), StoreFailed, "does not answer"),
        ("s3", ClientPayloadError(), StoreFailed, "does not answer"),
        ("gs", RefreshError(), StoreRefused, "the credentials are missing"),
        ("gs", lambda: _google_error(401), StoreRefused, "the credentials are missing"),
        ("gs", OSError("Forbidden: b/x"), StoreRefused, "no permission in bucket b"),
        ("gs", TransportError(), StoreFailed, "does not answer"),
        ("gs", lambda: _google_error("503"), StoreFailed, "does not answer"),
        ("gs", ClientPayloadError(), StoreFailed, "does not answer"),
        ("gs", ValueError("Bad Request"), StoreRefused, "the store refuses"),
    ],
)
def test_an_error_of_a_client_is_told_by_its_type_or_status(
    scheme: str,
    error: Exception | Callable[[], Exception],
    kind: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # gcsfs reads, when it is imported, what an emulator needs, and this process may use one later.
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    object_stores.configure()
    error = error if isinstance(error, Exception) else error()
    for one in (error, caused_by(error)):
        told = object_stores.meaning(one, f"{scheme}://b/x")
        assert type(told) is kind and words in str(told) and "\n" not in str(told)
    bug = KeyError("x")
    assert object_stores.meaning(bug, f"{scheme}://b/x") is bug


def _google_error(code: int | str) -> Exception:
    from gcsfs.retry import HttpError

    return HttpError({"code": code})


def caused_by(error: Exception) -> Exception:
    """An error of the system that a client raises from its own, as s3fs does."""
    raised = OSError("translated")
    raised.__cause__ = error
    return raised


def test_a_probe_leaves_nothing(store: Store) -> None:
    folder = as_path(store.bucket() + "/run")
    assert isinstance(folder, RemotePath)
    store.forget()
    probe(folder)
    methods = [method for _, method, *_ in store.requests()]
    assert methods[0] in ("PUT", "POST") and "GET" in methods and methods[-1] == "DELETE"
    assert not folder.exists()


def test_another_scheme_a_missing_bucket_and_a_missing_package_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text, words in (
        ("ftp://x/y", "must be a local path, gs:// or s3:// (ftp:// is not supported)"),
        ("gs:///y", "must be a local path or a URL with a bucket, such as gs://bucket/y"),
    ):
        with pytest.raises(ConfigError) as caught:
            as_path(text)
        assert words in str(caught.value)
    object_stores.file_system.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'maxbatch\[s3\]'"):
        as_path("s3://bucket/x")


def test_preconditions_hold_at_the_proxy(store: Store) -> None:
    """Of many writers that want to create one object, one does."""
    path = as_path(store.bucket() + "/lease")
    assert isinstance(path, RemotePath)
    made: list[int] = []

    def create(number: int) -> None:
        if write_if(path.url, str(number).encode(), None):
            made.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    content, version = read_version(path.url)
    assert content == str(made[0]).encode()
    newer = write_if(path.url, b"renewed", version)
    assert newer and write_if(path.url, b"late", version) is None
    assert read_version(path.url) == (b"renewed", newer)
    assert not remove_if(path.url, version) and remove_if(path.url, newer) and not path.exists()
