"""What `maxbatch import` reads as stated: merge keys, words stated twice, several commands,
anchors.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch.around.importers.reading import read_yaml
from maxbatch.cli import main
from maxbatch.config.loading import load_config


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(folder: Path, name: str, file: str, text: str, *flags: str) -> int:
    (folder / file).write_text(text)
    return main(["import", name, file, "--skip-unsupported", *flags])


@pytest.mark.parametrize(
    "text",
    [
        "base: &b {per_device_batch_size: 4, steps: 7}\n<<: *b\n",
        "base: &b {per_device_batch_size: 4, steps: 8}\n<<: *b\nsteps: 7\n",
        "a: &a {per_device_batch_size: 4}\nb: &b {per_device_batch_size: 5, steps: 7}\n<<: [*a, "
        "*b]\n",
        "a: &a {steps: 7}\nb: &b {<<: *a, per_device_batch_size: 4}\n<<: *b\n",
    ],
)
def test_merge_keys_state_the_batch(folder: Path, text: str) -> None:
    assert imported(folder, "maxtext", "m.yml", f"{text}dataset_type: synthetic\n") == 0
    config = load_config("maxbatch.yml")
    assert (config.per_device_batch_size, config.steps) == (4, 7)


TWICE = [
    (
        "maxtext",
        "m.yml",
        "per_device_batch_size: {}\nper_device_batch_size: {}\ndataset_type: synthetic\n",
    ),
    ("deepspeed", "d.json", '{{"train_batch_size": {}, "train_batch_size": {}}}'),
    ("megatron", "n.yml", "model.micro_batch_size: {}\nmodel: {{micro_batch_size: {}}}\n"),
    ("megatron", "m.yml", "micro-batch-size: {}\nmicro_batch_size: {}\n"),
    ("megatron", "m.sh", "python pretrain_gpt.py --micro-batch-size {} --micro-batch-size {}\n"),
    ("megatron", "m.sh", "python pretrain_gpt.py --micro-batch-size {} --micro-batch-size={}\n"),
    (
        "maxtext",
        "m.sh",
        "python train.py per_device_batch_size={} per_device_batch_size={} "
        "dataset_type=synthetic\n",
    ),
    (
        "maxtext",
        "lines.txt",
        "per_device_batch_size={}\nper_device_batch_size={}\ndataset_type=synthetic\n",
    ),
    ("hf", "h.yml", "per_device_train_batch_size: {}\nper_gpu_train_batch_size: {}\n"),
    ("megatron", "n.yml", "model: {{micro_batch_size: {}}}\ndata: {{micro_batch_size: {}}}\n"),
    ("axolotl", "x.yml", "datasets: [{{path: a, type: completion, split: '{}', split: '{}'}}]\n"),
]


@pytest.mark.parametrize(("name", "file", "text"), TWICE)
def test_a_word_stated_twice_with_two_values_is_refused_and_both_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, file: str, text: str
) -> None:
    assert (
        imported(folder, name, file, text.format(4, 8)) == 2
        and not (folder / "maxbatch.yml").exists()
    )
    error = capsys.readouterr().err
    assert "4" in error and "8" in error and error.count("\n") == 1
    # the same value twice is one statement
    assert imported(folder, name, file, text.format(4, 4)) == 0


def test_a_batch_below_an_unknown_word_is_not_skipped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "per_device_batch_size: 2\ndataset_type: synthetic\nours: {per_device_batch_size: 4}\n"
    assert imported(folder, "maxtext", "m.yml", text) == 2
    assert "ours.per_device_batch_size=4" in capsys.readouterr().err


COMMANDS = [
    "python train.py a.yml per_device_batch_size=4 {0}; python train.py a.yml "
    "per_device_batch_size=8 {0}",
    "python train.py a.yml per_device_batch_size=4 {0} && python train.py a.yml "
    "per_device_batch_size=8 {0}",
    "python train.py a.yml per_device_batch_size=4 {0} &\npython train.py a.yml "
    "per_device_batch_size=8 {0}",
    "python train.py a.yml per_device_batch_size=4 {0}\npython train.py a.yml "
    "per_device_batch_size=8 {0}",
    "python train.py a.yml per_device_batch_size=4 {0};python train.py a.yml "
    "per_device_batch_size=8 {0}",
    'bash -c "python train.py per_device_batch_size=4 {0}; python train.py '
    'per_device_batch_size=8 {0}"',
    'x create --command "python train.py per_device_batch_size=4 {0}; python train.py '
    'per_device_batch_size=8 {0}"',
    "CMD='python train.py per_device_batch_size=4 {0}; python train.py per_device_batch_size=8 "
    "{0}'\neval $CMD",
]


@pytest.mark.parametrize("script", COMMANDS)
def test_of_several_commands_each_is_named_and_one_must_be_chosen(
    folder: Path, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    text = script.format("dataset_type=synthetic")
    assert imported(folder, "maxtext", "run.sh", text) == 2
    error = capsys.readouterr().err
    assert (
        "per_device_batch_size=4" in error
        and "per_device_batch_size=8" in error
        and "works: --command 1" in error
    )
    for number, rows in (("1", 4), ("2", 8)):
        assert (
            imported(
                folder, "maxtext", "run.sh", text, "--command", number, "--output", f"{number}.yml"
            )
            == 0
        )
        assert load_config(f"{number}.yml").per_device_batch_size == rows
    assert imported(folder, "maxtext", "run.sh", text, "--command", "3") == 2
    assert "--command 3: run.sh has 2; works: --command 2" in capsys.readouterr().err


def test_a_command_is_chosen_of_shell_files_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(folder, "maxtext", "m.yml", "per_device_batch_size: 4\n", "--command", "1") == 2
    assert "--command 1: is for shell files" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --micro-batch-size 4 > log --global-batch-size 8",
        "python train.py --micro-batch-size 4 2>&1 --global-batch-size 8 | tee 'a;b'",
        "python train.py --micro-batch-size 4 --reward r.py --global-batch-size 8; echo 'done; "
        "--seed 5'",
        "DATA='a;b'; python train.py --micro-batch-size 4 --global-batch-size 8 --data-path $DATA",
        "python train.py --micro-batch-size $((2 * 2)) --global-batch-size 8",
        "python -m torch.distributed.run --nproc-per-node 8 train.py --micro-batch-size 4 "
        "--global-batch-size 8",
        "--micro-batch-size 4 --global-batch-size 8 --tokenizer-model python/x.py",
    ],
)
def test_every_setting_of_a_command_is_read(folder: Path, line: str) -> None:
    from maxbatch.around.importers.shell import read_command, settings_of

    (folder / "run.sh").write_text(line)
    words = settings_of(read_command(folder / "run.sh").arguments, "run.sh")
    assert (words["micro_batch_size"], words["global_batch_size"]) == ("4", "8")
    assert (
        words.get("data_path", "a;b") == "a;b"
        and "nproc_per_node" not in words
        and "seed" not in words
    )


def test_a_byte_order_mark_and_crlf_change_nothing(folder: Path) -> None:
    (folder / "m.yml").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert read_yaml(folder / "m.yml") == {"a": "1", "b": "2"}
    assert (
        imported(
            folder,
            "megatron",
            "m.sh",
            "python train.py \\\r\n --micro-batch-size 4 \\\r\n --seq-length 8\r\n",
        )
        == 0
    )
    assert load_config("maxbatch.yml").max_target_length == 8
