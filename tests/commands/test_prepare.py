from __future__ import annotations

import filecmp
import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.around.formats import jsonl
from maxbatch.commands import prepare
from maxbatch.config.rules import check_vocabulary
from maxbatch.data.store import builder, formats, tokenise
from maxbatch.data.store.blocks import MappedFile
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.lookup import find_store, open_store
from maxbatch.data.store.token_store import TokenStore, manifest_checksum, store_files
from maxbatch.data.stream.stream import open_stream
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer, make_tokenizer
from maxbatch.system.errors import TrainingError
from maxbatch.system.processes.worker_pool import WorkerPool
from tests.data.tokenizers.test_tokenizers import write_bpe, write_without_unk_token
from tests.helpers.command import maxbatch
from tests.helpers.corpus import some_texts, write_jsonl
from tests.helpers.processes import alive, pids_of, wait_for

Output = pytest.CaptureFixture[str]


@pytest.fixture
def data(tmp_path: Path) -> str:
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ["", *some_texts(200)]])
    return f"dataset_path={tmp_path}/a.jsonl"


def run(*arguments: str) -> int:
    parser = ArgumentParser()
    prepare.add_arguments(parser)
    args = parser.parse_intermixed_args(["dataset_type=jsonl", *arguments])
    return prepare.run(args)


def prepared(folder: str, *overrides: str, key: str = "dataset_path") -> TokenStore:
    config = load_config(overrides=["dataset_type=tokens", f"{key}={folder}", *overrides])
    return open_store(
        config.store, make_tokenizer(config.tokenizer_type, config.tokenizer_path), key
    )


def test_what_is_prepared_is_what_would_be_cached(data: str, capsys: Output) -> None:
    assert run(data, "--output", "out", "--workers", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("200 documents, ")
        and "1 record left out" in lines[0]
        and "MB/s" in lines[0]
    )
    config = load_config(overrides=["dataset_type=jsonl", data])
    cached, store = open_store(config.store, ByteTokenizer()), prepared("out")
    assert np.array_equal(cached.tokens[:], store.tokens[:]) and np.array_equal(
        cached.offsets, store.offsets
    )
    assert cached.manifest == store.manifest
    assert find_store(
        load_config(overrides=["dataset_type=tokens", "dataset_path=out"]).store, ByteTokenizer()
    )
    assert isinstance(store.tokens, MappedFile) and store.folder == Path("out").absolute(), (
        "nothing is copied"
    )


@pytest.mark.parametrize("tokenizer", ["byte", "huggingface"])
def test_the_number_of_workers_leaves_no_trace(
    data: str, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (jsonl, formats):
        monkeypatch.setattr(module, "PIECE_BYTES", 500)
    monkeypatch.setattr("maxbatch.data.store.documents.PIECE_BYTES", 500)
    overrides = [data]
    if tokenizer == "huggingface":
        overrides += [
            "tokenizer_type=huggingface",
            f"tokenizer_path={write_bpe(tmp_path, '<|endoftext|>')}",
        ]
    for workers in (1, 2, 3):
        run(*overrides, "--output", f"out{workers}", "--workers", str(workers))
    names = ["blocks.bin", "manifest.json", "offsets.npy", "records.jsonl", "tokens.bin"]
    for other in ("out2", "out3"):
        assert sorted(os.listdir(other)) == names
        assert filecmp.cmpfiles("out1", other, names, shallow=False)[0] == names


def test_the_first_bad_record_is_the_one_that_is_named_however_many_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (jsonl, formats):
        monkeypatch.setattr(module, "PIECE_BYTES", 100)
    monkeypatch.setattr("maxbatch.data.store.documents.PIECE_BYTES", 100)
    lines = ['{"text": "fine"}'] * 60
    lines[30] = lines[50] = "oops"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="line 31: not JSON"):
        run("dataset_path=a.jsonl", "--output", "out", "--workers", "3")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl"], "whole or not at all"
    run("dataset_path=a.jsonl", "skip_bad_records=true", "--output", "out", "--workers", "3")
    assert prepared("out", "skip_bad_records=true").manifest["skipped_records"] == 2


