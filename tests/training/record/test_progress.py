"""A bar on a terminal, greppable lines elsewhere; eval and skips are never lost in either."""

from __future__ import annotations

import io
import time
from contextlib import closing
from typing import Any

import pytest
from rich.console import Console

from maxbatch.training.record import progress
from maxbatch.training.record.progress import RunProgress


def record(step: int, **more: Any) -> dict[str, Any]:
    base = {"loss": 2.5, "global_batch_size": 16, "stage": 1, "learning_rate": 1e-3}
    return {"step": step, **base, "tokens_per_second": 12345.6, "grad_norm": 1.0, "mfu": None, "skipped": False, **more}


def lines(records: list[dict[str, Any]], num_stages: int = 1) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False)
    with closing(RunProgress(console, 20, 0, num_stages, 10)) as progression:
        for one in records:
            progression.append(one)
    return out.getvalue().splitlines()


def test_a_pipe_gets_the_first_the_last_and_every_tenth_update() -> None:
    shown = lines([record(step) for step in range(1, 21)])
    assert [line.split(" | ")[0] for line in shown] == ["step 1/20", "step 10/20", "step 20/20"]
    assert shown[0] == "step 1/20 | loss 2.5000 | batch 16 | lr 1.00e-03 | 12,346 tokens/s"


def test_eval_and_skips_are_shown_whenever_they_happen() -> None:
    shown = lines([record(3, eval_loss=2.25), record(4, skipped=True, loss=float("nan"), grad_norm=float("nan"))])
    assert shown[0].endswith("eval loss 2.2500") and shown[1].endswith("skipped: a gradient is not finite")


def test_stage_and_mfu_are_shown_where_there_are_any() -> None:
    (line,) = lines([record(1, mfu=0.431)], num_stages=4)
    assert "stage 1/3" in line and "MFU 43.1%" in line


def test_a_policy_shows_its_reward_and_what_it_passes() -> None:
    (line,) = lines([record(3, reward=0.5, eval_pass_at_1=0.75, eval_greedy_pass_at_1=0.875)])
    assert "| reward 0.500 |" in line and line.endswith("pass@1 0.750 (greedy 0.875)")


def test_a_narrow_terminal_tears_no_part_of_a_line() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=True, highlight=False)
    with closing(RunProgress(console, 20, 0, 1, 10)) as progression:
        progression._bar = None  # the lines alone
        progression.append(record(3, eval_loss=2.25))
    assert out.getvalue().splitlines() == [
        "step 3/20 | loss 2.5000 | batch 16 | lr 1.00e-03",
        "  12,346 tokens/s | eval loss 2.2500",
    ]


def test_a_pipe_gets_a_line_at_least_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.05)
    out = io.StringIO()
    with closing(RunProgress(Console(file=out, width=200), 20, 0, 1, 10)) as progression:
        progression.append(record(3))  # by itself too little for a line
        time.sleep(0.3)
    shown = out.getvalue().splitlines()
    assert shown[0].startswith("step 3/20 | loss 2.5000") and "s without an update" in shown[1]
    assert 3 <= len(shown) <= 7


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with closing(RunProgress(console, 20, 0, 1, 10)) as progression:
        assert progression._bar is not None
        progression.append(record(7))
        assert progression._bar.tasks[0].completed == 7
