"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.storage.atomic_files import (
    descriptor_of,
    remove_leftovers,
    write_atomically,
    writing_atomically,
)


@pytest.mark.parametrize(
    ("content", "stored"), [("ä\n", "ä\n".encode()), (b"\xff\0", b"\xff\0"), ("\udce9", rb"\udce9")]
)
def test_text_and_bytes_replace_what_was_there(
    tmp_path: Path, content: str | bytes, stored: bytes
) -> None:
    path = tmp_path / "file"
    path.write_text("a longer text of before")
    write_atomically(path, content)
    assert path.read_bytes() == stored
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def test_nobody_sees_a_file_before_it_is_whole(tmp_path: Path) -> None:
    with writing_atomically(tmp_path / "file") as file:
        file.write(b"half")
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_bytes() == b"half"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failed_write_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(type(error)), writing_atomically(path) as file:
        file.write(b"half")
        raise error
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "raised", "said"),
    [
        (
            errno.ENOSPC,
            TrainingError,
            "no space left on the disk; free some and run the same command again",
        ),
        (errno.EDQUOT, TrainingError, "no space left on the disk"),
        (errno.EROFS, ConfigError, "cannot be written (Read-only file system); give another place"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: type[Exception], said: str
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(raised) as error:
        write_atomically(tmp_path / "file", "text")
    assert str(error.value).startswith(f"{tmp_path / 'file'}: {said}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["nowhere/file", "a-file/file", "folder", "."])
def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a-file").touch()
    with pytest.raises(ConfigError, match=r": cannot be written \("):
        write_atomically(Path(path), "text")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a-file", "folder"]


def test_leftovers_of_killed_writers_are_removed_after_a_day(tmp_path: Path) -> None:
    names = [".building-old", ".building-old-folder", ".building-new", "other"]
    for name in names:
        (tmp_path / name).mkdir() if "folder" in name else (tmp_path / name).touch()
    for name in (".building-old", ".building-old-folder", "other"):
        os.utime(tmp_path / name, (0, time.time() - 25 * 3600))
    remove_leftovers(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".building-new", "other"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_device_a_pipe_and_a_link_stay_what_they_are(tmp_path: Path) -> None:
    null, pipe, link = tmp_path / "null", tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    (tmp_path / "folder").mkdir()
    link.symlink_to(Path("folder", "file"))
    null.symlink_to("/dev/null")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    for path in (null, pipe, link):
        write_atomically(path, "text")
    reader.join(10)
    assert read == ["text"] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert null.is_symlink() and stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert link.is_symlink() and (tmp_path / "folder" / "file").read_text() == "text"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "link", "null", "pipe"]


def test_names_of_standard_streams_are_descriptors() -> None:
    # Not tried: what took /dev/stdout for a file would replace it for the whole machine.
    names = ["/dev/stdout", "/dev/../dev/stderr", "/dev/fd/63", "/dev/null", "/dev/fd", "stdout"]
    assert [descriptor_of(Path(name)) for name in names] == [1, 2, 63, None, None, None]


@pytest.mark.parametrize("name", ["/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_is_written_into_after_what_was_printed(tmp_path: Path, name: str) -> None:
    if not Path(name).exists():
        pytest.skip(f"no {name} here")
    program = (
        "import sys, pathlib; from maxbatch.system.storage.atomic_files import write_atomically\n"
        "print('before'); write_atomically(pathlib.Path(sys.argv[1]), 'page\\n'); print('after')"
    )
    output = tmp_path / "output"
    output.write_text("of another command\n")
    with output.open("ab") as file:
        subprocess.run([sys.executable, "-c", program, name], stdout=file, check=True, timeout=60)
    assert output.read_text() == "of another command\nbefore\npage\nafter\n"
    assert list(tmp_path.iterdir()) == [output]
