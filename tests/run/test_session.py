"""A run from config to last checkpoint: lengths in data, due work, files on disk, early ends."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

from maxbatch import ConfigError
from maxbatch.around.sweep.folder import metric_value
from maxbatch.cli import main
from maxbatch.data.stream.fingerprint import fingerprint
from maxbatch.data.stream.stream import open_stream
from maxbatch.run.folder.devices import DevicesUsed, read_devices
from maxbatch.run.folder.metrics import is_weightless
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.sessions import read_sessions
from maxbatch.run.own import Parts, Rows, next_token_loss
from maxbatch.run.pretraining import prompt_flag, train
from maxbatch.run.record.recorder import Output, Record
from maxbatch.run.session import parameters_in_words
from maxbatch.system.errors import DivergedError, TrainingError, writing
from maxbatch.update.state import TrainState
from tests.helpers.slices import TWO_SLICES, pretend_slices
from tests.helpers.tiny import ONE_LAYER, TINY_RUN, one_layer_config, read_metrics

ONE = jax.devices()[:1]


def test_epochs_follow_one_another_without_a_gap_and_the_last_batch_is_what_is_left(
    tmp_path: Path,
) -> None:
    config = one_layer_config("synthetic_samples=20", "num_epochs=2", f"run_dir={tmp_path}")
    outcome = train(config, ONE)
    assert (outcome.position.samples_seen, outcome.stopped_by) == (40, None)
    metrics = read_metrics(tmp_path)
    assert [m["global_batch_size"] for m in metrics] == [16, 16, 8]
    total = sum(int(m["data_fingerprint"], 16) for m in metrics) % 2**64
    one_epoch = int(fingerprint([open_stream(config).read(0, 20)]), 16)
    assert total == 2 * one_epoch % 2**64, "every row of the data twice"


def test_synthetic_rows_of_a_vocabulary_below_the_tokenizers_end_without_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = one_layer_config(
        "vocab_size=41", "generate_prompt=def ", "steps=1", f"run_dir={tmp_path}"
    )
    assert train(config, ONE).position.step == 1
    printed = capsys.readouterr().out
    assert "--- a sample" not in printed and "maxbatch generate" not in printed


@pytest.mark.runs
def test_a_run_may_start_from_the_parameters_of_another(tmp_path: Path) -> None:
    """Every batch holds all rows, so the loss of a step is that of its parameters."""
    whole = ("synthetic_samples=16", "learning_rate_schedule=constant", "warmup_steps_fraction=0")
    train(
        one_layer_config(*whole, "steps=4", "checkpoint_period=3", f"run_dir={tmp_path / 'one'}"),
        ONE,
    )
    source = tmp_path / "one" / "checkpoints" / "3"
    other = tmp_path / "other"
    train(
        one_layer_config(*whole, "steps=1", f"load_parameters_path={source}", f"run_dir={other}"),
        ONE,
    )
    first, fourth = read_metrics(other)[0], read_metrics(tmp_path / "one")[3]
    assert first["loss"] == pytest.approx(fourth["loss"], rel=1e-5)
    assert (first["step"], first["samples_seen"]) == (1, 16)


def test_parameters_of_another_shape_are_refused_by_name_before_the_run_leaves_anything(
    tmp_path: Path,
) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    train(one_layer_config("steps=1", f"run_dir={source}"), ONE)
    keys = (f"load_parameters_path={source}", "base_mlp_dim=24", "steps=1", f"run_dir={other}")
    with pytest.raises(
        ConfigError,
        match=r"load_parameters_path=.*: its parameters do not fit this model \(\S+ is ",
    ):
        train(one_layer_config(*keys), ONE)
    assert not list(other.glob("[!.]*"))


@pytest.mark.runs
def test_a_run_may_start_from_the_full_state_of_another(tmp_path: Path) -> None:
    """On the same rows it goes on as if nothing had happened; step, position and plan are a new
    run's.
    """
    whole = ("synthetic_samples=16", "learning_rate_schedule=constant", "warmup_steps_fraction=0")
    one, other = tmp_path / "one", tmp_path / "other"
    train(one_layer_config(*whole, "steps=5", "checkpoint_period=3", f"run_dir={one}"), ONE)
    source = f"load_full_state_path={one / 'checkpoints' / '3'}"
    train(
        one_layer_config(
            *whole, "steps=2", "enable_data_shuffling=false", source, f"run_dir={other}"
        ),
        ONE,
    )
    went_on = read_metrics(other)
    assert [(m["step"], m["samples_seen"]) for m in went_on] == [(1, 16), (2, 32)]
    expected = [m["loss"] for m in read_metrics(one)[3:]]
    assert [m["loss"] for m in went_on] == pytest.approx(expected, rel=1e-5), "moments included"
    with pytest.raises(ConfigError, match="load_parameters_path takes the parameters alone"):
        train(
            one_layer_config(*whole, source, "opt_type=sgd", f"run_dir={tmp_path / 'third'}"), ONE
        )


def test_without_checkpointing_nothing_is_saved(tmp_path: Path) -> None:
    train(one_layer_config("steps=1", "enable_checkpointing=false", f"run_dir={tmp_path}"), ONE)
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "metrics.jsonl").exists() and (tmp_path / "config.yml").exists()


def test_eval_runs_at_its_interval_and_at_the_end(tmp_path: Path) -> None:
    config = one_layer_config(
        "eval_fraction=0.1", "eval_interval=2", "steps=5", f"run_dir={tmp_path}"
    )
    train(config, ONE)
    metrics = read_metrics(tmp_path)
    assert [m["step"] for m in metrics if "eval_loss" in m] == [2, 4, 5]
    assert len({m["compiles"] for m in metrics}) == 1, (
        "the first eval compiled off the critical path"
    )


def test_a_batch_that_the_devices_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="global_batch_size"):
        train(one_layer_config("global_batch_size=9", f"run_dir={tmp_path}"), jax.devices()[:4])
    assert not (tmp_path / "config.yml").exists() and not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.runs
def test_several_slices_are_planned_as_the_mesh_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_slices(monkeypatch, 4)
    train(one_layer_config(*TWO_SLICES, "steps=1", f"run_dir={tmp_path}"), jax.devices())
    assert read_metrics(tmp_path)[0]["global_batch_size"] == 16 * 8


def test_tensorboard_gets_every_scalar_and_a_key_without_effect_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(one_layer_config("steps=2", "reference_batch_size=64", f"run_dir={tmp_path}"), ONE)
    assert capsys.readouterr().err.count("warning: reference_batch_size=64 has no effect") == 1
    (events,) = tmp_path.glob("events.out.tfevents.*")
    content = events.read_bytes()
    assert all(
        name in content for name in (b"loss", b"learning_rate", b"tokens_per_second", b"grad_norm")
    )


@pytest.mark.runs
def test_checkpoints_without_a_readable_position_do_not_block_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(one_layer_config("steps=2", f"run_dir={tmp_path}"), ONE)
    (tmp_path / "checkpoints" / "2" / "position" / "metadata").unlink()
    train(one_layer_config("steps=2", f"run_dir={tmp_path}"), ONE)
    assert "warning: checkpoint 2 cannot be read" in capsys.readouterr().err
    assert (tmp_path / "checkpoints-damaged" / "2").is_dir()
    assert (tmp_path / "checkpoints" / "2" / "position" / "metadata").is_file()
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.runs
def test_a_run_records_the_devices_and_the_mesh_that_it_trained_on(tmp_path: Path) -> None:
    train(one_layer_config("steps=1", f"run_dir={tmp_path}"), ONE)
    train(
        one_layer_config("steps=2", "per_device_batch_size=4", f"run_dir={tmp_path}"),
        jax.devices()[:4],
    )
    mesh = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, "context": 1, "pipeline": 1}
    assert read_devices(tmp_path) == [
        DevicesUsed(1, "cpu", 1, 1, 1, mesh),
        DevicesUsed(2, "cpu", 4, 1, 1, mesh | {"fsdp": 4}),
    ]


@pytest.mark.runs
def test_a_rate_that_makes_the_parameters_infinite_changes_nothing_and_the_run_can_go_on(
    tmp_path: Path,
) -> None:
    run = (
        "checkpoint_period=1",
        "learning_rate_schedule=constant",
        "warmup_steps_fraction=0",
        f"run_dir={tmp_path}",
    )
    train(one_layer_config(*run, "steps=1"), ONE)
    with pytest.raises(
        DivergedError, match="3 updates in a row had a new state that is not finite"
    ):
        train(
            one_layer_config(*run, "steps=9", "learning_rate=1e300", "max_consecutive_skips=3"), ONE
        )
    train(one_layer_config(*run, "steps=5"), ONE)
    metrics = read_metrics(tmp_path)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5]
    assert [m["skipped"] for m in metrics] == [False, True, True, False, False]
    assert metrics[-1]["loss"] < metrics[0]["loss"] and metrics[-1]["skipped_updates"] == 2


@pytest.mark.runs
def test_a_full_disk_ends_the_run_in_one_line_and_with_room_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "train",
        *TINY_RUN,
        ONE_LAYER,
        "steps=6",
        "checkpoint_period=2",
        f"run_dir={tmp_path}",
    ]

    def append(file: Any, line: bytes) -> None:
        if b'"step": 4,' in line:
            with writing(tmp_path / "metrics.jsonl"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file._file.write(line)

    with monkeypatch.context() as full:
        full.setattr("maxbatch.system.storage.appending._File.append", append)
        assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "metrics.jsonl: no space left on the disk" in error
    assert main(arguments) == 0
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.runs
def test_tensorboard_events_on_a_full_disk_are_one_warning_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's own writer works on a thread that dies of it; the run would then wait for it
    for good.
    """
    written: list[Any] = []

    def write(writer: Any, event: Any) -> None:
        written.append(event)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.write", write)
    assert main(["train", *TINY_RUN, ONE_LAYER, "steps=4", f"run_dir={tmp_path}"]) == 0
    error = capsys.readouterr().err
    assert (
        error.count("TensorBoard's events cannot be written (No space left on device)")
        == error.count("\n")
        == 1
    )
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 3, 4]


