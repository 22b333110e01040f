"""Files that would cost `maxbatch import` or a reader of ours much time or memory: refused, with
the bound's name.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from maxbatch.cli import main

LEVELS = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}' if i else '1'] * 9)}]\n" for i in range(9))
TRAIN = "python train.py --micro-batch-size 4"
MERGES = "".join(
    f"l{i}: &l{i} {{<<: [{', '.join([f'*l{i - 1}' if i else '{a: 1}'] * 9)}]}}\n" for i in range(9)
)
COSTLY = {
    "aliases.yml": (LEVELS, "expands by its aliases to more than 20,000 values"),
    "merges.yml": (MERGES, "expands by its aliases to more than 20,000 values"),
    "deep.json": ('{"a":' * 90_000, "nested more than 100 deep"),
    "deep.yml": ("- " * 90_000, "nested more than 100 deep"),
    "deep_flow.yml": ("[" * 90_000, "nested more than 100 deep"),
    "values.yml": (f"a: [{'1,' * 100_000}]", "holds more than 20,000 values"),
    "doubles.sh": (
        "A=xxxxxxxx\n" + "A=$A$A\n" * 60 + f"{TRAIN} --x $A\n",
        "a command has more than 65,536",
    ),
    "expands.sh": (
        "A=" + "x" * 60_000 + "\n" + "$A\n" * 100,
        "variables become more than 1,048,576 characters",
    ),
    "defaults.sh": ("${A:-" * 30_000, "a command has more than 65,536"),
    "arrays.sh": (
        "A=(x)\n" + "A+=(${A[@]} ${A[@]})\n" * 60 + TRAIN,
        "a command has more than 65,536",
    ),
    "lines.sh": ("a\n" * 30_000, "more than 20,000 commands"),
    "parts.sh": ("a;" * 30_000, "more than 20,000 commands"),
    "flags.sh": (
        TRAIN + "".join(f" --w{i} 1" for i in range(3_000)),
        "states more than 2,000 words",
    ),
    "quote.sh": (f"{TRAIN} '{'a' * 900_000}'", "a command has more than 65,536"),
    "quotes.sh": ("\"'" * 300_000, "a command has more than 65,536"),
    "brackets.sh": ("A=(" * 300_000, "a command has more than 65,536"),
    "script.sh": (f"{TRAIN}\n" * 600_000, "larger than 1 MB"),
    "newlines.txt": ("\n" * 60_000, "no words of"),
    "blanks.txt": (" \n" * 30_000 + "x", "must be lines of"),
    "scalar.yml": (f"per_device_batch_size: {'9' * 900_000}", "must be a number"),
    "utf16.yml": ("per_device_batch_size: 4\n".encode("utf-16"), "is not UTF-8 text"),
    "nul.yml": (b"per_device_batch_size: 4\0\n", "special characters are not allowed"),
    "two.yml": (
        "per_device_batch_size: 4\n---\nper_device_batch_size: 8\n",
        "expected a single document",
    ),
}


@pytest.mark.parametrize("file", COSTLY)
def test_a_costly_file_is_refused_soon_and_by_the_name_of_its_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    content, said = COSTLY[file]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    started = time.monotonic()
    assert (
        main(["import", "auto", str(tmp_path / file), "--output", str(tmp_path / "out.yml")]) == 2
    )
    assert time.monotonic() - started < 10
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and len(error) < 600


@pytest.mark.parametrize("command", [["plan", "{}"], ["sweep", "{}"], ["data", "dataset_path={}"]])
@pytest.mark.parametrize(
    "file", ["aliases.yml", "deep.yml", "values.yml", "utf16.yml", "nul.yml", "two.yml"]
)
def test_our_own_files_have_the_same_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], file: str
) -> None:
    content, said = COSTLY[file]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main([word.format(tmp_path / file) for word in command]) == 2
    assert said in capsys.readouterr().err


def test_a_mapping_of_positions_on_the_command_line_is_bounded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "dataset_type=jsonl", f"dataset_path={'{0: ' * 5_000}"]) == 2
    assert "nested more than 100 deep" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["base_config", "model_name"])
def test_a_name_longer_than_any_file_has_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    (tmp_path / "m.yml").write_text(f"{word}: {'a' * 5_000}\n")
    assert main(["import", "maxtext", str(tmp_path / "m.yml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
