"""Reports of runs and sweeps in a bucket that others may write to."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.run.folder.json_file import write_json
from maxbatch.system.storage.storage import AnyPath, as_path, copy_tree
from tests.helpers.reports import make_sweep, write_run
from tests.helpers.stores import SCHEMES, Store

pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'maxbatch[report]')")

CONTENTS = (
    b"\xff\xfe",
    b"[" * 100_000,
    b"9" * 400,
    b"[[]]",
    b"{}\n{}\n",
    b'{"step": 1, "loss": "<script>"}\n{"step": 1}\n',
    b"x" * (3 << 20),
)
FILES = ("config.yml", "metrics.jsonl", "devices.json", "critical-batch/critical_batch.json")


def test_a_damaged_run_or_sweep_in_a_bucket_is_one_line_or_a_page(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(Path("run"), 3)
    sweep = make_sweep().path
    bucket = store.bucket()
    for folder in (Path("run"), sweep):
        copy_tree(folder, as_path(f"{bucket}/{folder.name}"))
    places = [(bucket + "/run", as_path(f"{bucket}/run") / name) for name in FILES]
    trial = as_path(f"{bucket}/{sweep.name}/trials/0000")
    places += [
        (f"{bucket}/{sweep.name}", trial / name)
        for name in ("trial.json", "outcome.json", "metrics.jsonl")
    ]
    places.append((f"{bucket}/{sweep.name}", as_path(f"{bucket}/{sweep.name}/sweep.json")))
    assert _report(f"{bucket}/run", capsys) == _report(f"{bucket}/{sweep.name}", capsys) == 0
    # Each damage of each file in one of the stores, whose answers are the same.
    for (url, place), content in list(itertools.product(places, CONTENTS))[
        SCHEMES.index(store.scheme) :: 2
    ]:
        before = place.read_bytes() if place.exists() else None
        place.write_bytes(content)
        assert _report(url, capsys) in (0, 2), (place, content[:40])
        place.unlink() if before is None else place.write_bytes(before)


def test_odd_names_and_numbers_of_trials_in_a_bucket_are_one_line_or_a_page(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep().path
    bucket = store.bucket()
    url = f"{bucket}/{sweep.name}"
    copy_tree(sweep, as_path(url))
    added: list[AnyPath] = []
    for number, name in (
        (10**200, "x"),
        (-1, "0007"),
        (0, "0009"),
        (2, "a\x1b[31m"),
        (3, "<script>"),
        (4, "..5"),
    ):
        added.append(as_path(url) / "trials" / name / "trial.json")
        write_json(
            added[-1], {"number": number, "overrides": {"</script>": "\n\x1b[1m"}, "config": None}
        )
        assert _report(url, capsys) in (0, 2), name
    for path in added:
        path.unlink()
    for name in (
        "metrics.jsonl/x",
        "config.yml/x",
        "trials/0000/metrics.jsonl/y",
        "devices.json/z",
    ):
        (as_path(url) / name).write_bytes(b"{}")
    assert _report(url, capsys) in (0, 2)


def _report(url: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Returns the exit code of a report; checks that a refusal is one line without control
    characters.
    """
    capsys.readouterr()
    code = main(["report", url, "--output", "page.html"])
    error = capsys.readouterr().err
    assert code in (0, 2) and error.count("\n") == (code == 2), error
    assert "Traceback" not in error and "\x1b" not in error
    return code
