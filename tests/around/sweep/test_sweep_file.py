"""Sweep files, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch import ConfigError
from maxbatch.around.sweep.sweep_file import SweepFile

pytest.importorskip("optuna", reason="Optuna is not installed (pip install 'maxbatch[sweep]')")


def test_a_base_config_whose_name_no_file_system_holds_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sweep.yml").write_text(
        f"base:\n  base_config: {'9' * 4000}\nparameters:\n  learning_rate: [1e-3]\n"
    )
    sweep = SweepFile.read(str(tmp_path / "sweep.yml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        sweep.resolved({"learning_rate": "1e-3"})
