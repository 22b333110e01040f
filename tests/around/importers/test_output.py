"""What `maxbatch import` writes and prints: whole files that plan reads, tables that no file can
forge.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.config.loading import load_config

MAXTEXT = "per_device_batch_size: 2\ndataset_type: synthetic\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_or_failing_disk_leaves_nothing_and_is_no_fault_of_the_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    (folder / "m.yml").write_text(MAXTEXT)
    with monkeypatch.context() as context:
        context.setattr("maxbatch.system.storage.atomic_files.os.fsync", fail)
        assert main(["import", "maxtext", "m.yml"]) == 1
    assert "disk" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["m.yml"]
    assert main(["import", "maxtext", "m.yml"]) == 0  # the next try


@pytest.mark.runs
def test_plan_reads_whatever_import_writes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pick = random.Random(1)
    characters = [
        "\0",
        "\x07",
        "\x1b",
        "\n",
        "\r",
        "\t",
        " ",
        '"',
        "\\",
        "'",
        "#",
        ":",
        "\x85",
        "\u2028",
        "\ufeff",
        "\ud800",
        "\U0010ffff",
        "~",
        "null",
        "é",
        "{",
        "%",
        "a",
    ]
    for number in range(150):
        name = "".join(pick.choices(characters, k=pick.randint(1, 5)))
        escaped = "".join(f"\\U{ord(c):08x}" for c in name)
        (folder / "m.yml").write_text(f'{MAXTEXT}run_name: "{escaped}"\n')
        output = f"{number}.yml"
        if main(["import", "maxtext", "m.yml", "--output", output, "--skip-unsupported"]) == 0:
            assert main(["plan", output]) == 0, (name, (folder / output).read_text())
            is_left_out = name.strip() in ("", "~", "null") or set(name) & {"\0", "\ud800"}
            assert is_left_out or load_config(output).run_dir == f"runs/{name.strip()}"
        else:
            assert not (folder / output).exists()
    assert "Traceback" not in capsys.readouterr().err


def test_the_name_of_a_file_is_no_part_of_the_config(folder: Path) -> None:
    (folder / "m\nsteps: 3 #.yml").write_text(MAXTEXT)
    assert main(["import", "maxtext", "m\nsteps: 3 #.yml"]) == 0
    assert load_config("maxbatch.yml").steps == 150_001


FORGED = "\\nmapped  steps  9\\e[2J\\r\\u202e"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("maxtext", f'{MAXTEXT}"{FORGED}": 3\n'),
        ("maxtext", f'{MAXTEXT}x: "{FORGED}"\n'),
        ("maxtext", f'{MAXTEXT}run_name: "{FORGED}"\n'),
        ("maxtext", f'{MAXTEXT}model_name: "{FORGED}"\n'),
        ("maxtext", f'{MAXTEXT}lr_schedule_type: ["{FORGED}"]\n'),
        ("axolotl", f'micro_batch_size: 2\ndatasets: [{{path: a, type: "{FORGED}"}}]\n'),
        ("megatron", f'micro_batch_size: "{FORGED}"\nglobal_batch_size: 4\n'),
        ("megatron", f'micro_batch_size: 4\nrampup_batch_size: "{FORGED}"\n'),
        ("deepspeed", f'{{"train_batch_size": 4, "x": {{"{FORGED}": ["{FORGED}"]}}}}'),
    ],
)
def test_no_file_forges_a_row_of_the_table(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (folder / "c.yml").write_text(text)
    main(["import", name, "c.yml", "--skip-unsupported"])
    captured = capsys.readouterr()
    for shown in (captured.out, captured.err):
        assert shown.replace("\n", "").isprintable()
        assert not any(line.startswith("mapped  steps  9") for line in shown.splitlines())


def test_other_commands_print_no_control_characters_of_a_config(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("run_dir", "dataset_path", "tokenizer_path", "load_parameters_path", "text_field"):
        (folder / "c.yml").write_text(f'dataset_type: jsonl\n{key}: "a{FORGED}"\n')
        for command in (
            ["plan", "c.yml"],
            ["config", "c.yml"],
            ["config", key, "c.yml"],
            ["data", "c.yml"],
        ):
            main(command)
            captured = capsys.readouterr()
            for shown in (captured.out, captured.err):
                assert shown.replace("\n", "").isprintable(), (key, command, shown)
