"""The steps of `metrics.jsonl` are always 1, 2, 3, ...; a hole is reported once, and never gives a
traceback.
"""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from maxbatch import ConfigError
from maxbatch.run.folder.metrics import lines_between, lines_until, read_metrics
from maxbatch.run.folder.metrics_log import MetricsLog, StepLog
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.system.errors import TrainingError

BATCH = 8


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder(str(tmp_path)) as folder:
        yield folder


def record(step: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": step,
        "samples_seen": BATCH * step,
        "tokens_seen": 32 * BATCH * step,
        "global_batch_size": BATCH,
        "stage": 0,
        "loss": 1.5,
        "learning_rate": 0.01,
        **fields,
    }


def lines_of(*steps: int) -> list[str]:
    return [json.dumps(record(step)) + "\n" for step in steps]


def steps_in(folder: RunFolder) -> list[int]:
    return [
        json.loads(line)["step"]
        for line in (folder.path / "metrics.jsonl").read_text().splitlines()
    ]


def resume(folder: RunFolder, step: int) -> list[str]:
    """Opens the metrics at a step, appends the line of the next one and returns the warnings."""
    warnings: list[str] = []
    log = MetricsLog(folder, step, BATCH * step, warnings.append)
    log.append(record(step + 1))
    log.close()
    return warnings


def test_lines_of_updates_that_are_redone_and_torn_ones_are_dropped(folder: RunFolder) -> None:
    log = MetricsLog(folder, 0, 0, pytest.fail)
    for step in range(1, 6):
        log.append(record(step))
    log.close()
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    log = MetricsLog(folder, 3, 3 * BATCH, pytest.fail)
    assert steps_in(folder) == [1, 2, 3]
    log.append(record(4))
    log.close()
    assert steps_in(folder) == [1, 2, 3, 4]


def test_a_torn_last_line_alone_is_dropped(folder: RunFolder) -> None:
    (folder.path / "metrics.jsonl").write_text("".join(lines_of(1, 2))[:-1])
    (warning,) = resume(folder, 2)
    assert steps_in(folder) == [1, 3] and "(step 2)" in warning


def test_metrics_are_json_even_where_a_loss_is_not_finite(folder: RunFolder) -> None:
    log = StepLog(folder, "metrics.jsonl", 0)
    log.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    log.close()
    assert json.loads((folder.path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "mfu": None,
    }


HOLES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], list[int]]] = {
    "missing": (lambda lines: lines[:2] + lines[4:], [3, 4]),
    "the first": (lambda lines: lines[1:], [1]),
    "all": (lambda lines: [], [1, 2, 3, 4, 5, 6]),
    "doubled": (lambda lines: lines[:3] + lines[2:], [3]),
    "garbled": (lambda lines: [*lines[:2], b'{"step": 3, "los\n', *lines[3:]], [3]),
    "of another type": (lambda lines: [*lines[:2], b"[3]\n", b"null\n", b"3\n", *lines[3:]], [3]),
    "nested too deep": (lambda lines: [*lines[:2], b"[" * 100_000 + b"\n", *lines[3:]], [3]),
    "not UTF-8": (
        lambda lines: [*lines[:2], b'\xff{"step": 3}\n', b'{"step": 3, "\x80": 1}\n', *lines[3:]],
        [3],
    ),
    "with a text for a number": (
        lambda lines: [*lines[:2], changed(3, samples_seen="24"), *lines[3:]],
        [3],
    ),
    "with a true step": (lambda lines: [b'{"step": true}\n', *lines[1:]], [1]),
    "ahead of the position": (
        lambda lines: [*lines[:2], changed(3, samples_seen=9999), *lines[3:]],
        [3],
    ),
    "behind the one before": (
        lambda lines: [*lines[:2], changed(3, samples_seen=9), *lines[3:]],
        [3],
    ),
    "off by one": (lambda lines: [*lines[:2], changed(3, samples_seen=25), *lines[3:]], [3]),
    "other than the checkpoint": (lambda lines: [*lines[:5], changed(6, samples_seen=47)], [6]),
}


