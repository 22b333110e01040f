"""A bar on a terminal, greppable lines elsewhere; eval and skips are never lost in either."""

from __future__ import annotations

import io
import time
from contextlib import closing
from typing import Any

import pytest
from rich.console import Console

from maxbatch.run.record import progress
from maxbatch.run.record.progress import RunProgress


def record(step: int, **more: Any) -> dict[str, Any]:
    base = {"loss": 2.5, "global_batch_size": 16, "stage": 1, "learning_rate": 1e-3}
    return {
        "step": step,
        **base,
        "tokens_per_second": 12345.6,
        "grad_norm": 1.0,
        "mfu": None,
        "skipped": False,
        "skip_reason": None,
        **more,
    }


def doing() -> str:
    return "compiling"


def lines(records: list[dict[str, Any]], num_stages: int = 1, counted: str = "") -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False)
    with closing(RunProgress(console, 20, 0, num_stages, 10, doing, counted)) as progression:
        for one in records:
            progression.append(one)
    return out.getvalue().splitlines()


def test_a_pipe_gets_the_first_the_last_and_every_tenth_update() -> None:
    shown = lines([record(step) for step in range(1, 21)])
    assert [line.split(" | ")[0] for line in shown] == ["step 1/20", "step 10/20", "step 20/20"]
    assert shown[0] == "step 1/20 | loss 2.5000 | batch 16 | lr 1.00e-03 | 12,346 tokens/s"


def test_eval_and_skips_are_shown_whenever_they_happen() -> None:
    shown = lines(
        [
            record(3, eval_loss=2.25),
            record(
                4,
                skipped=True,
                skip_reason="non-finite",
                loss=float("nan"),
                grad_norm=float("nan"),
            ),
            record(5, skipped=True, skip_reason="spike"),
        ]
    )
    assert shown[2].endswith("skipped: a spike of the loss or the gradient norm")
    assert shown[0].endswith("eval loss 2.2500") and shown[1].endswith(
        "skipped: a gradient is not finite"
    )


def test_a_line_has_the_time_left_at_the_pace_of_the_samples_since_the_first_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, now = io.StringIO(), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = Console(file=out, width=200, highlight=False, quiet=False)
    # A ramp: the second half of the updates has most of the samples.
    progression = RunProgress(console, 40, 0, 2, 10, doing, total_samples=1000)
    with closing(progression):
        now[0] += 600  # compiling
        for step, samples in ((1, 10), (10, 110), (20, 210), (40, 1000)):
            progression.append(record(step, samples_seen=samples))
            now[0] += 20
    shown = out.getvalue().splitlines()
    assert [line.rpartition(" | ")[2] for line in shown[1:3]] == ["0:02:58 left", "0:02:38 left"]
    assert not shown[0].endswith("left") and not shown[3].endswith("left")


def test_stage_and_mfu_are_shown_where_there_are_any() -> None:
    (line,) = lines([record(1, mfu=0.431)], num_stages=4)
    assert "stage 1/3" in line and "MFU 43.1%" in line


def test_a_policy_shows_its_reward_and_what_it_passes() -> None:
    (line,) = lines(
        [
            record(
                3, reward=0.5, eval_pass_at_1=0.75, eval_greedy_pass_at_1=0.875, eval_reward=0.4375
            )
        ]
    )
    assert "| reward 0.500 |" in line and line.endswith(
        "pass@1 0.750 (greedy 0.875) | eval reward 0.438"
    )


def test_a_zero_has_no_sign() -> None:
    (line,) = lines([record(1, loss=-1e-9, reward=-1e-9, margin=-1e-9)])
    assert "loss 0.0000 | reward 0.000 | margin 0.000 |" in line


def test_pairs_show_their_margin_and_accuracy_and_are_counted_as_pairs() -> None:
    (line,) = lines([record(1, margin=0.25, pair_accuracy=0.625)], counted="pairs")
    assert "| margin 0.250 | accuracy 62% | batch 16 pairs |" in line


def test_a_narrow_terminal_tears_no_part_of_a_line() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=True, highlight=False)
    with closing(RunProgress(console, 20, 0, 1, 10, doing)) as progression:
        progression.append(record(3, eval_loss=2.25))
    torn = (
        "step 3/20 | loss 2.5000 | batch 16 | lr 1.00e-03\n  12,346 tokens/s | eval loss 2.2500\n"
    )
    assert torn in out.getvalue()


def test_a_pipe_gets_a_line_after_half_a_minute_and_fewer_while_it_waits_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.1)
    out = io.StringIO()
    with closing(RunProgress(Console(file=out, width=200), 20, 0, 1, 10, doing)) as progression:
        progression.append(record(3))  # by itself too little for a line
        time.sleep(1.2)
    shown = out.getvalue().splitlines()
    assert (
        shown[0].startswith("step 3/20 | loss 2.5000") and "step 3/20 | compiling, 0 s" in shown[1]
    )
    assert 3 <= len(shown) <= 5  # after 0.1, 0.2, 0.4 and 0.8 s


def test_a_terminal_counts_the_seconds_of_a_compilation_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "_TICK_S", 0.02)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with closing(RunProgress(console, 20, 0, 1, 10, doing)):
        time.sleep(1.3)
    shown = out.getvalue()
    assert "step 0/20 | compiling, 0 s" in shown and "step 0/20 | compiling, 1 s" in shown
    # the bar's own line, erased at the end
    assert shown.count("\n") == 1 and shown.endswith("\x1b[1A\x1b[2K")


def test_what_the_compiler_writes_overwrites_the_waiting_bar_and_does_not_follow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "_TICK_S", 0.02)
    out = io.StringIO()
    with closing(
        RunProgress(Console(file=out, force_terminal=True, width=120), 20, 0, 1, 10, doing)
    ) as progression:
        time.sleep(0.5)
        assert out.getvalue().endswith("\r") and "compiling" in out.getvalue()
        progression.append(record(1))
        progression._bar.refresh()
        assert not out.getvalue().endswith("\r")


def test_the_last_update_takes_the_place_of_the_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, highlight=False)
    with closing(RunProgress(console, 20, 0, 1, 10, doing)) as progression:
        for step in (1, 2, 3):
            progression.append(record(step))
    *_, last = out.getvalue().splitlines()
    assert last.endswith("step 3/20 | loss 2.5000 | batch 16 | lr 1.00e-03 | 12,346 tokens/s")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_slow_compilation_is_explained_once(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    for name, seconds in {"_TICK_S": 0.02, "LINE_S": 0.02, "_SLOW_COMPILE_S": 0.1}.items():
        monkeypatch.setattr(progress, name, seconds)
    for activity, times in (("compiling", 1), ("saving", 0)):
        out = io.StringIO()
        console = Console(file=out, force_terminal=is_terminal, width=200)
        with closing(RunProgress(console, 20, 0, 1, 10, lambda activity=activity: activity)):
            time.sleep(0.5)
        assert out.getvalue().count("is not an error") == times


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with closing(RunProgress(console, 20, 0, 1, 10, doing)) as progression:
        assert progression._bar is not None
        progression.append(record(7))
        assert progression._bar.tasks[0].completed == 7
