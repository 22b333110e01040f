"""Each form of maxbatch 0.4 and before is one line that names the version which still reads it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.cli import main
from maxbatch.run.folder.position import committed_steps, read_record
from maxbatch.run.own import Parts
from maxbatch.run.pretraining import train
from maxbatch.run.record.recorder import Output, Record
from maxbatch.run.weights import local_checkpoints, local_files
from tests.helpers.tiny import TINY_RUN, one_layer_config

ONE = jax.devices()[:1]
NO_LOCAL = ("local_checkpoint_directory=", "local_checkpoint_period=0")
SAYS = "is in a form of maxbatch 0.4 or before ("
NAMES = "maxbatch==0.5.0 still reads it"


class Lost(BaseException):
    """The end of a process, without a last checkpoint."""


class EndsAtFour(Output):
    def append(self, record: Record) -> None:
        if record["step"] == 4:
            raise Lost


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in `run` that was lost after update 4, with checkpoint 2, and local checkpoint 3 in
    `disk`.
    """
    folder = tmp_path_factory.mktemp("old")
    with pytest.raises(Lost):
        train(config_of(folder, *local(folder)), ONE, Parts(outputs=[EndsAtFour()]))
    assert committed_steps(folder / "run") == [2]
    return folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_once, tmp_path / "old"))


def config_of(folder: Path, *overrides: str):
    return one_layer_config(
        f"run_dir={folder / 'run'}", "checkpoint_period=2", "steps=5", *overrides
    )


def local(folder: Path) -> tuple[str, ...]:
    return f"local_checkpoint_directory={folder / 'disk'}", "local_checkpoint_period=3"


def content(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder but for the lock, which a refused start holds too."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- old forms, made of today's ---


def arrays_of_orbax(checkpoint: Path) -> None:
    (checkpoint / "_CHECKPOINT_METADATA").write_text("{}")
    for item in ("params", "opt_state"):
        shutil.rmtree(checkpoint / item)
        (checkpoint / item / "d").mkdir(parents=True)
        for name in ("_METADATA", "manifest.ocdbt", "d/0a1b"):
            (checkpoint / item / name).write_text("{}")


def responses_in_json(checkpoint: Path) -> None:
    (checkpoint / "ahead").mkdir()
    (checkpoint / "ahead" / "metadata").write_text('{"ahead": ""}')


def part_of_the_base(checkpoint: Path) -> None:
    record = read_record(checkpoint)
    model = record.identity["model"] | {"base": "0a1b"}
    old = record._replace(origin=None, identity=record.identity | {"model": model})
    (checkpoint / "position" / "metadata").write_text(json.dumps(old.to_json()))


READERS = {
    "train": lambda run: ("train", f"{run}/config.yml", f"run_dir={run}", *NO_LOCAL),
    "from its parameters": lambda run: (
        "train", f"{run}/config.yml", "run_dir=next", f"load_parameters_path={run}",
    ),
    "from its state": lambda run: (
        "train", f"{run}/config.yml", "run_dir=next", f"load_full_state_path={run}",
    ),
    "rl": lambda run: ("rl", *TINY_RUN, f"run_dir={run}"),
    "plan": lambda run: ("plan", f"{run}/config.yml", f"run_dir={run}"),
    "compile": lambda run: ("compile", f"{run}/config.yml", f"run_dir={run}"),
    "score": lambda run: ("score", f"{run}", "a.jsonl"),
    "generate": lambda run: ("generate", f"{run}/checkpoints/2", "--max-new-tokens", "1"),
    "evaluate": lambda run: ("evaluate", f"{run}", "--tasks", "none"),
    "export": lambda run: ("export", f"{run}", "--output", "exported"),
    "report": lambda run: ("report", f"{run}", "--output", "report.html"),
    "critical-batch": lambda run: ("critical-batch", f"{run}"),
}  # fmt: skip


@pytest.mark.parametrize(
    "reader",
    [
        # lm-eval is where this group runs
        pytest.param(name, marks=[pytest.mark.parity, pytest.mark.slow] * (name == "evaluate"))
        for name in READERS
    ],
)
def test_every_reader_of_arrays_of_orbax_names_the_folder_and_maxbatch_0_5_0(
    trained: Path, capfd: pytest.CaptureFixture[str], reader: str
) -> None:
    run = trained / "run"
    arrays_of_orbax(run / "checkpoints" / "2")
    Path("a.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    assert_refused(READERS[reader](run), run, capfd)
    assert not any(Path(name).exists() for name in ("next", "exported", "report.html"))


@pytest.mark.parametrize("reader", ["train", "score"])
@pytest.mark.parametrize("form", [responses_in_json, part_of_the_base])
def test_responses_in_json_and_a_part_of_the_adapted_model_are_named_too(
    trained: Path, capfd: pytest.CaptureFixture[str], form: Callable[[Path], None], reader: str
) -> None:
    run = trained / "run"
    form(run / "checkpoints" / "2")
    Path("a.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    assert_refused(READERS[reader](run), run, capfd)


def assert_refused(words: tuple[str, ...], run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = content(run)
    capfd.readouterr()
    assert main([*words]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1 and f"{run}/checkpoints/2: {SAYS}" in lines[0] and NAMES in lines[0]
    assert content(run) == before, "untouched"


def test_a_local_checkpoint_in_one_file_is_named_too(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state,) = (trained / "disk").glob("run-*/host-0/3")
    for module in (local_checkpoints, local_files):
        monkeypatch.setattr(module, "run_name", lambda run_dir: state.parents[1].name)
    index = json.loads((state / "state.json").read_text())
    ((file, blocks),) = index.pop("files").items()
    (state / file).rename(state / "blocks.bin")
    old = {name: value for name, value in index.items() if name != "checksum"} | {"blocks": blocks}
    checksum = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    (state / "state.json").write_text(json.dumps(old | {"checksum": checksum}))
    before = content(trained)
    with pytest.raises(ConfigError) as refused:
        train(config_of(trained, *local(trained)), ONE)
    assert str(refused.value).startswith(f"{state}: {SAYS}") and NAMES in str(refused.value)
    assert content(trained) == before, "untouched"


def test_an_old_checkpoint_behind_a_newer_one_of_today_is_left_alone(trained: Path) -> None:
    run = trained / "run"
    train(config_of(trained, "steps=4"), ONE)
    arrays_of_orbax(run / "checkpoints" / "2")
    before = content(run / "checkpoints" / "2")
    assert train(config_of(trained, "steps=5"), ONE).position.step == 5
    assert content(run / "checkpoints" / "2") == before


def test_a_former_key_that_changes_nothing_is_left_out() -> None:
    Path("former.yml").write_text("attention_output_dim: -1\n")
    assert "attention_output_dim" not in load_config("former.yml")
