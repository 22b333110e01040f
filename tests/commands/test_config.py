"""`maxbatch config`: every key, its rule and where its value comes from; no JAX."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maxbatch.cli import main
from maxbatch.config.sections import KEYS
from maxbatch.config.values import shown_path
from tests.helpers.configs import write


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["config", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def facts(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    return json.loads(printed(capsys, *arguments, "--json"))


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    write(tmp_path / "ground.yml", "log_period: 3\nadam_b2: 0.5\ngradient_accumulation_steps: 4\n")
    return write(
        tmp_path / "run.yml",
        "base_config: ground.yml\nadam_b2: 0.6\n\nglobal_batch_size: 64\nsteps: 5\n",
    )


def test_each_value_names_the_layer_that_it_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run_file: Path
) -> None:
    monkeypatch.setenv("MAXBATCH_ADAM_B1", "0.7")
    found = facts(capsys, run_file, "model_name=gpt2-124m", "num_epochs=1/3")
    said = {name: (found[name]["value"], found[name]["layer"]) for name in found}
    assert list(said) == list(KEYS)
    assert said["log_period"] == (3, "base_config")
    assert said["adam_b2"] == (0.6, "config file")
    assert said["adam_b1"] == (0.7, "environment")
    assert said["model_name"] == ("gpt2-124m", "override")
    assert said["base_emb_dim"] == (768, "preset")
    assert said["packing"] == (True, "base.yml")
    assert said["num_epochs"] == ("1/3", "override")
    assert found["adam_b2"]["where"] == f"{shown_path(run_file)}:2"


def test_a_value_that_an_alternative_displaced_says_by_which_and_where(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    found = facts(capsys, run_file, "num_epochs=2")
    for name, by, layer in (
        ("gradient_accumulation_steps", "global_batch_size", "config file"),
        ("steps", "num_epochs", "override"),
    ):
        assert (found[name]["value"], found[name]["displaced_by"], found[name]["layer"]) == (
            None,
            by,
            layer,
        )
    assert (
        found["global_batch_size"]["displaced_by"] is found["train_samples"]["displaced_by"] is None
    )
    assert "displaced by num_epochs" in printed(capsys, "steps", run_file, "num_epochs=2")
    assert facts(capsys, "per_device_batch_size", "batch_size=8")["displaced_by"] == "batch_size"


def test_one_key_prints_all_that_its_row_and_base_yml_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(printed(capsys, "num_epochs", "num_epochs=3").split())
    for said in (
        "num_epochs: 3",
        "passes over the training split",
        "from override",
        "default null",
        "such as 1/3",
        "rule > 0",
        "unit passes",
        "null allowed",
        "MaxText num_epoch ",
        "steps, train_samples",
    ):
        assert said in text
    assert "fixes    the stream, the compiled programs" in printed(capsys, "max_target_length")
    assert "no such key" in printed(capsys, "train_samples")


def test_a_pipe_gets_every_value_and_comment_whole(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "original_max_position_embeddings=123456", f"run_dir={'long/' * 50}x")
    assert (
        "\noriginal_max_position_embeddings: 123456 " in text
        and f"\nrun_dir: {'long/' * 50}x " in text
    )
    assert "…" not in text and "(docs/models.md)\n" in text


@pytest.mark.parametrize("columns", [80, 100])
def test_a_line_per_key_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(capsys).splitlines()
    assert max(map(len, lines)) <= columns
    assert [name for line in lines if (name := line.partition(":")[0]).isidentifier()] == list(KEYS)
    assert re.search(r"(?m)^steps: 200 +base.yml +updates, >= 1 \| null", "\n".join(lines))


def test_it_imports_no_jax() -> None:
    check = (
        "import sys; from maxbatch.cli import main; main(['config']); main(['config', 'steps', "
        "'--json'])\nheavy = {name.partition('.')[0] for name in sys.modules} & {'jax', 'flax', "
        "'optax', 'numpy', 'fsspec'}\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, timeout=60)
