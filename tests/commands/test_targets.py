"""The devices that `compile` and `fit` compile for."""

from __future__ import annotations

import pytest

from maxbatch.cli import main
from tests.helpers.tiny import TINY_RUN


@pytest.mark.parametrize("command", ["compile", "fit"])
@pytest.mark.parametrize(("topology", "most"), [("v5e:2x2", 16384), ("v5p:16x16x16", 16)])
def test_slices_beyond_any_machine_are_one_line_that_names_what_works(
    command: str, topology: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--topology", topology, "--slices", "1000000000")
    assert main([command, *TINY_RUN, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("maxbatch: error: --slices 1000000000: slices of ")
    assert line.endswith(f"works: --slices {most}")
