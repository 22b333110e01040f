"""SIGTERM at the moments at which a run does not train."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import multihost_utils

from maxbatch.cli import main
from maxbatch.run import signals
from maxbatch.run.context import RunContext
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.run.folder.sessions import SessionLog, read_sessions
from maxbatch.run.signals import StopRequest
from maxbatch.system.processes import stopping
from tests.helpers.tiny import TINY_MODEL, read_metrics, tiny_config

RUN = (
    *TINY_MODEL,
    "base_num_decoder_layers=1",
    "dataset_type=synthetic",
    "synthetic_samples=500",
    "eval_fraction=0.02",
    "eval_interval=2",
    "checkpoint_period=2",
    "steps=4",
    "per_device_batch_size=1",
    "run_dir=run",
)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("moment", "code", "step"),
    [
        ("maxbatch.run.weights.checkpoints.Checkpoints.save", 75, 2),
        ("maxbatch.run.evaluation.Evaluator.__call__", 75, 2),
        ("maxbatch.run.pretraining.continued_text", 0, 4),
        ("maxbatch.run.session.Session._check_result", 0, 4),
    ],
)
def test_sigterm_while_saving_evaluating_or_sampling_leaves_a_checkpoint_that_the_line_names(
    moment: str,
    code: int,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    place, _, name = moment.rpartition(".")
    module, _, kind = place.rpartition(".")
    owner: Any = __import__(place if kind.islower() else module, fromlist=["x"])
    owner = owner if kind.islower() else getattr(owner, kind)
    do = getattr(owner, name)

    def do_and_be_asked_to_stop(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return do(*arguments, **options)

    monkeypatch.setattr(owner, name, do_and_be_asked_to_stop)
    assert main(["train", *RUN]) == code
    said = capfd.readouterr().out
    assert committed_steps(Path("run"))[0] == step == len(read_metrics("run"))
    assert (f"stopped by SIGTERM at step {step}" if code else f"done: step {step}") in said
    assert ("--- a sample" in said) == (name == "continued_text")
    assert "eval_loss" in read_metrics("run")[1]


def test_a_signal_right_after_the_first_line_of_a_session_is_recorded_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter, ended_by = SessionLog.__enter__, []

    def enter_and_be_ended(log: SessionLog) -> SessionLog:
        entered = enter(log)
        (stop,) = stopping._OPEN
        assert stop.end_at_once is not None, "there is nothing to save"
        stop.end_at_once("SIGTERM")
        ended_by.append(read_sessions(Path("run"))[-1].ended_by)
        return entered

    monkeypatch.setattr(signals, "owns_process", lambda: True)
    # in a process that ends they would be the last things done
    monkeypatch.setattr(signals, "end_unsaved", lambda name: None)
    monkeypatch.setattr(RunFolder, "leave", lambda folder: None)
    monkeypatch.setattr(SessionLog, "__enter__", enter_and_be_ended)
    with ExitStack() as stack:
        RunContext(tiny_config("run_dir=run"), jax.devices()[:1], stack)
    assert ended_by == ["SIGTERM"]


def test_several_hosts_count_every_question_also_over_two_runs_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They stop at the question after the last that any of them has asked, so no number may be
    passed over.
    """
    asked: list[int] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "reached_preemption_sync_point", lambda number: asked.append(number)
    )
    for _ in range(2):
        with StopRequest() as stop:
            assert not stop.before_update() and not stop.before_update()
    assert asked == list(range(asked[0], asked[0] + 4))
