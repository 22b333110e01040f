"""What a run started from is in its checkpoints, and a resume takes exactly that or is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from maxbatch.around.huggingface.arrays import reading
from maxbatch.kinds.prompt.learner import Learner
from maxbatch.run.folder.position import CheckpointRecord, committed_steps, read_record
from maxbatch.run.pretraining import train
from maxbatch.run.weights import origin
from maxbatch.run.weights.origin import open_origin
from maxbatch.run.weights.parameters import FirstParameters, open_source, placed
from maxbatch.system.errors import ConfigError
from maxbatch.update.state import abstract_model
from tests.helpers.huggingface_folders import WIDTH, tiny_llama_tensors, write_folder
from tests.helpers.parameters import load_parameters
from tests.helpers.policies import train as train_policy
from tests.helpers.tiny import one_layer_config

RUN = (
    "global_batch_size=2",
    "checkpoint_period=1",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
)
ONE = jax.devices()[:1]


def newest(run_dir: Path) -> CheckpointRecord:
    return read_record(run_dir / "checkpoints" / str(committed_steps(run_dir)[0]))


def leaves(params: nnx.State) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(params)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin") / "base"
    train(one_layer_config(*RUN, f"run_dir={folder}", "steps=1"), ONE)
    return folder


@pytest.fixture(scope="module")
def adapted(base: Path) -> Path:
    """A run of adapters over the base, which trained on since."""
    run_dir = base.parent / "adapted"
    train(one_layer_config(*RUN, f"run_dir={run_dir}", "steps=1", *lora(base)), ONE)
    train(one_layer_config(*RUN, f"run_dir={base}", "steps=3"), ONE)
    return run_dir


def lora(base: Path) -> tuple[str, ...]:
    return f"load_parameters_path={base}", "lora_rank=2", "scan_layers=true"


def copies(tmp_path: Path, *folders: Path) -> list[Path]:
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in folders]


@pytest.mark.runs
def test_a_resume_of_adapters_takes_the_checkpoint_of_the_base_that_they_began_with(
    base: Path, adapted: Path, tmp_path: Path
) -> None:
    run_dir, moved = copies(tmp_path, adapted, base)
    assert newest(adapted).origin == origin.Origin(
        "load_parameters_path", str(base), newest(run_dir).origin.identity, 1
    )
    merged = leaves(load_parameters(run_dir)[2])
    train(one_layer_config(*RUN, f"run_dir={run_dir}", "steps=2", *lora(moved)), ONE)
    assert newest(run_dir).origin == newest(adapted).origin, "the pin stays as it was"
    shutil.rmtree(run_dir / "checkpoints" / "2")
    for before, after in zip(merged, leaves(load_parameters(run_dir)[2]), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("removed", "has no checkpoint of step 1, and the run in run_dir=.* started from it"),
        ("overwritten", "is not the model that the run in run_dir=.* started from"),
        ("missing", "no checkpoint"),
    ],
)
def test_a_base_that_is_not_what_it_was_is_named_before_anything_is_written(
    fault: str, words: str, base: Path, adapted: Path, tmp_path: Path
) -> None:
    run_dir, own = copies(tmp_path, adapted, base)
    if fault == "missing":
        shutil.rmtree(own)
    else:
        shutil.rmtree(own / "checkpoints" / "1")
    if fault == "overwritten":  # by a run of another seed
        again = one_layer_config(
            *RUN, f"run_dir={tmp_path / 'other'}", "steps=1", "init_weights_seed=7"
        )
        train(again, ONE)
        shutil.copytree(tmp_path / "other" / "checkpoints" / "1", own / "checkpoints" / "1")
    before = (run_dir / "config.yml").read_text()
    with pytest.raises(ConfigError, match=words) as error:
        train(one_layer_config(*RUN, f"run_dir={run_dir}", "steps=2", *lora(own)), ONE)
    assert "\n" not in str(error.value) and str(own) in str(error.value)
    assert (run_dir / "config.yml").read_text() == before


@pytest.mark.runs
def test_a_start_whose_source_trains_on_takes_the_newest_checkpoint_until_it_has_read_one(
    base: Path,
    adapted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (own,) = copies(tmp_path, base)
    there, away = own / "checkpoints", tmp_path / "away"
    config = one_layer_config(*RUN)
    abstract = placed(abstract_model(config.decoder)[1], ONE[0])
    expected = {
        step: leaves(open_source(there / str(step)).open(config.model, abstract)(abstract))
        for step in (2, 3)
    }
    away.mkdir()
    for step in ("1", "2", "3"):
        (there / step).rename(away / step)

    def train_on(step: int) -> None:
        """As the run that keeps one checkpoint."""
        shutil.rmtree(there)
        shutil.copytree(away / str(step), there / str(step))

    train_on(1)
    first = origin.RunOrigin(open_source, "load_parameters_path", str(own), tmp_path / "run", None)
    read = FirstParameters(first, config.model).open(abstract)
    assert read is not None and first.pin is not None and first.pin.step == 1
    train_on(2)
    for x, y in zip(leaves(read(abstract)), expected[2], strict=True):
        np.testing.assert_array_equal(x, y)
    assert first.pin.step == 2
    assert "/checkpoints/1: its run removed it while it was read; " in capsys.readouterr().err
    train_on(3)
    with pytest.raises(
        ConfigError,
        match=r"removed the checkpoint of step 2 while it was read, and the run in run_di",
    ):
        read(abstract)
    steps = iter([2, 3, None, None])
    monkeypatch.setattr(origin, "_named_step", lambda _: next(steps))
    late = origin.RunOrigin(open_source, "load_parameters_path", str(own), tmp_path / "run", None)
    assert late.source() is not None and late.pin is not None and late.pin.step == 3
    named = origin.RunOrigin(
        open_source, "load_parameters_path", str(there / "3"), tmp_path / "run", None
    )
    read = FirstParameters(named, config.model).open(abstract)
    shutil.rmtree(there / "3")
    with pytest.raises(ConfigError, match="checkpoints/3: its run removed it while it was read"):
        read(abstract)


def test_a_resume_that_needs_no_source_starts_without_it(base: Path, tmp_path: Path) -> None:
    (own,) = copies(tmp_path, base)
    keys = (*RUN, f"run_dir={tmp_path / 'run'}", f"load_parameters_path={own}/checkpoints/1")
    train(one_layer_config(*keys, "steps=1"), ONE)
    shutil.rmtree(own)
    train(one_layer_config(*keys, "steps=2"), ONE)
    pinned = newest(tmp_path / "run").origin
    assert pinned is not None and (pinned.source, pinned.step) == (f"{own}/checkpoints/1", 1)


@pytest.mark.runs
def test_a_resume_of_grpo_measures_from_the_checkpoint_that_it_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found: list[list[np.ndarray]] = []
    refer = Learner.referring_to
    monkeypatch.setattr(
        Learner, "referring_to", lambda _, params: found.append(leaves(params)) or refer(_, params)
    )
    base, run_dir = tmp_path / "base", tmp_path / "run"
    model = ("base_num_decoder_layers=1", "max_target_length=24")
    train(one_layer_config(*RUN, *model, f"run_dir={base}", "steps=1"), ONE)
    keys = (f"load_parameters_path={base}", "grpo_beta=0.1", "checkpoint_period=1")
    train_policy(run_dir, *keys, "steps=1")
    train(one_layer_config(*RUN, *model, f"run_dir={base}", "steps=3"), ONE)
    train_policy(run_dir, *keys, "steps=2")
    first, again = found
    for ours, theirs in zip(first, again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(
        ConfigError,
        match=r"started from load_parameters_path=.*step 1 and reads it again.*works: load",
    ):
        train_policy(run_dir, *keys, "steps=3", "load_parameters_path=")
    _forget_origins(run_dir)
    capfd.readouterr()
    train_policy(run_dir, *keys, "steps=3")
    warnings = [
        line
        for line in capfd.readouterr().err.splitlines()
        if "made before checkpoints stated" in line
    ]
    assert len(warnings) == 1 and newest(run_dir).origin.step == 3, "pinned from here on"


def _forget_origins(run_dir: Path) -> None:
    """Makes the checkpoints of a run those of one that began before checkpoints stated an origin."""
    for step in committed_steps(run_dir):
        checkpoint = run_dir / "checkpoints" / str(step)
        record = read_record(checkpoint)._replace(origin=None)
        (checkpoint / "position" / "metadata").write_text(json.dumps(record.to_json()))


# --- the identity of a folder, and of the hosts' ---


def big_folder(folder: Path) -> Path:
    """A folder whose file has gaps between 64 blocks of 4 kB."""
    vocabulary = 12_000
    tensors = tiny_llama_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.random.default_rng(1).normal(size=(vocabulary, WIDTH)).astype(np.float32)
    return write_folder(folder, tensors, vocab_size=vocabulary)


def flip(file: Path, place: int) -> None:
    """Changes one byte, and hides it from the size and the time of the last write."""
    times = file.stat()
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_every_byte_of_a_folder_is_in_its_identity(tmp_path: Path) -> None:
    folder = big_folder(tmp_path / "model")
    file = folder / "model.safetensors"
    whole, size = open_source(folder).identity, file.stat().st_size
    shutil.copytree(folder, tmp_path / "copy")
    assert open_source(tmp_path / "copy").identity == whole
    for place in (size // 3, size // 2 + 5000, size - 1):
        flip(file, place)
        assert open_source(folder).identity != whole
        flip(file, place)
    assert open_source(folder).identity == whole
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')
    assert open_source(folder).identity != whole, "these ids end what is sampled"


class Pod:
    """Hosts that see folders of their own, one asked after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[list[Any]]) -> None:
        self._answers = iter(answers)
        monkeypatch.setattr(origin, "gather", lambda value: [value, *next(self._answers)])
        monkeypatch.setattr(reading, "gather", lambda value: [value])


