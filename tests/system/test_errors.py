"""The message of a command that ends early: one line, for any content."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from maxbatch.config.yaml_file import compose
from maxbatch.data.tokenizers.chat_template import read_settings
from maxbatch.system.errors import (
    ConfigError,
    StoreFailed,
    StoreRefused,
    TrainingError,
    reading,
    report,
    writing,
)
from tests.helpers.command import environment


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a=1:\n  must\tbe 2"), 2, "maxbatch: error: a=1: must be 2"),
        (TrainingError("lost\r\nit"), 1, "maxbatch: error: lost it"),
        (ConfigError("a\0b \udce9 \x1b[2J\u2028é"), 2, r"maxbatch: error: a\x00b \udce9 \x1b[2J é"),
        (KeyboardInterrupt(), 1, "maxbatch: interrupted"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/x"),
            1,
            "maxbatch: error: /data/x: no space left on the disk; free some and run the same "
            "command again",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            1,
            "maxbatch: error: no space left on the disk; free some and run the same command again",
        ),
    ],
)
def test_what_ended_a_command_is_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    assert report(error) == code
    assert capsys.readouterr() == ("", f"{line}\n")


class JaxRuntimeError(RuntimeError):
    """As JAX's."""


def chained(error: BaseException) -> BaseException:
    bug = ValueError("what followed")
    bug.__context__ = error
    return bug


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "MemoryError"),
        (chained(MemoryError()), "MemoryError"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (
            ImportError("libx.so: failed to map segment from shared object"),
            "libx.so: failed to map segment",
        ),
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 8 bytes"),
            "RESOURCE_EXHAUSTED: Out of memory ",
        ),
    ],
)
def test_memory_that_runs_out_is_one_line(
    error: BaseException,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    most = 4_096_000_000
    for limit, advice in ((most, "4000000 kB (ulimit -v): raise it"), (resource.RLIM_INFINITY, "")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert report(error) == 1
        line = capsys.readouterr().err
        assert line.startswith(f"maxbatch: error: memory ran out ({said}") and line.count("\n") == 1
        assert advice in line and ("ulimit" in line) == bool(advice)


@pytest.mark.processes
def test_a_command_without_the_memory_to_load_its_modules_ends_in_one_line() -> None:
    variables = environment() | {"OPENBLAS_NUM_THREADS": "1"}
    for command in ("train", "data"):
        words = [
            "bash",
            "-c",
            f"ulimit -v 400000; exec {shlex.quote(sys.executable)} -m maxbatch {command} steps=1",
        ]
        ended = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 1 and ended.stdout == ""
        assert (
            ended.stderr.startswith("maxbatch: error: memory ran out (")
            and ended.stderr.count("\n") == 1
        )


def test_an_extension_module_that_ctrl_c_stops_while_it_loads_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = ImportError("Encountered an error while initializing the extension.")
    error.__cause__ = KeyboardInterrupt()
    told = ConfigError("trainer.py:make: cannot import trainer.py")
    told.__context__ = error
    for raised in (error, told):
        assert report(raised) == 1
        assert capsys.readouterr() == ("", "maxbatch: interrupted\n")


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ZeroDivisionError("a bug")) == 1
    assert capsys.readouterr().err.startswith("ZeroDivisionError: a bug")


@pytest.mark.parametrize(
    ("number", "kind", "line"),
    [
        (errno.EACCES, ConfigError, "a: cannot be written (Permission denied); give another place"),
        (
            errno.ENOSPC,
            TrainingError,
            "a: no space left on the disk; free some and run the same command again",
        ),
        (errno.EIO, TrainingError, "a: the disk fails (Input/output error)"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_line(
    number: int, kind: type[Exception], line: str
) -> None:
    with pytest.raises(kind) as raised, writing("a"):
        raise OSError(number, os.strerror(number))
    assert str(raised.value) == line


def test_a_file_that_cannot_be_read_is_one_line() -> None:
    refused = PermissionError(errno.EACCES, "Permission denied")
    for arguments, line in (
        ({}, "a: cannot be read (Permission denied)"),
        ({"remedy": "compile again"}, "a: cannot be read (Permission denied); compile again"),
        (
            {"blame": lambda problem: ConfigError(f"key=a: {problem}")},
            "key=a: cannot read a: Permission denied",
        ),
    ):
        with pytest.raises(ConfigError) as raised, reading("a", **arguments):  # type: ignore[arg-type]
            raise refused
        assert str(raised.value) == line


def test_a_store_that_refuses_names_the_key_of_the_file() -> None:
    refused = StoreRefused("s3://bucket/a: no permission in bucket bucket")
    with (
        pytest.raises(ConfigError) as raised,
        reading("a", blame=lambda problem: ConfigError(f"key=a: {problem}")),
    ):
        raise refused
    assert str(raised.value) == f"key=a: cannot read a: {refused}"
    with pytest.raises(StoreRefused), reading("a"):
        raise refused


@pytest.mark.parametrize(
    "read",
    [compose, lambda file: read_settings(file, ConfigError)],
    ids=["config file", "tokenizer's settings"],
)
def test_a_store_that_does_not_answer_is_no_fault_of_the_file(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise StoreFailed("s3://bucket/a.json: the store does not answer")

    file = tmp_path / "a.json"
    file.write_text("{}")
    monkeypatch.setattr("maxbatch.system.storage.bounded.read_bytes", fail)
    with pytest.raises(StoreFailed, match=r"^s3://bucket/a\.json: the store does not answer$"):
        read(file)


def test_a_line_that_quotes_a_library_at_length_keeps_its_beginning_and_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report(
        ConfigError(f"tokenizer_path=x: invalid type: {'9' * 100_000}; works: tokenizer_type=byte")
    )
    line = capsys.readouterr().err
    assert len(line) < 2100
    assert line.startswith("maxbatch: error: tokenizer_path=x: invalid type: 9")
    assert line.endswith("works: tokenizer_type=byte\n")
