"""The JSON of a checkpoint is believed if its checksum holds, and checked against all there is if
it has none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from maxbatch import ConfigError
from maxbatch.plan.place import Place
from maxbatch.run.folder.position import (
    BestEval,
    CheckpointRecord,
    DamagedError,
    Position,
    StoredParameter,
    committed_steps,
    newest_record,
    read_record,
)
from maxbatch.update.noise_scale import NoiseScale

RECORD = CheckpointRecord(
    Position(4, Place(40), 1, 0, NoiseScale(0.5, 0.25, 1e-3)),
    {"data": {"seed": 0}, "model": {"vocab": 3}},
    7,
    (2, 1),
)
SUMMED = RECORD._replace(
    parameters={"embedding": StoredParameter((3, 2), "bfloat16", 11)},
    average={"embedding": StoredParameter((3, 2), "float32", 12)},
    position=RECORD.position._replace(best_eval=BestEval(1.5, 2, 1), place=Place(40, 32)),
)


def write(run_dir: Path, saved: Any, step: int = 4) -> Path:
    path = run_dir / "checkpoints" / str(step) / "position" / "metadata"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(saved if isinstance(saved, str) else json.dumps(saved))
    return path


def old() -> dict[str, Any]:
    """The JSON of a version that knew no checksum over it."""
    saved = json.loads(json.dumps(RECORD.to_json()))
    del saved["json_checksum"], saved["parameters"], saved["position"]["weightless_updates"]
    del saved["position"]["best_eval"], saved["position"]["taken_over"]
    return saved


def changed(part: str | None, field: str, value: Any) -> dict[str, Any]:
    saved = old()
    (saved[part] if part else saved)[field] = value
    return saved


def test_the_lowest_eval_loss_is_kept_and_the_evals_since_are_counted() -> None:
    best = BestEval()
    for step, loss in enumerate((float("nan"), 2.0, 1.5, 1.5, float("inf"), 1.6), 1):
        best = best.after(loss, step)
    assert best == BestEval(1.5, 3, 3)
    assert BestEval().after(float("nan"), 1) == BestEval(None, 0, 1)


def test_what_was_written_is_read_and_only_gains_fields(tmp_path: Path) -> None:
    for record in (RECORD, SUMMED):
        write(tmp_path, record.to_json())
        assert read_record(tmp_path / "checkpoints" / "4") == record
    assert old().keys() == {"position", "identity", "checksum", "hosts"}
    assert old()["position"] == {
        "step": 4,
        "samples_seen": 40,
        "skipped_updates": 1,
        "consecutive_skips": 0,
        "noise_scale": [0.5, 0.25, 1e-3],
    }


def test_the_two_numbers_of_a_place_are_two_fields_of_the_json() -> None:
    assert json.dumps(SUMMED.to_json()["position"]) == (
        '{"step": 4, "samples_seen": 40, "skipped_updates": 1, "consecutive_skips": 0, '
        '"noise_scale": [0.5, 0.25, 0.001], "weightless_updates": 0, "best_eval": [1.5, 2, 1], '
        '"samples_planned": 32, "taken_over": 0}'
    )
    assert "samples_planned" not in RECORD.position.to_json()


def test_any_changed_character_is_noticed(tmp_path: Path) -> None:
    text = json.dumps(SUMMED.to_json())
    for place in range(len(text)):
        write(tmp_path, text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :])
        with pytest.raises(DamagedError):
            read_record(tmp_path / "checkpoints" / "4")


def test_a_checksum_that_holds_is_believed_whatever_the_metrics_say(tmp_path: Path) -> None:
    write(tmp_path, RECORD.to_json())
    write_metrics(tmp_path, 50)
    assert read_record(tmp_path / "checkpoints" / "4") == RECORD


@pytest.mark.parametrize(
    "parameters",
    [
        [],
        3,
        {"a": 3},
        {"a": {"shape": [1], "dtype": "float32"}},
        {"a": {"shape": [-1], "checksum": 1}},
    ],
)
def test_wrong_checksums_of_parameters_are_damage(tmp_path: Path, parameters: Any) -> None:
    saved = SUMMED._replace(parameters=None).to_json() | {"parameters": parameters}
    del saved["json_checksum"]
    saved["json_checksum"] = hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()
    write(tmp_path, saved)
    with pytest.raises(DamagedError):
        read_record(tmp_path / "checkpoints" / "4")


def write_metrics(run_dir: Path, *samples_seen: int) -> None:
    line = {
        "step": 4,
        "tokens_seen": 1,
        "global_batch_size": 10,
        "stage": 0,
        "loss": 1.0,
        "learning_rate": 1.0,
    }
    lines = [json.dumps(line | {"samples_seen": seen}) + "\n" for seen in samples_seen]
    (run_dir / "metrics.jsonl").write_text("garbled\n" + "".join(lines))


def test_without_a_checksum_it_must_agree_with_the_metrics_of_its_step(tmp_path: Path) -> None:
    write(tmp_path, old())
    # no metrics: there is nothing to agree with
    assert read_record(tmp_path / "checkpoints" / "4") == RECORD
    write_metrics(tmp_path, 40)
    assert read_record(tmp_path / "checkpoints" / "4") == RECORD
    write_metrics(tmp_path, 50)
    with pytest.raises(DamagedError, match="states samples_seen 50, it states 40"):
        read_record(tmp_path / "checkpoints" / "4")
    write_metrics(tmp_path, 50, 40)  # one of two lines of a step is a hole, and says nothing
    assert read_record(tmp_path / "checkpoints" / "4") == RECORD


@pytest.mark.parametrize("saved", [old, RECORD.to_json])
def test_it_must_agree_with_the_name_of_its_folder(
    tmp_path: Path, saved: Callable[[], Any]
) -> None:
    write(tmp_path, saved(), step=5)
    with pytest.raises(DamagedError, match="it states step 4"):
        read_record(tmp_path / "checkpoints" / "5")


@pytest.mark.parametrize(
    "saved",
    [
        *(
            changed("position", "samples_seen", value)
            for value in (-96, "96", None, 4.0, True, [40], {}, 1e999)
        ),
        *(changed("position", "step", value) for value in (-4, "4", None, 4.5, True)),
        *(changed("position", "skipped_updates", value) for value in (-1, "1", None, 5)),
        *(changed("position", "consecutive_skips", value) for value in (-1, None, 2)),
        *(changed("position", "samples_planned", value) for value in (-1, "1", 4.0)),
        *(
            changed("position", "noise_scale", value)
            for value in (None, 3, [], [1, 2], [1, 2, 3, 4], ["a", 1, 2])
        ),
        *(
            changed("position", "noise_scale", [value, 0.0, 0.0])
            for value in (float("nan"), None, True)
        ),
        *(
            changed(None, "hosts", value)
            for value in (["a"], None, [1], [1, 2], [0, 0], [1, 1, 1], 3, ["1", "1"])
        ),
        *(changed(None, "checksum", value) for value in (-1, 2**32, "7", None, 7.0)),
        *(
            changed(None, "identity", value)
            for value in (None, [], {}, {"data": {}}, {"data": [], "model": {}})
        ),
        *({key: value for key, value in old().items() if key != left_out} for left_out in old()),
        *(
            old()
            | {
                "position": {
                    key: value for key, value in old()["position"].items() if key != left_out
                }
            }
            for left_out in old()["position"]
        ),
    ],
    ids=lambda saved: str(saved)[:60],
)
def test_every_wrong_value_is_damage(tmp_path: Path, saved: Any) -> None:
    write(tmp_path, saved)
    with pytest.raises(DamagedError) as error:
        read_record(tmp_path / "checkpoints" / "4")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make", [None, Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")]
)
def test_json_that_is_no_file_is_damage(
    tmp_path: Path, make: Callable[[Path], None] | None
) -> None:
    path = write(tmp_path, old())
    path.unlink()
    if make:
        make(path)
    with pytest.raises(DamagedError):
        read_record(tmp_path / "checkpoints" / "4")


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")]
)
def test_a_file_that_the_system_refuses_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(path: Path, mode: str) -> NoReturn:
        raise error

    write(tmp_path, old())
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=rf"metadata: cannot be read \({error.strerror}\)"):
        read_record(tmp_path / "checkpoints" / "4")


def test_the_newest_record_is_that_of_the_newest_checkpoint_that_is_sound(tmp_path: Path) -> None:
    assert newest_record(tmp_path) is None
    for step in (4, 6):
        position = SUMMED.position._replace(step=step)
        write(tmp_path, SUMMED._replace(position=position).to_json(), step)
    checked: list[int] = []
    newest = newest_record(tmp_path, lambda record: checked.append(record.position.step))
    assert newest and newest.position.step == 6 and checked == [6]
    write(tmp_path, "{", step=6)
    older = newest_record(tmp_path)
    assert older == SUMMED


def test_only_folders_named_by_a_step_are_checkpoints(tmp_path: Path) -> None:
    assert committed_steps(tmp_path) == []
    for name in ("9", "10", "011", "٣", "12.orbax-checkpoint-tmp", "-1", "x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "77").touch()
    assert committed_steps(tmp_path) == [10, 9]
