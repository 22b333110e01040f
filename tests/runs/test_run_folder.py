"""A run folder has one writer, its files are whole, and `step` is always 1, 2, 3, ...."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxbatch import ConfigError
from maxbatch.runs.run_folder import MetricsLog, RunFolder


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_second_process_is_refused_and_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    with RunFolder(str(tmp_path / "run")), pytest.raises(ConfigError, match=r"run_dir=.*another process"):
        RunFolder(str(tmp_path / "run"))
    with RunFolder(str(tmp_path / "run")):
        pass


def test_a_run_dir_that_cannot_be_made_is_the_users_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run_dir="):
        RunFolder(str(tmp_path / "file" / "run"))


def test_lines_of_updates_that_are_redone_and_torn_ones_are_dropped(tmp_path: Path) -> None:
    with RunFolder(str(tmp_path)) as folder:
        log = MetricsLog(folder, 0)
        for step in range(1, 6):
            log.append({"step": step})
        log.close()
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"step": 6, "lo')
        log = MetricsLog(folder, 3)
        assert steps_in(tmp_path) == [1, 2, 3]
        log.append({"step": 4})
        log.close()
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_a_torn_last_line_alone_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    with RunFolder(str(tmp_path)) as folder:
        MetricsLog(folder, 2).close()
    assert steps_in(tmp_path) == [1]


def test_metrics_are_json_even_where_a_loss_is_not_finite(tmp_path: Path) -> None:
    with RunFolder(str(tmp_path)) as folder:
        log = MetricsLog(folder, 0)
        log.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
        log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1, "loss": None, "grad_norm": None, "mfu": None,
    }  # fmt: skip
