"""The examples of the README's section on data formats, as a user types them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from maxbatch.cli import main
from tests.data.store.test_formats import byte_strings, example, write_gzip, write_jsonl, write_parquet, write_records
from tests.data.store.test_tokenizers import write_bpe
from tests.helpers.command import maxbatch

TEXTS = [f"document {number}: the quick brown fox jumps over the lazy dog" for number in range(40)]

EXAMPLES = {
    "text": "maxbatch data dataset_type=text dataset_path='books/*.txt' --stats",
    "jsonl": "maxbatch data dataset_type=jsonl dataset_path='web.jsonl;more.jsonl.gz' text_field=content --stats",
    "parquet": "maxbatch data dataset_type=parquet dataset_path=shards text_field=body --stats",
    "arrayrecord": "maxbatch data dataset_type=arrayrecord dataset_path=c4 --stats",
    "tf.train.Example": "maxbatch data dataset_type=arrayrecord dataset_path=tfds record_format=example --stats",
}
TOKENS = [
    "maxbatch prepare dataset_type=parquet dataset_path=shards text_field=body tokenizer_type=huggingface"
    " tokenizer_path=tokenizer.json vocab_size=512 --output tokens",
    "maxbatch prepare --verify tokens",
    "maxbatch train dataset_type=tokens dataset_path=tokens tokenizer_type=huggingface"
    " tokenizer_path=tokenizer.json vocab_size=512",
]


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    """What a user has: here, with a few documents each."""
    for folder in ("books", "shards", "c4", "tfds"):
        (tmp_path / folder).mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / f"books/{number:02}.txt").write_text(text)
    write_jsonl(tmp_path / "web.jsonl", TEXTS[:30], "content")
    write_gzip(tmp_path / "more.jsonl.gz", TEXTS[30:], "content")
    for shard, texts in enumerate((TEXTS[:25], TEXTS[25:])):
        name = f"{shard:05}-of-00002"
        write_parquet(tmp_path / f"shards/train-{name}.parquet", texts, "body")
        write_records(tmp_path / f"c4/c4-train.array_record-{name}", [text.encode() for text in texts])
        examples = [example({"text": byte_strings(text.encode())}) for text in texts]
        write_records(tmp_path / f"tfds/tfds-train.array_record-{name}", examples)
    write_bpe(tmp_path, "<|endoftext|>")


def arguments(command: str) -> list[str]:
    return shlex.split(command)[1:]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_every_format_counts_its_documents(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(EXAMPLES[name]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == len(TEXTS)


@pytest.mark.slow
def test_the_example_of_tokens_prepares_verifies_and_trains() -> None:
    prepare, verify, train = map(arguments, TOKENS)
    prepared = maxbatch(*prepare)
    assert prepared.returncode == 0, prepared.stderr
    following = prepared.stdout.splitlines()[-1].removeprefix("next: ")
    assert sorted(arguments(following)) == sorted(train), "what is printed is what the README says"
    assert maxbatch(*verify).stdout.startswith(f"intact: {len(TEXTS)} documents")
    small = ("steps=2", "max_target_length=32", "per_device_batch_size=2", "base_num_decoder_layers=1")
    trained = maxbatch(*train, *small, "generate_prompt=")
    assert trained.returncode == 0, trained.stderr
    assert "done: step 2" in trained.stdout


def test_the_examples_are_those_of_the_readme() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for command in (*EXAMPLES.values(), *TOKENS):
        assert command in readme
    assert 'dataset_path="web.jsonl,0.7;code.jsonl,0.3"' in readme and "dataset_path=mix.yml" in readme


def test_the_example_of_a_mixture_file_mixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    lines = [line.strip() for line in readme.splitlines() if line.startswith(("    web: ", "    code:"))]
    (tmp_path / "mix.yml").write_text("\n".join(lines))
    write_jsonl(tmp_path / "web.jsonl", TEXTS, "text")
    write_parquet(tmp_path / "code.parquet", TEXTS, "content")
    assert main(["data", "dataset_type=jsonl", "dataset_path=mix.yml", "--stats", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert {name: figures["weight"] for name, figures in stats["sources"].items()} == {"web": 0.7, "code": 0.3}
