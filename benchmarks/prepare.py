"""(f) The work of `maxbatch prepare` with two workers, their start included, against what it is
made of: for BPE the tokenizer library's own batch call over the same documents (it uses threads
itself), for bytes a loop in numpy that reads the same files, checks UTF-8 and writes the tokens.
Bytes mostly wait for the disk.
"""

from __future__ import annotations

import json
import os
import random
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measurement import Measurement, ratio, seconds_in_turns
from maxbatch.config.loading import load_config
from maxbatch.data.store.builder import Build, build_store
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.tokenizers.tokenizers import make_tokenizer

BAR = 0.9
WORKERS = 2
_VOCAB_SIZE = 8192
_MEGABYTES = {"bytes": 1000, "BPE": 100}
_TURNS = {"bytes": 5, "BPE": 3}


def measure(quick: bool) -> list[Measurement]:
    """Ratios of MB/s, bytes and BPE."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured = [
            _bytes(folder, 1 if quick else _MEGABYTES["bytes"], 1 if quick else _TURNS["bytes"])
        ]
        measured.append(
            _bpe(folder, 1 if quick else _MEGABYTES["BPE"], 1 if quick else _TURNS["BPE"])
        )
    return measured


def _bytes(folder: Path, megabytes: int, turns: int) -> Measurement:
    files = _text_files(folder / "text", megabytes)

    def plain() -> None:
        with tempfile.TemporaryFile(dir=folder) as tokens:
            for file in files:
                text = file.read_bytes()
                text.decode("utf-8")
                np.frombuffer(text, np.uint8).astype(np.uint16).tofile(tokens)
            tokens.flush()
            os.fsync(tokens)

    config = [
        "dataset_type=text",
        f"dataset_path={folder / 'text'}",
        "add_bos=false",
        "add_eos=false",
    ]
    return _compared("bytes", folder, config, plain, megabytes, turns)


def _bpe(folder: Path, megabytes: int, turns: int) -> Measurement:
    from tokenizers import Tokenizer

    tokenizer = folder / "tokenizer.json"
    _train_bpe(tokenizer)
    path = folder / "documents.jsonl"
    documents = list(_documents(megabytes))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))

    def library() -> None:
        Tokenizer.from_file(str(tokenizer)).encode_batch(documents, add_special_tokens=False)

    config = [
        "dataset_type=jsonl",
        f"dataset_path={path}",
        "tokenizer_type=huggingface",
        f"tokenizer_path={tokenizer}",
        "add_bos=false",
    ]
    return _compared("BPE", folder, config, library, megabytes, turns)


def _compared(
    name: str,
    folder: Path,
    overrides: list[str],
    other: Callable[[], Any],
    megabytes: int,
    turns: int,
) -> Measurement:
    config = load_config(overrides=overrides).store
    source, tokenizer = (
        DocumentSource.from_config(config),
        make_tokenizer(config.tokenizer_type, config.tokenizer_path),
    )

    def prepare() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as output:
            build_store(Path(output, "tokens"), Build(source, tokenizer, config, WORKERS))

    seconds = seconds_in_turns({"prepare": prepare, "other": other}, turns)
    what = {"bytes": "a numpy loop", "BPE": "Tokenizer.encode_batch"}[name]
    return ratio(
        f"prepare / {what}, {megabytes} MB, {WORKERS} workers, MB/s",
        seconds["other"],
        seconds["prepare"],
        bar=BAR,
        sense="at least",
    )


def _documents(megabytes: int) -> Iterator[str]:
    """Cuts of the standard library's sources: log-normal in length, median 2,000 characters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    source = "\n".join(file.read_text(errors="ignore") for file in sorted(root.glob("*.py")))
    rng = random.Random(0)
    size = 0
    while size < megabytes * 10**6:
        length = min(len(source), int(rng.lognormvariate(7.6, 0.9)) + 1)
        begin = rng.randrange(len(source) - length + 1)
        size += length
        yield source[begin : begin + length]


def _text_files(folder: Path, megabytes: int) -> list[Path]:
    """Files of a megabyte each."""
    folder.mkdir()
    text = "\n\n".join(_documents(2)).encode()
    files = [folder / f"{number:05}.txt" for number in range(megabytes)]
    for number, file in enumerate(files):
        file.write_bytes(
            text[number % 1000 : number % 1000 + 10**6].decode(errors="ignore").encode()
        )
    return files


def _train_bpe(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_documents(5), trainer)
    tokenizer.save(str(path))
