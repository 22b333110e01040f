"""A damaged JSON file, ours or another program's, is one line that names it: each kind of damage
for each reader.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.around.huggingface.folder.config_json import keys_of_folder
from maxbatch.cli import main
from maxbatch.commands import prepare
from maxbatch.commands.report import make_page
from maxbatch.config.model_forms import end_tokens
from maxbatch.data.stream.stream import open_stream
from maxbatch.data.tokenizers.tokenizers import make_tokenizer
from maxbatch.parallel.mesh import make_mesh
from maxbatch.run.compile.saved import SavedPrograms
from maxbatch.run.folder.best_checkpoint import read_best
from maxbatch.run.folder.devices import read_devices
from maxbatch.run.folder.outcome import read_outcome
from maxbatch.run.folder.position import DamagedError, read_record
from maxbatch.run.weights.shard_files import read_index
from maxbatch.system.storage.safetensors import stored_tensors
from tests.data.tokenizers.test_tokenizers import write_bpe
from tests.helpers.corpus import write_jsonl
from tests.helpers.reports import make_sweep

CONTENTS = {
    "empty": b"",
    "cut off": b"{",
    "a list": b"[]",
    "a list of lists": b"[[]]",
    "a text": b'"version"',
    "a number": b"3",
    "null": b"null",
    "NaN": b"NaN",
    "a number that overflows": b'{"number": 1e400}',
    "another field": b'{"number": [0]}',
    "a number of 9,000 digits": b"9" * 9000,
    "100,000 lists in one another": b"[" * 100_000,
    "no text": b"\xff\xfe",
    "a zero": b"\0",
    "a pickle": b"\x80\x04N.",
}
PLACES: dict[str, Callable[[Path], object]] = {"a folder": Path.mkdir, "a pipe": os.mkfifo}


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader of a JSON file in a folder.

    Args:
      file: the path of the file below the folder.
      read: reads it, given the folder.
      message: a pattern of the error's message.
      make: writes what else must be there, in the empty folder that is the working folder.
      more: contents that are wrong for this file.
      sound: kinds of damage that are none for this file.
    """

    file: str
    read: Callable[[Path], object]
    message: str
    make: Callable[[Path], object] = Path.exists
    more: tuple[bytes, ...] = ()
    sound: frozenset[str] = frozenset()


