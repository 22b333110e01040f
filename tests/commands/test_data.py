from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxbatch.commands.data import add_arguments, run
from maxbatch.config.config import Config
from maxbatch.config.loading import dump_config
from maxbatch.data.stream.fingerprint import fingerprint
from maxbatch.data.stream.stream import open_stream
from tests.helpers.corpus import LENGTH, jsonl_config, some_texts

TEXTS = ["first one", "\x1b[2Jżółw", "x" * 40]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return jsonl_config(tmp_path / "a.jsonl", TEXTS, "enable_data_shuffling=false")


def printed(capsys: pytest.CaptureFixture[str], config: Config, *flags: str) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    Path("stated.yml").write_text(dump_config(config))
    assert run(parser.parse_intermixed_args(["stated.yml", *flags])) == 0
    return capsys.readouterr().out


def test_samples_are_shown_with_their_special_tokens_and_segments(config, capsys) -> None:
    lines = printed(capsys, config, "--first", "0", "--count", "1").splitlines()
    assert lines == [
        "== sample 0  epoch 0  row 0  tokens 16/16  segments 2  loss_weight 14",
        "-- segment 1  tokens 11",
        "<bos>first one<eos>",
        "-- segment 2  tokens 5",
        "<bos>\\x1b[2J",
    ]


def test_own_numbers_are_shown_and_a_sample_of_a_hole_is_marked(tmp_path: Path, capsys) -> None:
    whole = jsonl_config(tmp_path / "a.jsonl", some_texts(60))
    left = whole.replaced({"skip_samples": "3:5 8:9"})
    flags = ("--first", "2", "--count", "5")
    marked = printed(capsys, left, *flags)
    heads = [line for line in marked.splitlines() if line.startswith("==")]
    assert [line.split()[2] for line in heads] == ["2", "3", "4", "5", "6"]
    assert [line.endswith("  left out by skip_samples") for line in heads] == [0, 1, 1, 0, 0]
    assert marked.replace("  left out by skip_samples", "") == printed(capsys, whole, *flags)
    lines = printed(capsys, left, *flags, "--json").splitlines()
    assert [json.loads(line).get("left_out", False) for line in lines] == [0, 1, 1, 0, 0]


def test_a_sample_of_a_hole_is_in_no_fingerprint(tmp_path: Path, capsys) -> None:
    whole = jsonl_config(tmp_path / "a.jsonl", some_texts(60))
    left = whole.replaced({"skip_samples": "3:5 8:9 300:1000"})
    flags = ("--fingerprint", "--first", "2", "--count", "400")
    own = [n for n in range(2, 300) if n not in (3, 4, 8)]
    assert printed(capsys, left, *flags).strip() == fingerprint([open_stream(whole).batch(own)])
    nothing = printed(capsys, left, "--fingerprint", "--first", "3", "--count", "2").strip()
    assert nothing == fingerprint([])


def test_padding_is_shown(config, capsys) -> None:
    last = printed(capsys, config, "--first", "4", "--count", "1").splitlines()
    assert last[0].startswith("== sample 4  epoch 0  row 4  tokens ")
    assert last[-1].startswith("-- padding ")


def test_three_samples_are_shown_unless_asked_otherwise(config, capsys) -> None:
    heads = [
        line.split()[2] for line in printed(capsys, config).splitlines() if line.startswith("==")
    ]
    assert heads == ["0", "1", "2"]


def test_a_far_sample_names_its_epoch(config, capsys) -> None:
    stream = open_stream(config)
    first = 10**12 * stream.samples_per_epoch + 2
    out = printed(capsys, config, "--first", str(first), "--count", "1")
    assert f"== sample {first}  epoch {10**12}  row 2 " in out


def test_long_lines_are_not_wrapped(tmp_path: Path, capsys) -> None:
    config = jsonl_config(tmp_path / "b.jsonl", ["word " * 200], "max_target_length=1000")
    assert "word " * 190 in printed(capsys, config, "--count", "1")


def test_the_fingerprint_is_that_of_the_samples(tmp_path: Path, capsys) -> None:
    config = jsonl_config(tmp_path / "a.jsonl", some_texts(60))
    stream = open_stream(config)
    out = printed(capsys, config, "--fingerprint", "--first", "5", "--count", "700")
    assert out.strip() == fingerprint([stream.read(5, 705)])
    assert printed(capsys, config, "--fingerprint", "--first", "6", "--count", "700") != out
    as_json = printed(capsys, config, "--fingerprint", "--first", "5", "--count", "700", "--json")
    assert json.loads(as_json) == {"first": 5, "count": 700, "fingerprint": out.strip()}


