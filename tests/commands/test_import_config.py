"""`maxbatch import` as a command: the table, the file it writes, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch.cli import main

MAXTEXT = (
    "base_config: base.yml\nper_device_batch_size: 2\ngradient_accumulation_steps: "
    "3\ndataset_type: synthetic\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["import", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_writes_a_config_that_plan_accepts_and_says_the_batch_in_both_languages(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "m.yml").write_text(f"{MAXTEXT}hardware: tpu\n")
    code, out, _ = run(capsys, "maxtext", "m.yml")
    assert code == 0
    lines = {line.split()[1]: line for line in out.splitlines() if len(line.split()) > 1}
    assert lines["per_device_batch_size"].split() == [
        "mapped",
        "per_device_batch_size",
        "2",
        "per_device_batch_size=2",
    ]
    assert lines["hardware"].startswith("ignored")
    assert (
        "MaxText: global_batch_to_train = per_device_batch_size 2 x devices x "
        "gradient_accumulation_steps 3" in out
    )
    assert "maxbatch: global_batch_size_to_train_on" in out
    assert main(["plan", "maxbatch.yml", "--devices", "4"]) == 0
    assert "24 samples per update" in capsys.readouterr().out


def test_what_is_not_supported_is_refused_unless_it_is_skipped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "m.yml").write_text(f"{MAXTEXT}quantization: int4\nnonsense: 3\n")
    code, out, error = run(capsys, "maxtext", "m.yml")
    assert code == 2 and not (folder / "maxbatch.yml").exists()
    assert error.count("\n") == 1 and "quantization=int4" in error and "nonsense=3" in error
    assert "not supported  nonsense" in out
    code, out, _ = run(capsys, "maxtext", "m.yml", "--skip-unsupported", "--output", "run.yml")
    assert code == 0 and (folder / "run.yml").exists() and "not supported  quantization" in out
