"""Config files that cannot be read: one line each, and nothing that hangs; lists of paths."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.around.sweep.sweep_file import SweepFile
from maxbatch.config.yaml_file import compose
from maxbatch.data.stream.mixture import read_mixture
from tests.helpers.configs import error_of, write


def test_a_file_that_is_nested_a_thousand_deep_is_refused(tmp_path: Path) -> None:
    message = error_of(write(tmp_path / "run.yml", "[" * 5000))
    assert message.endswith("run.yml: is nested more than 100 deep, the most that is read")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none.yml").endswith("none.yml: does not exist")
    assert "is a folder" in error_of(tmp_path)
    (tmp_path / "image.yml").write_bytes(b"\xff\xfe\x00")
    assert "image.yml" in error_of(tmp_path / "image.yml")
    assert re.search(r"cannot be read \(.*embedded null", error_of(Path("a\0b")))


def test_a_list_of_paths_is_the_text_with_semicolons_and_weights_with_commas(
    tmp_path: Path,
) -> None:
    stated = write(tmp_path / "c.yml", "dataset_path: [a.jsonl, 'b/*.txt']\n")
    assert load_config(stated).dataset_path == "a.jsonl;b/*.txt"
    weighted = write(
        tmp_path / "d.yml", "dataset_path:\n- {path: a, weight: 0.70}\n- {path: b, weight: 3}\n"
    )
    assert load_config(weighted).dataset_path == "a,0.70;b,3"


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "fifo"])
def test_a_pipe_or_a_device_is_refused_and_not_read(tmp_path: Path, device: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    message = error_of(tmp_path / device)
    assert message.startswith("config file ") and "must be a regular file" in message
    assert "must be a regular file" in error_of(
        write(tmp_path / "run.yml", f"base_config: {device}\n")
    )
    # as sweep files and mixture files are read
    with pytest.raises(ConfigError, match="must be a regular file"):
        compose(tmp_path / device, "sweep file")


def test_a_file_of_more_than_a_megabyte_is_refused_and_not_parsed(tmp_path: Path) -> None:
    assert "larger than 1 MB" in error_of(write(tmp_path / "run.yml", "#" * (2**20 + 1)))
    assert load_config(write(tmp_path / "run.yml", "#" * 2**20)) == load_config()


@pytest.mark.parametrize("written", ['"a\\0b"', '"a\\ud800"'])
@pytest.mark.parametrize("key", ["run_dir", "dataset_path", "text_field", "steps", "base_config"])
def test_a_value_with_nul_or_half_of_a_surrogate_pair_is_one_line(
    tmp_path: Path, key: str, written: str
) -> None:
    message = error_of(write(tmp_path / "run.yml", f"{key}: {written}\n"))
    assert message.isprintable() and ("UTF-8 text" in message or key == "base_config")


def test_a_message_repeats_little_of_a_long_path_or_value(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 200)
    for text in (
        "- steps",
        "steps: 1\nsteps: 2",
        "a: [",
        "stepz: 1",
        "steps: x",
        "base_config: run.yml",
    ):
        assert len(error_of(write(folder / "run.yml", text))) < 250
    assert len(error_of(folder / ("f" * 200))) < 150
    for value in ("x" * 5000, "[" + "x, " * 2000 + "]", "!" + "x" * 5000, "9" * 5000):
        for key in (
            "steps",
            "run_dirs",
            "dtype",
            "learning_rate",
            "train_tokens",
            "batch_size_schedule",
            "x" * 999,
        ):
            text = f"enable_rampup_batch_size: true\n{key}: {value}\n"
            assert len(error_of(write(tmp_path / "run.yml", text))) < 400


def test_merge_keys_are_resolved_in_configs_mixtures_and_sweeps(tmp_path: Path) -> None:
    stated = write(
        tmp_path / "c.yml", "<<: [{steps: 3, log_period: 4}, {steps: 5}]\nlog_period: 6\n"
    )
    config = load_config(stated)
    assert (config.steps, config.log_period) == (3, 6)
    sources = "a: &a {path: a.jsonl, weight: 2}\nb: {<<: *a, path: b.jsonl}\n"
    mixture = write(tmp_path / "mixture.yml", sources)
    config = load_config(overrides=["dataset_type=jsonl", f"dataset_path={mixture}"])
    found = read_mixture(config.stream) or ()
    assert [(source.name, source.weight) for source in found] == [("a", 0.5), ("b", 0.5)]
    swept = (
        "base: {<<: {steps: 3}, log_period: 4}\nparameters: {<<: {learning_rate: [1e-3, 3e-3]}}\n"
    )
    sweep = SweepFile.read(str(write(tmp_path / "sweep.yml", swept)))
    assert [parameter.key.name for parameter in sweep.parameters] == ["learning_rate"]
    assert load_config(write(tmp_path / "base.yml", sweep.base)).steps == 3


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b""])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_byte_order_mark_and_other_line_ends_change_nothing(
    tmp_path: Path, mark: bytes, end: bytes
) -> None:
    (tmp_path / "c.yml").write_bytes(mark + end.join((b"steps: 3", b"run_dir: a", b"")))
    config = load_config(tmp_path / "c.yml")
    assert (config.steps, config.run_dir) == (3, "a")