def weightless(model: Any, rows: Rows) -> tuple[jax.Array, jax.Array]:
    loss, weight = next_token_loss(model, rows)
    return 0 * loss, 0 * weight


@pytest.mark.runs
def test_a_batch_without_loss_weight_has_no_loss_and_a_run_of_them_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = one_layer_config(
        "steps=3", "log_period=1", "checkpoint_period=2", f"run_dir={tmp_path}"
    )
    for _ in range(2):  # also where the run is complete
        with pytest.raises(
            TrainingError, match="none of its 3 updates changed the parameters: no batch had a loss"
        ):
            train(config, ONE, Parts(objective=weightless))
    records = read_metrics(tmp_path)
    assert [(r["loss"], r["loss_weight"], r["skipped"]) for r in records] == [
        (None, 0.0, False)
    ] * 3
    assert all(is_weightless(record) for record in records)
    assert "step 3/3 | loss - |" in capsys.readouterr().out
    assert metric_value([{"loss": 2.0, "loss_weight": 3.0}, records[0]], Metric.LOSS) is None
    assert metric_value([{"loss": 2.0, "loss_weight": 3.0}] * 19 + [records[0]], Metric.LOSS) == 2.0


@pytest.mark.runs
def test_a_run_whose_eval_loss_no_longer_falls_ends_early_and_a_resume_counts_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = ("eval_fraction=0.05", "eval_interval=2", f"run_dir={tmp_path}", "learning_rate=1e-15")
    patient = (*stated, "early_stopping_patience=2")
    assert train(one_layer_config(*patient, "steps=4"), ONE).position.best_eval.evals_since == 1
    assert "ended early" not in capsys.readouterr().out
    outcome = train(one_layer_config(*patient, "steps=20"), ONE)
    assert (outcome.position.step, outcome.stopped_by) == (6, None)
    why = "ended early: the eval loss has not fallen for 2 evals in a row (the lowest is "
    assert f"done: step 6, 96 samples, in {tmp_path}; {why}" in capsys.readouterr().out
    assert train(one_layer_config(*patient, "steps=20"), ONE).position.step == 6
    assert f"is complete: 6 updates, 96 samples; {why}" in capsys.readouterr().out


