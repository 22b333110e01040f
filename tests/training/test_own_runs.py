"""A run of a user's own parts is a whole run: what ends it, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import maxbatch
from maxbatch.runs.position import committed_steps
from tests.helpers.tiny import LENGTH, one_layer_config, read_metrics

ONE = jax.devices()[:1]


class Rows:
    """Rows without an end, one of which may be of another kind."""

    def __init__(self, bad: int | None = None, row: Any = None) -> None:
        self.identity = {"rows": "random"}
        self._bad, self._row = bad, row

    def __getitem__(self, index: int) -> Any:
        if index != self._bad:
            return np.random.default_rng(index).integers(0, 200, LENGTH)
        if isinstance(self._row, Exception):
            raise self._row
        return self._row


def raising(step: int, error: Exception) -> Callable[[dict[str, Any]], None]:
    def my_output(record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise error

    return my_output


def config_of(run_dir: Path, *overrides: str) -> Any:
    return one_layer_config(f"run_dir={run_dir}", "steps=6", "checkpoint_period=100", *overrides)


def test_an_output_stops_a_run_with_a_checkpoint_and_the_same_call_goes_on(tmp_path: Path) -> None:
    steps: list[int] = []
    outputs = [raising(3, maxbatch.StopTraining()), lambda record: steps.append(record["step"])]
    outcome = maxbatch.train(config_of(tmp_path), outputs=outputs, devices=ONE)
    assert (outcome.stopped_by, outcome.position.step) == ("StopTraining", 3)
    assert steps == [1, 2, 3] and committed_steps(tmp_path) == [3] and len(read_metrics(tmp_path)) == 3
    outcome = maxbatch.train(config_of(tmp_path), outputs=outputs, devices=ONE)
    assert (outcome.stopped_by, outcome.position.step) == (None, 6)
    assert steps == [1, 2, 3, 4, 5, 6]


def test_an_exception_of_an_output_leaves_its_type_a_note_and_a_checkpoint_of_its_update(tmp_path: Path) -> None:
    class Table:
        def append(self, record: dict[str, Any]) -> None: ...

        def sync(self) -> None:
            raise OSError("no table")

    for place, output, step in ((0, raising(4, KeyError("mine")), 4), (0, raising(6, KeyError("mine")), 6)):
        with pytest.raises(KeyError, match="mine") as caught:
            maxbatch.train(config_of(tmp_path), outputs=[output], devices=ONE)
        said, saved = caught.value.__notes__
        assert f"raised by outputs[{place}], test_own_runs.raising" in said.replace("tests.training.", "")
        assert f"given the record of step {step}" in said and f"step {step} is saved" in saved
        assert committed_steps(tmp_path)[0] == step == len(read_metrics(tmp_path))
    with pytest.raises(OSError, match="no table") as failed:
        maxbatch.train(config_of(tmp_path / "sync", "steps=2"), outputs=[Table()], devices=ONE)
    assert "Table, given the record of step 2" in failed.value.__notes__[0]
    assert committed_steps(tmp_path / "sync") == [2]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.runs)])
def test_an_exception_of_a_stream_leaves_its_type_a_note_and_a_checkpoint(tmp_path: Path, workers: int) -> None:
    config = config_of(tmp_path, f"grain_worker_count={workers}")
    with pytest.raises(ValueError, match="mine") as caught:
        maxbatch.train(config, stream=Rows(70, ValueError("mine")), devices=ONE)
    assert "test_own_runs.Rows, as stream[70]" in caught.value.__notes__[0]
    assert committed_steps(tmp_path) == [4] and len(read_metrics(tmp_path)) == 4
    assert maxbatch.train(config, stream=Rows(), devices=ONE).position.step == 6


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (np.zeros(3, np.int32), "max_target_length=3"),
        (np.zeros(LENGTH), "tokens of type float64 must be whole numbers"),
        (np.full(LENGTH, 2**32 + 5), "below vocab_size"),
        ([[1], [2, 3]], "is no array"),
        ({"tokens": np.ones(LENGTH, np.int32), "segments": np.ones(LENGTH)}, "segments of type float64"),
        ({"tokens": np.ones(LENGTH, np.int32), "weights": np.full(LENGTH, np.nan)}, "weights must be finite"),
    ],
)
@pytest.mark.parametrize("index", [0, 5])
def test_a_row_that_cannot_be_used_is_refused_before_anything_is_compiled(
    row: Any, rule: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxbatch.training.compile.ladder.StepLadder.compile_first", None)
    with pytest.raises(maxbatch.ConfigError, match=rf"stream\[{index}\]: .*{rule}"):
        maxbatch.train(config_of(tmp_path), stream=Rows(index, row), devices=ONE)
    assert not committed_steps(tmp_path)


@pytest.mark.processes
@pytest.mark.pod(devices=2, hosts=2)
def test_a_part_that_raises_on_one_host_ends_all_after_the_same_checkpoint(pod: Any) -> None:
    for name, parts in {
        "stop": {"outputs": [raising(3, maxbatch.StopTraining())]},
        "output": {"outputs": [raising(3, KeyError("mine"))] * (pod.host == 0)},
        "stream": {"stream": Rows(75, KeyError("mine")) if pod.host == 1 else Rows()},
    }.items():
        run_dir, caught = Path(pod.folder) / name, None
        config = config_of(run_dir, "global_batch_size=16", "per_device_batch_size=8")
        try:
            outcome = maxbatch.train(config, **parts)
            assert name == "stop" and outcome.stopped_by == "StopTraining"
        except (KeyError, maxbatch.TrainingError) as error:
            caught = error
        raises = {"stop": None, "output": 0, "stream": 1}[name]
        assert isinstance(caught, KeyError) == (pod.host == raises), repr(caught)
        if raises not in (None, pod.host):
            assert f"host {raises}: 'mine'; step" in str(caught)
        pod.barrier()
        assert committed_steps(run_dir) == [4 if name == "stream" else 3]
