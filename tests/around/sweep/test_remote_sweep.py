"""A sweep with its folder in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch.around.sweep.folder import SweepFolder
from maxbatch.cli import main
from maxbatch.system.storage.storage import as_path
from tests.helpers.stores import Store, on
from tests.helpers.sweeps import write_sweep


@pytest.mark.slow
@on("gs")
def test_a_sweep_in_a_bucket_goes_on_from_another_machine(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep_dir = store.bucket() + "/sweep"
    first = {"learning_rate": ["1e-3"]}
    assert main(["sweep", write_sweep(first, {"steps": 2}, sweep_dir=sweep_dir)]) == 0
    there = as_path(sweep_dir)
    assert {path.name for path in there.iterdir()} == {
        "base.yml",
        "sweep.html",
        "sweep.json",
        "trials",
    }
    assert "done: step 2" in (there / "trials" / "0000" / "log.txt").read_text()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of another machine"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    both = {"learning_rate": ["1e-3", "3e-3"]}
    capsys.readouterr()
    assert main(["sweep", write_sweep(both, {"steps": 2}, sweep_dir=sweep_dir)]) == 0
    said = capsys.readouterr().out
    assert "trial 1 done" in said and "trial 0 done" not in said
    results = SweepFolder(there).results("loss")
    assert sorted(one.trial.number for one in results) == [0, 1] and {
        one.status for one in results
    } == {"done"}
    assert main(["report", sweep_dir]) == 0