def _write_store(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl", [{"text": "some words"}])
    words = ["dataset_type=jsonl", "dataset_path=a.jsonl", "--output", "out", "--workers", "1"]
    assert main(["prepare", *words]) == 0


def _verify(folder: Path) -> None:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    prepare.run(parser.parse_intermixed_args(["--verify", str(folder / "out")]))


def _open_store(folder: Path) -> None:
    open_stream(load_config(overrides=["dataset_type=tokens", f"dataset_path={folder / 'out'}"]))


def _read_programs(folder: Path) -> None:
    SavedPrograms(str(folder), {}, make_mesh(load_config(), jax.devices()[:1]))


def _report(_: Path) -> None:
    make_page([Path("sw")])


_UNREAD = r": cannot be read \("
_ABSENT = frozenset(PLACES)  # of a reader for which nothing but a file is a file
READERS = {
    "an outcome": Reader(
        "outcome.json",
        read_outcome,
        rf"outcome\.json{_UNREAD}",
        more=(b'{"status": "lost", "reason": ""}', b'{"status": "done"}'),
        sound=frozenset({"null"}),
    ),
    "devices": Reader(
        "devices.json",
        read_devices,
        rf"devices\.json{_UNREAD}",
        more=(b'[{"first_step": 1}]', b"[null]"),
        sound=frozenset({"a list", "null"}),
    ),
    "the best checkpoint": Reader("best", read_best, rf"best{_UNREAD}", sound=_ABSENT | {"null"}),
    **{
        f"{name} of a report": Reader(
            f"sw/{file}", _report, rf"{name}\.json{_UNREAD}", lambda _: make_sweep(), sound=sound
        )
        for name, file, sound in (
            ("outcome", "trials/0000/outcome.json", frozenset({"null"})),
            ("devices", "trials/0000/devices.json", frozenset({"a list", "null"})),
            ("trial", "trials/0000/trial.json", frozenset({"null"})),
            ("sweep", "sweep.json", _ABSENT | {"null"}),
        )
    },
    "the position of a checkpoint": Reader(
        "checkpoints/4/position/metadata",
        lambda folder: read_record(folder / "checkpoints" / "4"),
        ".",
        lambda folder: (folder / "checkpoints/4/position").mkdir(parents=True),
        more=(b"{}", b'{"position": 4}'),
    ),
    "the index of a checkpoint": Reader(
        "index.json",
        lambda folder: read_index(folder / "index.json"),
        ".",
        sound=frozenset({"a folder"}),  # an error of the system, which readers of items word
    ),
    "compiled programs": Reader(
        "manifest.json",
        _read_programs,
        "holds no compiled programs",
        more=(
            b'{"format": 3}',
            b'{"format": 3, "shapes": 7}',
            b'{"format": 3, "shapes": [[1e400, 1]]}',
            b'{"format": 3, "shapes": [[1.0, 1]]}',
            b'{"format": 3, "shapes": [[1, 2, 3]]}',
            b'{"format": 3, "shapes": [[0, 1]]}',
        ),
    ),
    "a prepared dataset that is verified": Reader(
        "out/manifest.json",
        _verify,
        "^--verify .*out: not a prepared dataset, or a damaged one",
        _write_store,
        more=(b'{"version": 2, "sizes": 3}',),
    ),
    "a prepared dataset that is opened": Reader(
        "out/manifest.json",
        _open_store,
        "^dataset_path='.*out'.*damaged",
        _write_store,
        more=(b'{"version": 2, "sizes": 3}',),
    ),
    "the tokens that end a text": Reader(
        "generation_config.json",
        end_tokens,
        r"generation_config\.json: (is not|must be a) JSON|nested more than 100 deep",
        lambda folder: (folder / "config.json").write_text("{}"),
        sound=_ABSENT | {"another field"},
    ),
    "a model of Hugging Face's": Reader("config.json", keys_of_folder, r"config\.json"),
    "an index of safetensors": Reader(
        "model.safetensors.index.json",
        stored_tensors,
        r"model\.safetensors\.index\.json: is (not|nested)",
        more=(b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": ["b"]}}'),
        sound=_ABSENT,
    ),
    "the config of a tokenizer": Reader(
        "tokenizer_config.json",
        lambda folder: make_tokenizer("huggingface", str(folder)),
        r"tokenizer_path=.*tokenizer_config\.json",
        lambda folder: write_bpe(folder, "<s>", "</s>"),
        sound=_ABSENT | {"another field"},
    ),
}
CASES = [
    (name, kind)
    for name, reader in READERS.items()
    for kind in (*CONTENTS, *PLACES, *map(bytes.decode, reader.more))
    if kind not in reader.sound
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders that readers have made, by reader."""
    return {}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_damaged_file_is_one_line_that_names_it(
    name: str,
    kind: str,
    made: dict[str, Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = READERS[name]
    if name not in made:
        made[name] = tmp_path_factory.mktemp("made")
        with monkeypatch.context() as patch:
            patch.chdir(made[name])
            reader.make(made[name])
    shutil.copytree(made[name], tmp_path, dirs_exist_ok=True)
    file = tmp_path / reader.file
    file.unlink(missing_ok=True)
    if kind in PLACES:
        PLACES[kind](file)
    else:
        file.write_bytes(CONTENTS.get(kind, kind.encode()))
    with pytest.raises((ConfigError, DamagedError)) as refused:
        reader.read(tmp_path)
    assert re.search(reader.message, str(refused.value)) and "\n" not in str(refused.value)