def test_hosts_with_different_models_are_refused_by_key(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "model")
    for path, kind in (
        (folder, ["HuggingFaceFolder", None]),
        (base, ["StoredCheckpoint", committed_steps(base)[0]]),
    ):
        opened = [[True]] if path is base else []
        for answers in ([*opened, [kind], ["another"]], [*opened, [["StoredCheckpoint", 77]]]):
            Pod(monkeypatch, answers)
            with pytest.raises(
                ConfigError,
                match=r"load_parameters_path='.*hosts have different models .*host 1 dif",
            ):
                open_origin(open_source, "load_parameters_path", str(path), None, "the run")


@pytest.mark.parametrize("is_shared", [True, False])
def test_hosts_that_see_the_same_files_hash_them_once_between_them(
    is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = big_folder(tmp_path / "model")
    monkeypatch.setattr("maxbatch.system.storage.contents.BLOCK_BYTES", 100_000)
    alone, read = open_source(folder).identity, []
    digests = reading.digests

    def counted(blocks: list[Any]) -> list[bytes]:
        read.append({(block.file.name, block.begin) for block in blocks})
        return digests(blocks)

    monkeypatch.setattr(reading, "digests", counted)
    gathered: dict[int, list[Any]] = {}
    totals = []
    for turn in range(2):  # the second time every host knows what the other one says
        for host in range(2):
            said = iter(gathered.get(1 - host, []) if turn else [None, None, "0"])
            mine = gathered[host] if turn else gathered.setdefault(host, [])

            def gather(
                value: Any, said: Any = said, mine: Any = mine, turn: int = turn
            ) -> list[Any]:
                theirs = next(said)
                if not turn:
                    mine.append(value)
                return (
                    [value, value if theirs is None else theirs]
                    if is_shared
                    else [value, "files of its own"]
                )

            monkeypatch.setattr(reading, "gather", gather)
            monkeypatch.setattr(jax, "process_index", lambda host=host: host)
            monkeypatch.setattr(jax, "process_count", lambda: 2)
            totals.append(open_source(folder).identity)
    first, second = read[-2:]
    assert totals[-2:] == [alone, alone]
    assert (not first & second) if is_shared else first == second