def test_stats_have_the_agreed_names(config, capsys) -> None:
    stats = json.loads(printed(capsys, config, "--stats", "--json"))
    assert list(stats) == [
        "samples",
        "slots",
        "tokens",
        "packing_efficiency",
        "documents",
        "skipped_records",
    ]
    assert stats["slots"] == stats["samples"] * LENGTH and stats["documents"] == 3
    assert f"{stats['tokens']}" in printed(capsys, config, "--stats")


def test_samples_as_json_are_one_object_a_line(config, capsys) -> None:
    records = [
        json.loads(line) for line in printed(capsys, config, "--json", "--count", "2").splitlines()
    ]
    assert [record["sample"] for record in records] == [0, 1]
    assert records[0]["text"] == "first one\x1b[2J"
    assert all(len(records[0][name]) == LENGTH for name in ("tokens", "segments", "weights"))


def mixture(tmp_path: Path) -> Config:
    jsonl_config(tmp_path / "a.jsonl", TEXTS)
    jsonl_config(tmp_path / "b.jsonl", ["other"])
    (tmp_path / "mix.yml").write_text(
        "'[red]web': {path: a.jsonl, weight: 3}\nrest: {path: b.jsonl, weight: 1}\n"
    )
    return jsonl_config(tmp_path / "mix.yml")


def test_samples_of_a_mixture_name_their_source(tmp_path: Path, capsys) -> None:
    config = mixture(tmp_path)
    stream = open_stream(config)
    heads = [
        line
        for line in printed(capsys, config, "--count", "8").splitlines()
        if line.startswith("==")
    ]
    for index, head in enumerate(heads):
        place = stream.row(index)
        assert head.startswith(f"== sample {index}  epoch {place.epoch}  row {place.row} ")
        assert head.endswith(f"  source {place.source}")
    records = [
        json.loads(line) for line in printed(capsys, config, "--json", "--count", "8").splitlines()
    ]
    assert [record["source"] for record in records] == [
        stream.row(index).source for index in range(8)
    ]
    assert {"[red]web", "rest"} == {record["source"] for record in records}


def test_stats_of_a_mixture_are_those_of_each_source_and_of_all(tmp_path: Path, capsys) -> None:
    config = mixture(tmp_path)
    stats = json.loads(printed(capsys, config, "--stats", "--json"))
    assert stats["documents"] == 4 and stats["sources"]["rest"]["documents"] == 1
    assert stats["sources"]["[red]web"]["weight"] == 0.75
    lines = printed(capsys, config, "--stats").splitlines()
    assert any(line.split() == ["each", "source", "once"] for line in lines)
    assert any(line.split() == ["documents", "4"] for line in lines)
    of_source = dict(line.split(":  ") for line in lines if ":  " in line)
    assert list(of_source) == ["[red]web", "rest"]
    assert (
        "  documents 3  " in of_source["[red]web"] and "  weight 0.750000" in of_source["[red]web"]
    )


def test_stats_tell_how_well_documents_were_packed(tmp_path: Path, capsys) -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(500), 1.25, 2000).astype(int) + 1
    overrides = ["max_target_length=2048", "packing_strategy=best_fit"]
    config = jsonl_config(tmp_path / "c.jsonl", ["x" * length for length in lengths], *overrides)
    assert json.loads(printed(capsys, config, "--stats", "--json"))["packing_efficiency"] >= 0.97


def shell(config: Config, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`maxbatch data` on the config's file in bash, with `pipefail`."""
    line = (
        f"{sys.executable} -m maxbatch data dataset_type=jsonl dataset_path={config.dataset_path} "
        f"{command}"
    )
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )


def test_a_reader_who_leaves_early_is_no_failure(config) -> None:
    piped = shell(config, "max_target_length=4 --count 5000 | head -1")
    assert (piped.returncode, piped.stderr) == (0, "")


def test_what_the_terminal_cannot_encode_is_escaped(config) -> None:
    shown = shell(config, "--count 1", PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\\x1b[2J\\u017c\\xf3\\u0142w" in shown.stdout
