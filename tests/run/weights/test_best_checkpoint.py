"""The checkpoint with the lowest eval loss is kept beside the newest, on a disk and in a store."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

import maxbatch
from maxbatch.cli import main
from maxbatch.parallel.mesh import make_mesh
from maxbatch.plan.place import Place
from maxbatch.run.folder.best_checkpoint import BEST, find_best, read_best
from maxbatch.run.folder.position import BestEval, Position, committed_steps
from maxbatch.run.weights import checkpoint_writing
from maxbatch.run.weights.checkpoints import Checkpoints, model_identity
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath, as_path
from maxbatch.update.state import TrainState, abstract_state, init_state
from tests.helpers.stores import Store
from tests.helpers.tiny import one_layer_config, read_metrics

ONE = jax.devices()[:1]
CONFIG = one_layer_config()


@pytest.fixture(scope="module")
def state() -> TrainState:
    return init_state(CONFIG.update, abstract_state(CONFIG.update, make_mesh(CONFIG, ONE)))


def open_checkpoints(
    folder: AnyPath, keeps_best: bool = True, keep: int = 2
) -> closing[Checkpoints]:
    identity = {"data": {}, "model": model_identity(CONFIG.update)}
    return closing(Checkpoints(folder, keep, identity, pytest.fail, keeps_best=keeps_best))


def save(
    checkpoints: Checkpoints, state: TrainState, step: int, best: BestEval, is_extra: bool = False
) -> None:
    checkpoints.save(state, Position(step, Place(10 * step), best_eval=best), is_extra=is_extra)


def test_the_best_stays_beside_the_newest_and_an_extra_one_goes_when_another_is_better(
    state: TrainState, tmp_path: Path
) -> None:
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state, 2, BestEval(3.0, 2), is_extra=True)
        for step in (5, 10, 15):
            save(checkpoints, state, step, BestEval(3.0, 2, 1))
    assert committed_steps(tmp_path) == [15, 10, 2]
    with open_checkpoints(tmp_path) as checkpoints:  # a later start knows which one is extra
        assert checkpoints.newest() is not None
        save(checkpoints, state, 16, BestEval(2.0, 16), is_extra=True)
        assert checkpoints.has_best(16)
    assert committed_steps(tmp_path) == [16, 15, 10]
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state, 20, BestEval(1.0, 20))
    assert (
        committed_steps(tmp_path) == [20, 15]
        and find_best(tmp_path / "checkpoints" / BEST).name == "20"
    )


def write_theirs(best: Path, what: str) -> None:
    best.unlink(missing_ok=True)
    if what == "a folder":
        best.mkdir(parents=True)
        (best / "model.bin").write_text("theirs")
    else:
        best.parent.mkdir(parents=True, exist_ok=True)
        best.write_text("theirs")


@pytest.mark.parametrize("what", ["a folder", "a file with other content"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_best_of_another_program_that_appears_during_a_run_stays_and_training_goes_on(
    state: TrainState,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    what: str,
    is_first: bool,
) -> None:
    best = tmp_path / "checkpoints" / BEST
    with open_checkpoints(tmp_path, keep=1) as checkpoints:
        if not is_first:
            save(checkpoints, state, 1, BestEval(9.0, 1))
            save(checkpoints, state, 2, BestEval(9.0, 1, 1))  # waits for the first, writes no best
        write_theirs(best, what)
        save(checkpoints, state, 3, BestEval(2.0, 3))
        save(checkpoints, state, 4, BestEval(2.0, 3, 1))
        assert not checkpoints.has_best(3)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and f"{best} is {what}, which another program wrote" in lines[0]
        assert (best / "model.bin" if best.is_dir() else best).read_text() == "theirs"
        best.rename(tmp_path / "theirs")
        save(checkpoints, state, 5, BestEval(2.0, 3, 2))
    assert find_best(best).name == "3" and committed_steps(tmp_path) == [5, 3]


def test_a_run_that_keeps_no_best_removes_none_of_another_program(
    state: TrainState, tmp_path: Path
) -> None:
    write_theirs(tmp_path / "checkpoints" / BEST, "a file with other content")
    with open_checkpoints(tmp_path, keeps_best=False) as checkpoints:
        save(checkpoints, state, 2, BestEval(3.0, 2))
    assert (tmp_path / "checkpoints" / BEST).read_text() == "theirs"


def test_a_step_of_another_program_that_appears_during_a_run_ends_it_and_stays(
    state: TrainState, tmp_path: Path
) -> None:
    with (
        pytest.raises(ConfigError, match="checkpoints/4: another program wrote it"),
        open_checkpoints(tmp_path) as checkpoints,
    ):
        save(checkpoints, state, 2, BestEval(3.0, 2))
        theirs = tmp_path / "checkpoints" / "4" / "model.bin"
        theirs.parent.mkdir(parents=True)
        theirs.write_text("theirs")
        save(checkpoints, state, 4, BestEval(3.0, 2, 1))
    assert theirs.read_text() == "theirs" and committed_steps(tmp_path)[-1] == 2


def test_a_writer_killed_at_any_moment_leaves_a_best_checkpoint_that_is_there(
    state: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, state, 2, BestEval(3.0, 2), is_extra=True)
    write = checkpoint_writing.write_atomically

    def killed(path: Path, content: bytes) -> None:
        if path.name == BEST:
            raise OSError("killed")
        write(path, content)

    monkeypatch.setattr(checkpoint_writing, "write_atomically", killed)
    with (
        pytest.raises(ConfigError, match="killed"),
        open_checkpoints(tmp_path, keep=1) as checkpoints,
    ):
        save(checkpoints, state, 4, BestEval(2.0, 4), is_extra=True)
        checkpoints.close()
    monkeypatch.undo()
    assert find_best(tmp_path / "checkpoints" / BEST).name == "2", (
        "committed before the file names another"
    )
    with open_checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.newest()
    assert find_best(tmp_path / "checkpoints" / BEST).name == "4"


def test_a_run_that_stops_keeping_the_best_leaves_no_name_that_may_be_wrong(
    state: TrainState, tmp_path: Path
) -> None:
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state, 2, BestEval(3.0, 2))
    with open_checkpoints(tmp_path, keeps_best=False) as checkpoints:
        save(checkpoints, state, 4, BestEval(2.0, 4))
    assert read_best(tmp_path / "checkpoints") is None
    with pytest.raises(
        ConfigError, match=r"has no best checkpoint: .*keep_best_checkpoint=false; works: "
    ):
        find_best(tmp_path / "checkpoints" / BEST)


def test_the_best_of_a_store_is_the_best_of_a_disk(state: TrainState, store: Store) -> None:
    run_dir = as_path(store.bucket() + "/run")
    with open_checkpoints(run_dir, keep=1) as checkpoints:
        save(checkpoints, state, 2, BestEval(3.0, 2), is_extra=True)
        save(checkpoints, state, 4, BestEval(3.0, 2, 1))
    store.forget()
    with open_checkpoints(run_dir, keep=1) as checkpoints:
        record = checkpoints.newest()
        assert record is not None and record.position.step == 4, (
            "the file is no unfinished checkpoint"
        )
    assert (
        committed_steps(run_dir) == [4, 2] and find_best(run_dir / "checkpoints" / BEST).name == "2"
    )
    embedding = maxbatch.load_parameters(f"{run_dir}/checkpoints/best")["embedding"]
    np.testing.assert_array_equal(embedding, np.asarray(state.params["embedding"].get_value()))


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> maxbatch.Outcome:
    """A run that ends early, two evals after its best one, and keeps one newest checkpoint."""
    return train_early(tmp_path_factory.mktemp("early") / "run")


def train_early(run_dir: Path) -> maxbatch.Outcome:
    keys = (
        "steps=40",
        "eval_interval=2",
        "early_stopping_patience=2",
        "checkpoint_period=50",
        "eval_fraction=0.02",
        "max_num_checkpoints_to_keep=1",
        "learning_rate=0.5",
        "learning_rate_schedule=constant",
    )
    return maxbatch.train(
        one_layer_config(*keys, "vocab_size=260", f"run_dir={run_dir}"), devices=ONE
    )


def test_a_run_that_ended_early_says_where_its_best_checkpoint_is_when_it_is_started_again(
    early: maxbatch.Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    train_early(Path(early.run_dir))
    printed = " ".join(capsys.readouterr().out.split())
    lowest = f"of step {early.position.best_eval.step}, in checkpoints/best)"
    assert f"{early.run_dir} is complete: " in printed and lowest in printed


def test_early_stopping_leaves_the_checkpoint_of_the_lowest_eval_loss(
    early: maxbatch.Outcome,
) -> None:
    evals = {
        line["step"]: line["eval_loss"]
        for line in read_metrics(early.run_dir)
        if "eval_loss" in line
    }
    lowest = min(evals, key=lambda step: evals[step])
    assert committed_steps(Path(early.run_dir)) == [early.position.step, lowest]
    best = json.loads((Path(early.run_dir) / "checkpoints" / BEST).read_text())
    assert best == {"step": lowest, "eval_loss": evals[lowest], "is_extra": True}
    assert early.position.best_eval.step == lowest < early.position.step


def test_commands_and_paths_take_the_best_checkpoint(
    early: maxbatch.Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = find_best(Path(early.run_dir) / "checkpoints" / BEST)
    (tmp_path / "a.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    for words in (
        ["score", "a.jsonl", "--json"],
        ["generate", "--max-new-tokens", "3", "--temperature", "0"],
    ):
        printed = []
        for place, flags in (
            (early.run_dir, ["--best"]),
            (f"{early.run_dir}/checkpoints/best", []),
            (str(best), []),
        ):
            assert main([words[0], place, *words[1:], *flags]) == 0
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1] == printed[2]
    assert main(["export", early.run_dir, "--best", "--output", "out"]) == 0
    exported = maxbatch.load_model("out").params
    jax.tree.map(np.testing.assert_array_equal, exported, maxbatch.load_model(best).params)
    assert main(["export", "out", "--best", "--output", "again"]) == 2
    assert "--best: out is no run folder" in capsys.readouterr().err


def test_a_run_from_the_best_checkpoint_is_pinned_to_its_step(
    early: maxbatch.Outcome, tmp_path: Path
) -> None:
    path = f"load_parameters_path={early.run_dir}/checkpoints/best"
    outcome = maxbatch.train(
        one_layer_config(
            "steps=1",
            "vocab_size=260",
            "warmup_steps_fraction=0",
            "learning_rate=0.001",
            path,
            f"run_dir={tmp_path}",
        ),
        devices=ONE,
    )
    origin = json.loads((tmp_path / "checkpoints" / "1" / "position" / "metadata").read_text())[
        "origin"
    ]
    assert origin["step"] == early.position.best_eval.step and outcome.position.step == 1
