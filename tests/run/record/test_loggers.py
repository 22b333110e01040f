"""Trackers beside TensorBoard: missing packages, failures, records, and hyperparameters in
TensorBoard.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from maxbatch import ConfigError
from maxbatch.run.folder.run_folder import TRACKERS_FILE
from maxbatch.run.pretraining import train
from maxbatch.run.record import loggers
from maxbatch.run.record.board import Board
from maxbatch.system.storage.storage import as_path
from tests.helpers.stores import Store
from tests.helpers.tiny import one_layer_config, read_metrics

ONE = jax.devices()[:1]


class FakeWandb:
    """The parts of Weights & Biases' API that a run uses."""

    def __init__(self, fails_at: int = 99) -> None:
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished, self._fails_at = 0, fails_at

    def init(self, **settings: Any) -> FakeWandb:
        self.begun.append(settings)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        if step >= self._fails_at:
            raise ConnectionError("no network")
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


def as_module(fake: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=fake.init))


def test_an_extra_that_is_missing_is_one_line_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"log_to=mlflow: .*pip install 'maxbatch\[mlflow\]'"):
        train(one_layer_config("log_to=tensorboard,mlflow", "steps=1", f"run_dir={run_dir}"), ONE)
    assert not run_dir.exists()


def test_a_resumed_run_goes_on_as_the_same_run_of_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    as_module(fake, monkeypatch)
    base = ("log_to=wandb", f"run_dir={tmp_path}/sweep/0007", "learning_rate_schedule=constant")
    train(one_layer_config(*base, "steps=1"), ONE)
    train(one_layer_config(*base, "steps=2"), ONE)
    first, second = fake.begun
    assert (
        first["id"]
        == second["id"]
        == json.loads((tmp_path / "sweep/0007" / TRACKERS_FILE).read_text())["wandb"]
    )
    assert first["name"] == "sweep/0007" and first["config"]["per_device_batch_size"] == 16
    assert [step for step, _ in fake.logged] == [1, 2] and fake.finished == 2
    assert fake.logged[1][1]["loss"] == pytest.approx(
        read_metrics(tmp_path / "sweep/0007")[1]["loss"]
    )
    assert not list((tmp_path / "sweep/0007").glob("*tfevents*")), "log_to leaves out tensorboard"


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_module(FakeWandb(fails_at=2), monkeypatch)
    train(one_layer_config("log_to=wandb", "steps=3", f"run_dir={tmp_path}"), ONE)
    assert (
        capsys.readouterr().err.count("wandb failed (no network); the run continues without it")
        == 1
    )
    assert len(read_metrics(tmp_path)) == 3


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_tracker_that_hangs_holds_up_neither_training_nor_its_end(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, answers = FakeWandb(), threading.Event()
    setattr(fake, method, lambda *_, **__: answers.wait())
    as_module(fake, monkeypatch)
    monkeypatch.setattr(loggers, "_END_S", 0.1)
    train(one_layer_config("log_to=wandb", "steps=3", f"run_dir={tmp_path}"), ONE)
    answers.set()
    assert (
        capsys.readouterr().err.count(
            "wandb did not end within 0.1 s; the run continues without it"
        )
        == 1
    )
    assert len(read_metrics(tmp_path)) == 3


def test_a_tracker_that_does_not_begin_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, answers = FakeWandb(), threading.Event()
    monkeypatch.setattr(fake, "init", lambda **_: answers.wait())
    as_module(fake, monkeypatch)
    monkeypatch.setattr(loggers, "_BEGIN_S", 0.1)
    with pytest.raises(
        ConfigError, match=r"wandb cannot be used \(no answer within 0.1 s\); works: WANDB_MODE"
    ):
        train(one_layer_config("log_to=wandb", "steps=1", f"run_dir={tmp_path}"), ONE)
    answers.set()


def test_tensorboard_has_the_hyperparameters_of_a_run(tmp_path: Path) -> None:
    train(one_layer_config("steps=1", "learning_rate=0.0625", f"run_dir={tmp_path}"), ONE)
    (file,) = tmp_path.glob("*tfevents*")
    found: dict[str, Any] = {}
    content, place = file.read_bytes(), 0
    while place < len(content):
        size = int.from_bytes(content[place : place + 8], "little")
        event = Event.FromString(content[place + 12 : place + 12 + size])
        place += 16 + size
        found |= {value.tag: value.metadata.plugin_data.content for value in event.summary.value}
    started = HParamsPluginData.FromString(
        found["_hparams_/session_start_info"]
    ).session_start_info.hparams
    assert (
        started["learning_rate"].number_value == 0.0625
        and started["opt_type"].string_value == "adamw"
    )
    shown = HParamsPluginData.FromString(found["_hparams_/experiment"]).experiment.metric_infos
    assert {"eval_loss", "loss"} <= {info.name.tag for info in shown} and "loss" in found


def test_tensorboards_events_go_to_a_bucket_once(gs: Store) -> None:
    folder = as_path(gs.bucket())
    board = Board(folder, 0, print)
    gs.forget()
    board.text(1, "greeting", "hello")
    for _ in range(2):
        board.sync()
    board.close()
    assert sum(method in ("POST", "PUT") for _, method, *_ in gs.requests()) == 1


def test_tensorboard_brings_no_clients_of_object_stores_and_no_torch() -> None:
    Path("torch.py").touch()  # installed, whatever else is
    code = (
        "import sys, maxbatch.run.record.board; "
        "print({'boto3', 'google.cloud.storage', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("text", ["wandb", "[tensorboard, wandb]", "tensorboard,wandb", "none", ""])
def test_log_to_is_a_list_of_words(text: str) -> None:
    words = [
        word.strip() for word in text.strip("[]").split(",") if word.strip() not in ("", "none")
    ]
    assert one_layer_config(f"log_to={text}").log_to == ",".join(words)


def test_an_unknown_logger_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"log_to=tensorbord: must be one of .*works: log_to=tensorboard"
    ):
        one_layer_config("log_to=tensorbord")


@pytest.mark.runs
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_the_real_tracker_takes_a_run_offline(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    train(one_layer_config(f"log_to={name}", "steps=2", f"run_dir={tmp_path}/run"), ONE)
    written = list((tmp_path / "run").glob("wandb/offline-run-*")) or list(
        (tmp_path / "mlruns").rglob("loss")
    )
    assert written