def changed(step: int, **fields: Any) -> bytes:
    return json.dumps(record(step, **fields)).encode() + b"\n"


@pytest.mark.parametrize("name", HOLES)
def test_a_hole_is_said_once_and_the_sound_lines_stay(folder: RunFolder, name: str) -> None:
    damage, holes = HOLES[name]
    path = folder.path / "metrics.jsonl"
    path.write_bytes(b"".join(damage([line.encode() for line in lines_of(1, 2, 3, 4, 5, 6)])))
    (warning,) = resume(folder, 6)
    assert "\n" not in warning and str(path) in warning
    assert f"(step {', '.join(map(str, holes[:5]))}" in warning
    lost = [] if name == "doubled" else holes
    assert steps_in(folder) == [step for step in range(1, 8) if step not in lost]
    assert len(read_metrics(folder.path)) == 7 - len(lost), "what is left can be read"


def test_many_holes_are_one_short_warning(folder: RunFolder) -> None:
    (warning,) = resume(folder, 10**13)
    assert "and 9999999999995 more" in warning, "at once, whatever the step"
    (warning,) = resume(folder, 1000)
    assert "(step 1, 2, 3, 4, 5 and 995 more)" in warning and len(warning) < 300


def test_lines_out_of_order_are_put_in_order(folder: RunFolder) -> None:
    (folder.path / "metrics.jsonl").write_text("".join(lines_of(2, 1, 3)))
    assert resume(folder, 3) == [] and steps_in(folder) == [1, 2, 3, 4]


def test_several_updates_from_the_same_prompts_are_no_hole(folder: RunFolder) -> None:
    updates = [record(step, samples_seen=seen) for step, seen in enumerate((0, 4, 4, 8), start=1)]
    (folder.path / "metrics.jsonl").write_text(
        "".join(json.dumps(update) + "\n" for update in updates)
    )
    MetricsLog(folder, 4, 8, pytest.fail).close()


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b"[1]", "must be a JSON object with a whole `step`"),
        (b'{"step": true}', "must be a JSON object with a whole `step`"),
        (b'\xff{"step": 1}', "must be a JSON object with a whole `step`"),
        (b'{"step": 1}', "must have a sound `samples_seen`"),
        (changed(1, loss="low").strip(), "must have a sound `loss`"),
        (changed(1, tokens_seen=None).strip(), "must have a sound `tokens_seen`"),
        (changed(1, eval_loss=[]).strip(), "must have a sound `eval_loss`"),
        (changed(1, samples_by_source=3).strip(), "must have a sound `samples_by_source`"),
    ],
)
def test_a_line_that_is_no_record_is_named_by_its_number(
    tmp_path: Path, line: bytes, rule: str
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n" + lines_of(2)[0].encode())
    with pytest.raises(ConfigError) as error:
        read_metrics(tmp_path)
    assert str(error.value) == f"{tmp_path / 'metrics.jsonl'}:1: {rule}"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_metrics_that_are_no_file_are_one_line(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"metrics.jsonl: must be a file"):
        read_metrics(tmp_path)


def test_a_full_disk_leaves_no_half_line(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(folder, 0, 0, pytest.fail)
    log.append(record(1))
    path = folder.path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        # the limit says EFBIG, not ENOSPC
        with pytest.raises(ConfigError, match="cannot be written"):
            log.append(record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert steps_in(folder) == [1]
    log.append(record(2))  # with room again it goes on

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match="no space left on the disk"):
        log.sync()
    log.close()
    assert steps_in(folder) == [1, 2]


def test_a_resume_and_a_fork_keep_long_lines_of_responses(folder: RunFolder) -> None:
    lines = [{"step": step, "trained": [{"response": "a" * (1 << 21)}]} for step in (1, 3)]
    path = folder.path / "transcripts.jsonl"
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    before = path.read_bytes()
    StepLog(folder, "transcripts.jsonl", 3).close()
    assert path.read_bytes() == before
    assert b"".join(lines_until(path, 3)) == before and len(lines_until(path, 2)) == 1
    assert [line["step"] for line in lines_between(path, 1, 3)] == [3]
