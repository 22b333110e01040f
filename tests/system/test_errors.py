"""What a user reads when a command ends early: one line, whatever is in it."""

from __future__ import annotations

import errno

import pytest

from maxbatch.system.errors import ConfigError, TrainingError, report


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a=1:\n  must\tbe 2"), 2, "maxbatch: error: a=1: must be 2"),
        (TrainingError("lost\r\nit"), 1, "maxbatch: error: lost it"),
        (ConfigError("a\0b \udce9 \x1b[2J\u2028é"), 2, r"maxbatch: error: a\x00b \udce9 \x1b[2J é"),
        (KeyboardInterrupt(), 1, "maxbatch: interrupted"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/x"), 1,
            "maxbatch: error: /data/x: no space left on the disk; free some and run the same command again",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded"), 1,
            "maxbatch: error: no space left on the disk; free some and run the same command again",
        ),
    ],
)  # fmt: skip
def test_what_ended_a_command_is_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    assert report(error) == code
    assert capsys.readouterr() == ("", f"{line}\n")


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ZeroDivisionError("a bug")) == 1
    assert capsys.readouterr().err.startswith("ZeroDivisionError: a bug")
