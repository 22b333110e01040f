"""`maxbatch report` names the first update, and its first array, in which the states of runs differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxbatch.cli import main
from tests.helpers.reports import write_run

pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'maxbatch[report]')")


def write_hashed(name: str, steps: int, differing: dict[int, str]) -> None:
    """Writes a run whose hashes of some arrays, by update, are others."""
    write_run(Path(name), steps)
    lines = [
        {
            "step": step,
            "hashes": {
                array: f"{step:016x}" if differing.get(step) != array else "f" * 16
                for array in ("params['a']", "opt_state['a']")
            },
        }
        for step in range(1, steps + 1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path(name, "hashes.jsonl").write_text(text)


def test_the_first_update_and_array_that_differ_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_hashed("a", 8, {})
    write_hashed("b", 6, {})
    write_hashed("c", 8, {5: "opt_state['a']", 6: "params['a']"})
    write_run(Path("unhashed"), 8)
    assert main(["report", "a", "b", "c", "unhashed"]) == 0
    shown, page = capsys.readouterr().err, Path("report.html").read_text()
    same = "b: the states after updates 1 to 6 are those of a, to the last bit"
    differs = "c: update 5 is the first whose state differs from a: opt_state['a']"
    assert same in shown and same in page
    assert differs in shown and "c: update 5 is the first whose state differs" in page
    assert "unhashed: update" not in shown
