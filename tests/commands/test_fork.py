"""`maxbatch fork`: the run that goes on from it is the other run, but for the keys that it changes."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from maxbatch import load_config
from maxbatch.cli import main
from maxbatch.config.loading import dump_config
from maxbatch.config.values import value_text
from maxbatch.run.folder.position import committed_steps, read_record
from maxbatch.run.folder.run_folder import SESSIONS_FILE
from maxbatch.run.folder.run_id import read_identity
from maxbatch.run.folder.sessions import Changed, Session, TimePart
from maxbatch.run.pretraining import train
from tests.helpers.measured_runs import fake_run
from tests.helpers.tiny import assert_same_run, one_layer_config, read_metrics
from tests.run.folder.test_fork import content

ONE = jax.devices()[:1]


def fork(run: Path, new: Path, *words: str, step: int = 80) -> int:
    return main(["fork", str(run), "--step", str(step), "--output", str(new), *words])


@pytest.mark.runs
def test_a_fork_goes_on_as_its_run_did_and_says_whose_state_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    keys = ("steps=8", "checkpoint_period=4", "global_batch_size=8", "learning_rate_schedule=wsd")
    train(one_layer_config(*keys, "log_to=tensorboard", f"run_dir={run}"), ONE)
    before, _ = content(run), capsys.readouterr()
    assert fork(run, new, step=4) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{new}: a fork of {run} at step 4, after 32 samples"
    assert said[-1] == f"next: maxbatch train {new}/config.yml" and len(said) == 3
    train(load_config(str(new / "config.yml")), ONE)
    assert_same_run(read_metrics(new), read_metrics(run))
    assert (
        (new / "metrics.jsonl")
        .read_bytes()
        .startswith(
            b"".join(line + b"\n" for line in (run / "metrics.jsonl").read_bytes().splitlines()[:4])
        )
    )
    origin = read_record(new / "checkpoints/8").forked_from
    assert origin is not None and origin["run_id"] == read_identity(run).run_id
    assert content(run) == before

    # Another rate and a hole ahead, of which a resume would say the same.
    other = tmp_path / "other"
    assert fork(run, other, "learning_rate=1e-4", "skip_samples=40:48", step=4) == 0
    said = capsys.readouterr().out
    assert "learning_rate: 0.01 before, 0.0001 now: changes the learning rate" in said
    assert "skip_samples: " in said
    train(load_config(str(other / "config.yml")), ONE)
    ours, theirs = read_metrics(other), read_metrics(run)
    assert [line["data_fingerprint"] for line in ours[:5]] == [
        line["data_fingerprint"] for line in theirs[:5]
    ]
    assert [line["data_fingerprint"] for line in ours[5:7]] == [
        line["data_fingerprint"] for line in theirs[6:8]
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return fake_run(tmp_path / "run", updates=200)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["base_emb_dim=64"], "base_emb_dim=64: a fork goes on with the stream and the model of "
         "its run; works: base_emb_dim=32"),
        (["data_shuffle_seed=3"], "data_shuffle_seed=3: a fork goes on with the stream and the "
         "model of its run; works: data_shuffle_seed=0"),
        (["skip_samples=100:200"], "skip_samples=100:200: must leave out what the run has left "
         "out before its checkpoint of step 80, after 1280 samples; works: skip_samples="),
        (["enable_checkpointing=false"], "enable_checkpointing=false: must be true in a fork, "
         "which goes on from its checkpoint; works: enable_checkpointing=true"),
        (["run_dir=elsewhere"], "run_dir=elsewhere: --output names the folder of the fork; leave "
         "run_dir out"),
        (["learning_rat=1"], "unknown key learning_rat"),
        (["fast"], "fast: an override is key=value; maxbatch fork takes one RUN"),
    ],
)  # fmt: skip
def test_keys_that_a_resume_refuses_are_refused_and_nothing_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], refused: str
) -> None:
    before = content(run)
    assert fork(run, tmp_path / "new", *words) == 2
    assert refused in capsys.readouterr().err
    assert content(run) == before and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_wrong_step_or_folder_is_one_line_that_names_one_that_works(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(new: Path, step: int, of: Path = run) -> str:
        assert fork(of, new, step=step) == 2
        return capsys.readouterr().err.removeprefix("maxbatch: error: ").strip()

    new = tmp_path / "new"
    assert refusal(new, 100) == (
        f"{run}: has no checkpoint of step 100; the nearest: 80 and 160; works: --step 80"
    )
    assert refusal(run, 80) == (
        f"{run}: is there already, and a fork is a new run; works: --output {run}-2"
    )
    assert refusal(run / "inside", 80) == (
        f"--output {run}/inside: must not be in RUN, which a fork leaves as it is; works: "
        f"--output {run}-2"
    )
    assert "no such folder" in refusal(new, 80, tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "no run here (no config.yml)" in refusal(new, 80, tmp_path / "empty")
    for step in committed_steps(run):
        (run / f"checkpoints/{step}/position/metadata").unlink()
    assert "checkpoints/80: cannot be forked: " in refusal(new, 80)
    assert not new.exists()


def test_a_fork_has_the_config_that_its_run_had_then_and_says_what_changed_later(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = load_config(str(run / "config.yml")).learning_rate
    changed = {"learning_rate": ["0.25", value_text(rate)]}
    sessions = [_session(1, 160, {}), _session(161, 200, changed)]
    (run / SESSIONS_FILE).write_text("".join(json.dumps(one.to_json()) + "\n" for one in sessions))
    assert fork(run, tmp_path / "before", step=80) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[2] == f"as in update 81 of {run}, which later changed:"
    assert said[3].startswith(f"learning_rate: 0.25 before, {value_text(rate)} now: changes")
    assert load_config(str(tmp_path / "before/config.yml")).learning_rate == 0.25
    # Of the last update of a session the next session's, with which the run went on.
    assert fork(run, tmp_path / "after", step=160) == 0
    assert "later" not in capsys.readouterr().out
    assert load_config(str(tmp_path / "after/config.yml")).learning_rate == rate
    # An older maxbatch has not recorded the keys.
    sessions[1] = sessions[1]._replace(changed=None)
    (run / SESSIONS_FILE).write_text("".join(json.dumps(one.to_json()) + "\n" for one in sessions))
    assert fork(run, tmp_path / "older", step=80) == 0
    assert "does not state the config of update 81" in capsys.readouterr().err
    assert load_config(str(tmp_path / "older/config.yml")).learning_rate == rate


def _session(first: int, last: int, changed: Changed | None) -> Session:
    parts = {part.value: 0.0 for part in TimePart}
    return Session(1e9, 1e9 + 1, 1, 1, first, last, parts, changed=changed)


def test_a_fork_that_lost_its_state_is_refused_and_never_begins_anew(
    run: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    assert fork(run, new) == 0
    (new / "checkpoints/80/position/metadata").unlink()
    (new / "checkpoints/80").rename(new / "checkpoints/lost")
    lines = (new / "metrics.jsonl").read_bytes()
    config = load_config(str(new / "config.yml"))
    for keys, why in (
        ({}, f"was forked from {run} at step 80, and none of its checkpoints is whole"),
        ({"enable_checkpointing": False}, "enable_checkpointing=false: must be true in a fork"),
    ):
        (new / "config.yml").write_text(dump_config(config.replaced(keys)))
        with pytest.raises(Exception, match=why):
            train(load_config(str(new / "config.yml")), ONE)
        assert (new / "metrics.jsonl").read_bytes() == lines
