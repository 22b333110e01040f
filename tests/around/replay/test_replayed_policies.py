"""Updates of reinforcement learning are taken again, response by response."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxbatch.around.replay import replayed
from maxbatch.around.replay.policy_task import Response
from maxbatch.around.replay.recorded_run import RecordedRun
from maxbatch.around.replay.replayed import Replayed, ShownUpdate, Wanted, replay
from maxbatch.cli import main
from maxbatch.kinds.prompt.rewards import Rewards
from maxbatch.kinds.prompt.rollout import Roller
from tests.around.replay.test_replay import content
from tests.helpers.policies import train

pytestmark = pytest.mark.runs

# Batches of four updates each, sampled one batch ahead.
KEYS = (
    "batch_size=4",
    "num_generations=2",
    "num_minibatches=2",
    "num_iterations=2",
    "off_policy_steps=1",
    "filter_groups=true",
    "grpo_beta=0.05",
    "transcript_period=1",
    "checkpoint_period=4",
    "learning_rate_schedule=constant",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three batches on two devices, the third with another rate; all responses are kept."""
    folder = tmp_path_factory.mktemp("policy") / "run"
    train(folder, *KEYS, "steps=8", devices=2)
    train(folder, *KEYS, "steps=12", "learning_rate=1e-3", devices=2)
    return folder


@pytest.fixture(scope="module")
def drawn(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    """Update 11, on one device, of a copy of the run that has kept no response: those of the second
    batch are in the checkpoint, and those of the third are drawn again.
    """
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(run_dir, copy)
    (copy / "transcripts.jsonl").unlink()
    before = content(copy)
    found = replay(RecordedRun(str(copy)), 4, Wanted(11, has_losses=True), jax.devices()[:1])
    assert content(copy) == before, "replay changes no byte of RUN"
    return found


def responses_of(update: ShownUpdate) -> list[dict[str, Any]]:
    contents = [one.content for one in update.samples]
    assert all(isinstance(content, Response) for content in contents)
    return [content.trained._asdict() for content in contents if isinstance(content, Response)]


def kept_by(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Returns the responses of the batch whose first update is `step`."""
    lines = map(json.loads, (run_dir / "transcripts.jsonl").read_text().splitlines())
    return next(line["trained"] for line in lines if line["step"] == step)


def check_batch(update: ShownUpdate) -> None:
    """Checks that the responses of an update make its batch."""
    samples = [one.sample for one in update.samples]
    losses = np.array([sample.loss for sample in samples], float)
    mean = np.average(losses, weights=[sample.weight for sample in samples])
    assert mean == pytest.approx(update.figures.loss, abs=1e-5)
    shares = np.array([sample.share for sample in samples], float)
    assert shares.sum() == pytest.approx(1, abs=1e-4)


def test_responses_that_are_not_kept_are_drawn_again_and_make_the_recorded_updates(
    run_dir: Path, drawn: Replayed
) -> None:
    assert drawn.differences == [], "those of updates 5 to 11, over the resume"
    check_batch(drawn.update)
    assert responses_of(drawn.update) == kept_by(run_dir, 9)[:4], (
        "the first mini-batch of the third batch, in its second iteration"
    )


def test_kept_responses_are_neither_sampled_nor_scored_and_serve_all_updates_of_their_batch(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RecordedRun(str(run_dir))
    monkeypatch.setitem(run.__dict__, "lines", {k: v for k, v in run.lines.items() if k != 2})

    def never(*_: object) -> None:
        raise AssertionError("nothing is sampled or scored")

    monkeypatch.setattr(Roller, "start", never)
    monkeypatch.setattr(Rewards, "submit", never)
    found = replay(run, None, Wanted(7, around=2), jax.devices()[:1])
    assert found.differences == []
    assert "update 2 has no line in" in capsys.readouterr().err, "a hole in metrics.jsonl"
    for update in found.shown:
        check_batch(update)
    first, second, third = map(responses_of, found.shown)
    assert first == third == kept_by(run_dir, 5)[:4] and second == kept_by(run_dir, 5)[4:]
    assert [one.sample.loss for one in found.shown[0].samples] != [
        one.sample.loss for one in found.shown[2].samples
    ]


def test_a_response_is_shown_with_its_prompt_and_its_reward(
    run_dir: Path,
    drawn: Replayed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(replayed, "replay", lambda *_: drawn)
    page = tmp_path / "page.html"
    command = ["replay", str(run_dir), "--step", "11", "--html", str(page)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kept = kept_by(run_dir, 9)
    for one, response in zip(found["samples"], kept, strict=False):
        assert one["index"] == response["prompt_index"] and one["tokens"] == len(response["tokens"])
        for name in ("prompt", "response", "reward", "rewards", "advantage"):
            assert one[name] == response[name]
    assert [one["response_number"] for one in found["samples"]] == [0, 1, 0, 1]
    numbers = sorted({one["index"] for one in found["samples"]})
    assert found["skip_samples"].startswith(f"{numbers[0]}:")
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "number" in printed and "reward" in printed and "documents" not in printed
    text = page.read_text()
    assert f"Sample {numbers[0]}, response 0, with the reward" in text
    assert "<script" not in text and 'title="' in text
