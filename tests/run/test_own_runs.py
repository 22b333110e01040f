"""A run of a user's own parts is a whole run: what ends it, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import maxbatch
from maxbatch.cli import main
from maxbatch.data.stream.own import as_stream, held_out_of
from maxbatch.run.folder.best_checkpoint import BEST, find_best
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.record.loggers import settings_of
from tests.helpers.tiny import LENGTH, one_layer_config, read_metrics
from tests.test_api import Bigrams

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
    assert (
        steps == [1, 2, 3] and committed_steps(tmp_path) == [3] and len(read_metrics(tmp_path)) == 3
    )
    outcome = maxbatch.train(config_of(tmp_path), outputs=outputs, devices=ONE)
    assert (outcome.stopped_by, outcome.position.step) == (None, 6)
    assert steps == [1, 2, 3, 4, 5, 6]


def test_an_exception_of_an_output_leaves_its_type_a_note_and_a_checkpoint_of_its_update(
    tmp_path: Path,
) -> None:
    class Table:
        def append(self, record: dict[str, Any]) -> None: ...

        def sync(self) -> None:
            raise OSError("no table")

    for place, output, step in (
        (0, raising(4, KeyError("mine")), 4),
        (0, raising(6, KeyError("mine")), 6),
    ):
        with pytest.raises(KeyError, match="mine") as caught:
            maxbatch.train(config_of(tmp_path), outputs=[output], devices=ONE)
        said, saved = caught.value.__notes__
        assert f"raised by outputs[{place}], test_own_runs.raising" in said.replace(
            "tests.run.", ""
        )
        assert f"given the record of step {step}" in said and f"step {step} is saved" in saved
        assert committed_steps(tmp_path)[0] == step == len(read_metrics(tmp_path))
    with pytest.raises(OSError, match="no table") as failed:
        maxbatch.train(config_of(tmp_path / "sync", "steps=2"), outputs=[Table()], devices=ONE)
    assert "Table, given the record of step 2" in failed.value.__notes__[0]
    assert committed_steps(tmp_path / "sync") == [2]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.runs)])
def test_an_exception_of_a_stream_leaves_its_type_a_note_and_a_checkpoint(
    tmp_path: Path, workers: int
) -> None:
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
        (
            {"tokens": np.ones(LENGTH, np.int32), "segments": np.ones(LENGTH)},
            "segments of type float64",
        ),
        (
            {"tokens": np.ones(LENGTH, np.int32), "weights": np.full(LENGTH, np.nan)},
            "weights must be finite",
        ),
    ],
)
@pytest.mark.parametrize("index", [0, 5])
def test_a_row_that_cannot_be_used_is_refused_before_anything_is_compiled(
    row: Any, rule: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxbatch.run.compile.ladder.StepLadder.compile_first", None)
    with pytest.raises(maxbatch.ConfigError, match=rf"stream\[{index}\]: .*{rule}"):
        maxbatch.train(config_of(tmp_path), stream=Rows(index, row), devices=ONE)
    assert not committed_steps(tmp_path)


_BAD_ROW = 13


class HeldOut(list[np.ndarray]):
    """Held-out rows, one of which raises, if they are bad, when it is read for the second eval."""

    def __init__(self, rows: list[np.ndarray], are_bad: bool) -> None:
        super().__init__(rows)
        self._are_bad, self._reads = are_bad, 0

    def __getitem__(self, index: Any) -> Any:
        self._reads += index == _BAD_ROW
        if self._are_bad and self._reads == 2:
            raise KeyError("mine")
        return super().__getitem__(index)


@pytest.mark.processes
@pytest.mark.pod(devices=2, hosts=2)
def test_held_out_rows_that_raise_on_one_host_end_all_and_the_best_checkpoint_stays(
    pod: Any,
) -> None:
    config = config_of(
        Path(pod.folder) / "run",
        "global_batch_size=16",
        "per_device_batch_size=8",
        "eval_interval=2",
        "steps=8",
    )
    with pytest.raises((KeyError, maxbatch.TrainingError)) as caught:
        maxbatch.train(config, stream=Rows(), eval_stream=HeldOut(rows_of(40), pod.host == 1))
    notes = " ".join(getattr(caught.value, "__notes__", ()))
    if pod.host == 1:
        assert (
            isinstance(caught.value, KeyError)
            and f"test_own_runs.HeldOut, as eval_stream[{_BAD_ROW}]" in notes
        )
    else:
        assert "host 1: 'mine'; step" in str(caught.value)
    pod.barrier()
    run_dir = Path(config.run_dir)
    assert (
        committed_steps(run_dir) == [4, 2] and find_best(run_dir / "checkpoints" / BEST).name == "2"
    )
    assert [record.get("eval_loss") is not None for record in read_metrics(run_dir)] == [
        False,
        True,
        False,
        False,
    ]


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


def rows_of(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(number).integers(0, 200, LENGTH) for number in range(count)]


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> maxbatch.Outcome:
    """A run of an own model on an own stream, a tenth of which is held out."""
    run_dir = tmp_path_factory.mktemp("own") / "run"
    config = config_of(run_dir, "eval_fraction=0.1", "eval_interval=3")
    return maxbatch.train(config, model=Bigrams, stream=rows_of(100), outputs=[print], devices=ONE)


def test_the_parameters_of_an_own_model_come_back_by_its_own_paths(
    own_run: maxbatch.Outcome,
) -> None:
    parameters = own_run.parameters()
    model = maxbatch.load_model(own_run.run_dir, model=Bigrams)
    assert isinstance(model, Bigrams)
    theirs = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert (
        parameters.keys() == {"table", "layers", "out"}
        and type(parameters["layers"][0]["kernel"]) is np.ndarray
    )
    jax.tree.map(np.testing.assert_array_equal, parameters, theirs)
    again = maxbatch.load_parameters(f"{own_run.run_dir}/checkpoints/6")
    jax.tree.map(np.testing.assert_array_equal, parameters, again)
    tokens = np.arange(LENGTH, dtype=np.int32)[None]
    assert model(tokens, np.ones_like(tokens)).shape == (1, LENGTH, model.table.num_embeddings)
    for call in (maxbatch.generate, maxbatch.score, maxbatch.evaluate):
        with pytest.raises(maxbatch.ConfigError, match=r"works: model\(tokens, segments\)"):
            call(model, ["a"])  # type: ignore[operator]
    with pytest.raises(maxbatch.ConfigError, match="do not fit this model"):
        maxbatch.load_model(
            own_run.run_dir, model=lambda config, *, rngs: nnx.Linear(3, 4, rngs=rngs)
        )


def test_the_parameters_of_the_configs_own_model_come_back_too(tmp_path: Path) -> None:
    outcome = maxbatch.train(config_of(tmp_path, "steps=1"), devices=ONE)
    parameters, model = outcome.parameters(), maxbatch.load_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, parameters, nnx.to_pure_dict(model.params))
    with pytest.raises(
        maxbatch.ConfigError, match=r"config's own model; works: maxbatch\.load_model"
    ):
        maxbatch.load_model(tmp_path, model=Bigrams)


@pytest.mark.parametrize(
    "command", ["generate", "score", "export", "train", "compile", "data", "sweep"]
)
def test_a_command_that_cannot_take_an_own_model_or_stream_is_one_line(
    command: str, own_run: maxbatch.Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, records, sweep = (
        f"{own_run.run_dir}/config.yml",
        tmp_path / "a.jsonl",
        tmp_path / "sweep.yml",
    )
    records.write_text('{"text": "a"}\n')
    sweep.write_text(
        f"metric: loss\nsampler: grid\nsweep_dir: {tmp_path}/s\nbase:\n  base_config: {config}\n"
        "parameters:\n  learning_rate: [0.1]\n"
    )
    words = {
        "generate": [own_run.run_dir],
        "score": [own_run.run_dir, str(records)],
        "export": [own_run.run_dir, "--output", str(tmp_path / "out")],
        "sweep": [str(sweep)],
    }.get(command, [config])
    assert main([command, *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    loads = (
        "maxbatch.load_model"
        if command in ("generate", "score", "export")
        else "maxbatch.train(config, "
    )
    assert f"works: {loads}" in said and ("Bigrams" in said or command == "data"), said


def test_config_board_and_plan_name_the_parts_of_a_run(
    own_run: maxbatch.Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    config = maxbatch.load_config(f"{own_run.run_dir}/config.yml")
    assert config.own_parts == "model: tests.test_api.Bigrams, stream: list, outputs: print"
    assert settings_of(config)["own_parts"] == config.own_parts
    assert main(["plan", f"{own_run.run_dir}/config.yml"]) == 0
    printed = capsys.readouterr().out
    assert "model: tests.test_api.Bigrams" in printed and "stream: list" in printed
    assert main(["plan", f"{own_run.run_dir}/config.yml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["own_parts"]["stream"] == "list" and plan["num_parameters"] is None
    with pytest.raises(
        maxbatch.ConfigError, match=r"works: maxbatch\.train\(config, stream=list\)"
    ):
        maxbatch.train(config, model=Bigrams, devices=ONE)
    outcome = maxbatch.train(config, model=Bigrams, stream=rows_of(100), devices=ONE)  # complete
    assert outcome.position == own_run.position


def test_a_share_of_an_own_stream_is_held_out_and_evaluated(own_run: maxbatch.Outcome) -> None:
    lines = own_run.history
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    assert own_run.position.best_eval.loss == min(
        line["eval_loss"] for line in lines if "eval_loss" in line
    )
    rows, config = rows_of(100), maxbatch.load_config(f"{own_run.run_dir}/config.yml")
    training, held_out = as_stream(rows, config.stream), held_out_of(rows, config.stream)
    assert (len(training), len(held_out)) == (90, 10)
    found = [
        stream[number]["tokens"] for stream in (training, held_out) for number in range(len(stream))
    ]
    assert sorted(map(tuple, found)) == sorted(map(tuple, rows)), "each row once"


def test_an_own_eval_stream_stops_a_run_early(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "eval_interval=2",
        "early_stopping_patience=1",
        "learning_rate=3",
        "learning_rate_schedule=constant",
    )
    outcome = maxbatch.train(config, stream=Rows(), eval_stream=rows_of(10), devices=ONE)
    assert outcome.position.step == 4 and outcome.position.best_eval.step == 2
    with pytest.raises(maxbatch.ConfigError, match="works: eval_stream=rows in train"):
        maxbatch.train(
            config.replaced({"run_dir": str(tmp_path / "2")}), stream=Rows(), devices=ONE
        )


@pytest.mark.parametrize(
    ("parts", "overrides", "said"),
    [
        ({"stream": Rows()}, ["eval_fraction=0.1"], "Rows has none; works: eval_stream=rows"),
        (
            {"eval_stream": rows_of(9)},
            ["eval_fraction=0.1"],
            "beside eval_stream; works: eval_fraction=0",
        ),
        ({"eval_stream": Rows()}, [], "eval_stream: must have a length"),
        ({"stream": rows_of(3)}, ["eval_fraction=0.1"], "holds out none of 3 samples"),
    ],
)
def test_held_out_rows_that_cannot_be_are_refused(
    parts: dict[str, Any], overrides: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(maxbatch.ConfigError, match=said):
        maxbatch.train(config_of(tmp_path, "eval_interval=2", *overrides), devices=ONE, **parts)


def test_an_exception_of_held_out_rows_leaves_a_checkpoint(tmp_path: Path) -> None:
    rows: list[Any] = [*rows_of(5), np.zeros(3, np.int32), *rows_of(2)]
    with pytest.raises(maxbatch.ConfigError, match=r"eval_stream\[5\]: tokens of shape"):
        maxbatch.train(
            config_of(tmp_path, "eval_interval=2"), stream=Rows(), eval_stream=rows, devices=ONE
        )
    assert committed_steps(tmp_path) == [2] and len(read_metrics(tmp_path)) == 2