def test_a_worker_that_is_killed_ends_the_work_with_a_message(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = WorkerPool.submit

    def killing(pool: WorkerPool, items: list[object]) -> list[Future[object]]:
        pool.wait_for_setup()
        for pid in pids_of(pool):
            os.kill(pid, signal.SIGSTOP)
        futures = submit(pool, items)
        time.sleep(0.2)
        for pid in pids_of(pool):
            os.kill(pid, signal.SIGKILL)
        return futures

    monkeypatch.setattr(WorkerPool, "submit", killing)
    with pytest.raises(
        TrainingError, match=r"a\.jsonl: cannot be tokenised: the process ended with signal SIGKILL"
    ):
        run(data, "--output", "out", "--workers", "2")
    assert not Path("out").exists()


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_with_their_parent_also_when_it_is_killed(tmp_path: Path, busy: bool) -> None:
    os.mkfifo(tmp_path / "endless")
    (tmp_path / "part").touch()
    ask = "pool.submit([(job, Path('part'))]); time.sleep(1)"
    script = (
        "import functools, time\nfrom pathlib import Path\nfrom maxbatch import "
        "load_config\nfrom maxbatch.config.sections import DataConfig\nfrom maxbatch.data.store "
        "import tokenise\nfrom maxbatch.data.store.documents import DocumentSource\nfrom "
        "maxbatch.data.store.files import SourceFile\nfrom maxbatch.data.store.formats import "
        "Piece\nfrom maxbatch.data.store.token_store import TokenLayout\nfrom "
        "maxbatch.data.tokenizers.tokenizers import ByteTokenizer\nfrom maxbatch.system.processes.worker_pool "
        "import WorkerPool\nconfig = load_config().store\nsource = "
        "DocumentSource.from_config(config)\nhow = tokenise.Tokeniser(source, ByteTokenizer(), "
        "TokenLayout.from_config(config, ByteTokenizer()))\npool = "
        "WorkerPool(functools.partial(tokenise._part_writer, how), "
        "2)\npool.wait_for_setup()\njob = (Piece(SourceFile('endless', 'endless', 0, 0), 0, 0, "
        f"0),)\n{ask if busy else ''}\nprint(*(worker._process.pid for worker in pool._workers), "
        "flush=True)\ntime.sleep(100)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(alive, workers)), seconds=60)


def test_the_same_command_again_reads_nothing(
    data: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(data, "--output", "out", "--workers", "1")
    monkeypatch.setattr(DocumentSource, "documents", lambda *_: pytest.fail("read again"))
    monkeypatch.setattr(builder, "_write_files", lambda *_: pytest.fail("built again"))
    capsys.readouterr()
    run(data, "--output", "out")
    assert capsys.readouterr().out.startswith("unchanged: 200 documents, ")


def test_a_source_that_changed_is_prepared_anew(data: str) -> None:
    run(data, "--output", "out", "--workers", "1")
    opened = prepared("out")
    mapped = opened.tokens[:3].tolist()
    with open("a.jsonl", "a") as file:
        file.write('{"text": "more"}\n')
    run(data, "--output", "out", "--workers", "1")
    assert prepared("out").manifest["documents"] == 201
    assert sorted(os.listdir()) == ["a.jsonl", "out"], "no litter"
    assert opened.tokens[:3].tolist() == mapped, "a run keeps what it mapped"
    with pytest.raises(ConfigError, match="replaced since it was opened"):
        _ = pickle.loads(pickle.dumps(opened)).tokens


def test_a_store_that_is_replaced_takes_nothing_else_with_it(data: str, capsys: Output) -> None:
    run(data, "--output", "out", "--workers", "1")
    run(data, "--output", "out/second", "--workers", "1")
    Path("out/README").write_text("mine")
    with open("a.jsonl", "a") as file:
        file.write('{"text": "more"}\n')
    capsys.readouterr()
    run(data, "--output", "out", "--workers", "1")
    assert "replaces 200 documents" in capsys.readouterr().err
    assert prepared("out").manifest["documents"] == 201
    of_store = {*store_files(Path("out")), "records.jsonl"}
    assert {*os.listdir("out")} == {"README", "second", *of_store}
    assert (
        Path("out/README").read_text() == "mine"
        and prepared("out/second").manifest["documents"] == 200
    )


def test_another_datasets_store_is_not_replaced(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(data, "--output", "out", "--workers", "1")
    write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in some_texts(9)])
    monkeypatch.setattr(
        builder, "_write_files", lambda *_: pytest.fail("tokenised before it was refused")
    )
    said = (
        f"--output {tmp_path}/out: holds another dataset's store .*; works: --output "
        f"{tmp_path}/out-2"
    )
    with pytest.raises(ConfigError, match=said):
        run(f"dataset_path={tmp_path}/b.jsonl", "--output", "out")
    assert prepared("out").manifest["documents"] == 200
    os.rename("a.jsonl", "moved.jsonl")
    assert run("dataset_path=moved.jsonl", "--output", "out") == 0, (
        "the same content is the same store"
    )


@pytest.mark.parametrize("is_there", [True, False])
def test_an_output_that_is_a_link_to_a_folder_is_taken(data: str, is_there: bool) -> None:
    if is_there:
        os.makedirs("elsewhere/tokens")
    os.symlink("elsewhere/tokens", "out")
    for _ in range(2):
        assert run(data, "--output", "out", "--workers", "1") == 0
        assert os.path.islink("out") and prepared("elsewhere/tokens").manifest["documents"] == 200
        with open("a.jsonl", "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in some_texts(200)[::-1])


def test_a_folder_with_other_things_is_refused_with_one_that_works(
    data: str, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").touch()
    with pytest.raises(
        ConfigError, match=f"--output {tmp_path}/home: .*; works: --output {tmp_path}/home/tokens"
    ):
        run(data, "--output", "home")
    assert os.listdir("home") == ["thesis.tex"]
    run(data, "--output", "home/tokens", "--workers", "1")
    (tmp_path / "empty").mkdir()
    run(data, "--output", "empty", "--workers", "1")
    with pytest.raises(ConfigError, match="is not a folder"):
        run(data, "--output", "a.jsonl")


@pytest.mark.parametrize("is_of_before", [False, True])
def test_every_flipped_bit_of_bytes_is_found(data: str, is_of_before: bool) -> None:
    run(data, "add_bos=false", "--output", "out", "--workers", "1")
    if is_of_before:
        manifest = json.loads(Path("out/manifest.json").read_text())
        del manifest["vocab_size"], manifest["checksum"], manifest["sizes"]["blocks.bin"]
        Path("out/manifest.json").write_text(json.dumps(manifest))
        Path("out/blocks.bin").unlink()
    run("--verify", "out")
    for place in [*range(40), os.path.getsize("out/tokens.bin") - 3]:
        _flip("out/tokens.bin", place)
        with pytest.raises(ConfigError, match=r"out.*tokens\.bin"):
            run("--verify", "out")
        _flip("out/tokens.bin", place)


def test_ids_outside_of_the_vocabulary_are_found(data: str, tmp_path: Path) -> None:
    bpe = ["tokenizer_type=huggingface", f"tokenizer_path={write_bpe(tmp_path, '<s>', '</s>')}"]
    run(data, *bpe, "--output", "out", "--workers", "1")
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert (
        manifest["vocab_size"]
        == make_tokenizer("huggingface", load_config(overrides=bpe).tokenizer_path).vocab_size
    )
    other = {**manifest, "vocab_size": 20}
    Path("out/manifest.json").write_text(
        json.dumps({**other, "checksum": manifest_checksum(other)})
    )
    with pytest.raises(
        ConfigError, match=r"tokens\.bin: .*document 0 has the id \d+, and its ids end at 19"
    ):
        run("--verify", "out")


def test_a_store_without_a_token_is_verified(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ByteTokenizer, "encode_utf8_batch", lambda _, texts: [np.zeros(0, np.uint8) for _ in texts]
    )
    run(data, "add_bos=false", "add_eos=false", "--output", "out", "--workers", "1")
    run("--verify", "out")


def test_a_tokenizer_that_lacks_its_unk_token_is_one_line_also_from_workers(
    data: str, tmp_path: Path
) -> None:
    path = write_without_unk_token(tmp_path / "t")
    for workers in ("1", "2"):
        with pytest.raises(
            ConfigError, match=r"tokenizer_path=.*cannot encode every text: .*\[UNK\]"
        ) as raised:
            run(
                data,
                "tokenizer_type=huggingface",
                f"tokenizer_path={path}",
                "add_bos=false",
                "add_eos=false",
                "--output",
                "out",
                "--workers",
                workers,
            )
        assert "\n" not in str(raised.value)
        assert not Path("out").exists()


def _flip(path: str, place: int) -> None:
    data = bytearray(Path(path).read_bytes())
    data[place] ^= 1
    Path(path).write_bytes(data)


def test_another_tokenizer_than_the_prepared_one_is_refused(data: str, tmp_path: Path) -> None:
    bpe = ["tokenizer_type=huggingface", f"tokenizer_path={write_bpe(tmp_path, '<s>', '</s>')}"]
    run(data, *bpe, "--output", "out", "--workers", "1")
    assert prepared("out", *bpe).manifest["tokenizer"].startswith("huggingface:")
    with pytest.raises(
        ConfigError, match=r"tokenizer_type=byte, .*prepared with tokenizer 'huggingface:.*'byte'"
    ):
        prepared("out")
    run(data, "--output", "bytes", "--workers", "1")
    with pytest.raises(ConfigError, match="works: tokenizer_type=byte tokenizer_path=''"):
        prepared("bytes", *bpe)


@pytest.mark.parametrize("key", ["add_bos", "add_eos"])
def test_other_special_tokens_than_the_prepared_ones_are_refused(data: str, key: str) -> None:
    run(data, f"{key}=false", "--output", "out", "--workers", "1")
    with pytest.raises(ConfigError, match=f"{key}=true: .*; works: {key}=false"):
        prepared("out")
    assert prepared("out", f"{key}=false")


def test_the_next_command_is_what_was_typed_with_the_folder_instead(
    data: str, tmp_path: Path, capsys: Output
) -> None:
    write_jsonl(tmp_path / "held.jsonl", [{"t": "held out"}])
    (tmp_path / "b.jsonl").write_text('{"t": "x"}\n')
    bpe = ["tokenizer_type=huggingface", f"tokenizer_path={write_bpe(tmp_path, '<s>', '</s>')}"]
    typed = [
        "dataset_path=b.jsonl",
        "text_field=t",
        *bpe,
        "eval_dataset_path=held.jsonl",
        "steps=3",
    ]
    run(*typed, "--output", "my out", "--workers", "1")
    of_eval, following = capsys.readouterr().out.splitlines()[-2:]
    eval_command = shlex.split(of_eval)
    assert eval_command[:2] == ["maxbatch", "prepare"]
    run(*eval_command[2:], "--workers", "1")
    train = shlex.split(following)[1:]
    assert train[:2] == ["maxbatch", "train"] and "steps=3" in train
    config = load_config(overrides=train[2:])
    assert config.dataset_type == "tokens" and config.dataset_path == "my out"
    tokenizer = make_tokenizer(config.tokenizer_type, config.tokenizer_path)
    check_vocabulary(config, tokenizer.vocab_size)
    assert open_store(config.store, tokenizer).manifest["documents"] == 1
    assert open_store(config.store, tokenizer, "eval_dataset_path").manifest["text_bytes"] == len(
        "held out"
    )


@pytest.mark.runs
def test_prepare_is_a_command(data: str) -> None:
    done = maxbatch("prepare", "dataset_type=jsonl", data, "--output", "out")
    assert done.returncode == 0 and "next: maxbatch train " in done.stdout and not done.stderr
    stats = maxbatch("data", "dataset_type=tokens", "dataset_path=out", "--stats", "--json")
    assert json.loads(stats.stdout)["documents"] == 200
    assert maxbatch("prepare", "--verify", "out").returncode == 0
    assert maxbatch("prepare", data).returncode == 2


def test_text_files_as_bytes_are_copied_by_one_process(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(tokenise, "WorkerPool", lambda *_: pytest.fail("started workers"))
    run("dataset_type=text", "dataset_path=a.txt", "--output", "out", "--workers", "2")
    assert prepared("out").tokens[:].tolist() == [256, *b"text", 257]


def test_what_is_prepared_is_the_same_stream_so_a_run_goes_on_with_it(data: str) -> None:
    run(data, "--output", "out")
    raw = open_stream(load_config(overrides=["dataset_type=jsonl", data]))
    tokens = open_stream(load_config(overrides=["dataset_type=tokens", "dataset_path=out"]))
    assert tokens.identity == raw.identity
    for name, array in raw.read(0, 3 * (raw.samples_per_epoch or 0)).items():
        np.testing.assert_array_equal(tokens.read(0, len(array))[name], array)
