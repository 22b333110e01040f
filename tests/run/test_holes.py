"""A run with holes counts what it trains on, and a resume may change the holes ahead of it alone."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import jax
import pytest

from maxbatch import ConfigError
from maxbatch.config.values import shown
from maxbatch.data.stream.fingerprint import fingerprint
from maxbatch.data.stream.stream import open_stream
from maxbatch.plan.holes import Holes
from maxbatch.run.context import RunContext
from maxbatch.run.own import Parts
from maxbatch.run.pretraining import open_pretraining, train
from maxbatch.run.resume import Resume
from maxbatch.run.session import Session
from tests.helpers.tiny import one_layer_config, read_metrics

pytestmark = pytest.mark.runs

# Two epochs of 20 samples in updates of 8; the first two of them end at own number 23.
KEYS = ("synthetic_samples=20", "num_epochs=2", "global_batch_size=8", "checkpoint_period=2")
HOLES = "3:5 7:12 30:33"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates of a run on two devices."""
    run_dir = tmp_path_factory.mktemp("holes") / "run"
    keys = (*KEYS, "num_epochs=1.1", f"skip_samples={HOLES}", f"run_dir={run_dir}")
    train(one_layer_config(*keys), jax.devices()[:2])
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def find(run_dir: Path, holes: str, *overrides: str) -> Resume:
    with ExitStack() as stack:
        keys = (*KEYS, f"skip_samples={holes}", f"run_dir={run_dir}", *overrides)
        context = RunContext(one_layer_config(*keys), jax.devices()[:1], stack)
        return Resume.find(context, open_pretraining(context))


def told(run_dir: Path, holes: str) -> list[str]:
    """The lines on what changes with a resume."""
    with ExitStack() as stack:
        keys = (*KEYS, f"skip_samples={holes}", f"run_dir={run_dir}")
        context = RunContext(one_layer_config(*keys), jax.devices()[:1], stack)
        return Session(context, open_pretraining(context))._changes


def test_lines_state_both_positions_and_fingerprints_are_those_of_own_numbers(
    trained: Path,
) -> None:
    lines = read_metrics(trained)
    assert [line["samples_seen"] for line in lines] == [8, 15]
    assert [line["stream_position"] for line in lines] == [15, 22]
    whole, position = open_stream(one_layer_config(*KEYS)), 0
    for line in lines:
        own = [
            n for n in range(position, line["stream_position"]) if n not in Holes([(3, 5), (7, 12)])
        ]
        assert line["data_fingerprint"] == fingerprint([whole.batch(own)])
        position = line["stream_position"]


def test_a_resume_on_other_devices_with_other_holes_ahead_is_the_run_that_had_them(
    run_dir: Path, tmp_path: Path
) -> None:
    changed = "3:5 7:12 22:24 30:31 39:80"
    train(
        one_layer_config(*KEYS, f"skip_samples={changed}", f"run_dir={run_dir}"), jax.devices()[:4]
    )
    # The first part of the run had an update of 7 samples, and so have the own numbers here.
    own = [n for n in range(40) if n not in Holes([(3, 5), (7, 12), (22, 24), (30, 31), (39, 80)])]
    whole, position = open_stream(one_layer_config(*KEYS)), 0
    for line in read_metrics(run_dir):
        samples = own[position : line["samples_seen"]]
        assert line["data_fingerprint"] == fingerprint([whole.batch(samples)])
        assert line["stream_position"] == samples[-1] + 1
        position = line["samples_seen"]
    assert position == len(own)


def test_holes_behind_the_position_must_stay(run_dir: Path) -> None:
    for holes, works in (
        ("", "3:5 7:12"),
        ("3:5 7:13 25:40", "3:5 7:12 25:40"),
        ("3:5 7:12 21:25", "3:5 7:12 22:25"),
    ):
        with pytest.raises(ConfigError) as refused:
            find(run_dir, holes)
        message = str(refused.value)
        assert message.startswith(f"skip_samples={holes}: must leave out what the run has left out")
        assert "its checkpoint of step 2, after 15 samples (stream position 22)" in message
        assert message.endswith(f'; works: skip_samples="{works}"')
        assert find(run_dir, works).position.samples_seen == 15
    assert find(run_dir, "3:5 7:12 22:39").planned.plan.total_samples == 16


def test_a_resume_says_what_other_holes_change(run_dir: Path) -> None:
    (length,) = told(run_dir, HOLES)
    assert length.startswith("num_epochs: 1.1 before, 2 now"), "of the run in the fixture"
    assert told(run_dir, HOLES) == []
    assert told(run_dir, "3:5 7:12 25:40") == [
        "skip_samples: 3:5 7:12 30:33 before, 3:5 7:12 25:40 now: changes the samples ahead that "
        "are left out",
        "the run ends after 18 samples; it was to end after 30",
    ]
    assert told(run_dir, "3:5 7:12 25:90") == [
        "skip_samples: 3:5 7:12 25:40 before, 3:5 7:12 25:90 now: changes the samples ahead that "
        "are left out"
    ]


def test_a_file_of_holes_is_known_by_its_content(run_dir: Path, tmp_path: Path) -> None:
    file, moved = tmp_path / "holes.txt", tmp_path / "moved.txt"
    file.write_text("3:5\n7:12\n")
    moved.write_text("7:12\n3:5\n")
    told(run_dir, HOLES)
    told(run_dir, str(file))
    assert told(run_dir, str(moved)) == [
        f"skip_samples: {shown(str(file))} before, {shown(str(moved))} now: changes the samples "
        "ahead that are left out"
    ]
    moved.write_text("7:12\n3:5\n30:39\n")
    assert told(run_dir, str(moved)) == ["changed since the last session: content of skip_samples"]
    moved.write_text("7:12\n3:6\n30:39\n")
    with pytest.raises(
        ConfigError, match=r"before its checkpoint of step 2.*; give its ranges again"
    ):
        find(run_dir, str(moved))


def test_a_file_of_holes_that_changes_under_a_run_ends_it(tmp_path: Path) -> None:
    file = tmp_path / "holes.txt"
    file.write_text("3:5\n")

    class Writes:
        def append(self, record: dict[str, object]) -> None:
            file.write_text("3:6\n")

        def sync(self) -> None: ...
        def close(self) -> None: ...

    keys = (*KEYS, f"skip_samples={file}", f"run_dir={tmp_path}/run", "checkpoint_period=1")
    with pytest.raises(ConfigError, match=r"holes.txt: has changed since"):
        train(one_layer_config(*keys), jax.devices()[:1], Parts(outputs=(Writes(),)))