def test_patience_without_held_out_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="early_stopping_patience=2: counts evals, and nothing is held out; works: ev",
    ):
        train(
            one_layer_config("early_stopping_patience=2", "eval_interval=2", f"run_dir={tmp_path}"),
            ONE,
        )


def test_a_run_with_adapters_states_how_many_parameters_it_trains() -> None:
    def shapes(*sizes: int) -> Any:
        return [jax.ShapeDtypeStruct((size,), "float32") for size in sizes]

    assert parameters_in_words(TrainState(shapes(2_000_000, 442_240), (), shapes(134_515_008))) == (
        "2.4M of 134.5M parameters trained"
    )
    assert parameters_in_words(TrainState(shapes(134_515_008), ())) == "134,515,008 parameters"


def test_the_next_command_asks_a_shell_for_the_prompt_as_it_is() -> None:
    assert prompt_flag("") == "" and prompt_flag("it's def ") == ' --prompt "it\'s def "'
    for prompt in ("Q: a\nA:", 'say "it\'s"', "$HOME `ls` \\n!"):
        typed = ["bash", "-c", f"printf %s{prompt_flag(prompt).replace(' --prompt', '', 1)}"]
        assert subprocess.run(typed, capture_output=True, text=True, check=True).stdout == prompt


class _PowerCut(Output):
    """Ends a run in the way of a power cut, after the record of an update."""

    def __init__(self, step: int) -> None:
        self._step = step

    def append(self, record: Record) -> None:
        if record["step"] == self._step:
            raise KeyboardInterrupt


@pytest.mark.runs
def test_every_start_of_a_run_has_a_line_in_sessions_jsonl(tmp_path: Path) -> None:
    config = one_layer_config(
        "steps=7",
        "checkpoint_period=3",
        "eval_interval=2",
        "eval_fraction=0.1",
        "keep_best_checkpoint=false",
        f"run_dir={tmp_path}",
    )
    with pytest.raises(KeyboardInterrupt):
        train(config, ONE, Parts(outputs=(_PowerCut(5),)))
    train(config, ONE)
    train(config, ONE)  # nothing is left to do: no line
    first, second = read_sessions(tmp_path)
    assert [(s.first_step, s.last_step, s.hosts, s.devices) for s in (first, second)] == [
        (1, 5, 1, 1),
        (4, 7, 1, 1),
    ]
    for session in (first, second):
        assert sum(session.seconds.values()) - session.seconds[
            "since_session_before"
        ] == pytest.approx(session.ended - session.started, abs=0.01)
        busy = ("start_up", "restoring", "compiling", "updates_kept", "checkpoints", "eval")
        assert all(session.seconds[part] > 0 for part in busy), session
    assert first.seconds["updates_lost"] > 0 == second.seconds["updates_lost"], (
        "updates 4 and 5 are trained again"
    )
    assert second.started - first.ended == pytest.approx(
        second.seconds["since_session_before"], abs=0.01
    )
