"""The committed results, one JSON file per comparison, and the table of them in docs/import.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.same_run.cases import CASES, Case
from benchmarks.same_run.figures import Differences, Tolerances, Update
from benchmarks.same_run.run_pair import Pair

FOLDER = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "import.md"
BEGIN, END = (
    "<!-- table: python -m benchmarks.same_run --table -->\n",
    "<!-- end of the table -->\n",
)
TOLERANCES = Tolerances()


def write(
    name: str, pair: Pair, found: Differences, versions: Mapping[str, str], seed: int
) -> None:
    """Writes the result of a comparison."""
    result = {
        "date": date.today().isoformat(),
        "versions": dict(versions),
        "command": list(pair.command),
        "seed": seed,
        "differences": {each: getattr(found, each) for each in vars(TOLERANCES)},
        "left_out": found.left_out,
        "arrays": {array: _short(ratio) for array, ratio in found.arrays.items()},
        "updates": [
            {
                figure: [getattr(ours, figure, None), getattr(theirs, figure, None)]
                for figure in Update._fields
            }
            for ours, theirs in zip_longest(pair.ours, pair.theirs)
        ],
    }
    lines = (
        json.dumps(result, indent=1)
        .replace("[\n   ", "[")
        .replace(",\n    ", ", ")
        .replace("\n   ]", "]")
    )
    (FOLDER / f"{name}.json").write_text(lines + "\n")


def load(name: str) -> dict[str, Any]:
    """Returns the result of a comparison; raises FileNotFoundError if it was never made."""
    result: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return result


def table() -> str:
    """Returns the table of all results, in Markdown."""
    lines = [
        "| program | run | loss | gradient norm | rate | arrays | |",
        "|---|---|---|---|---|---|---|",
        *(
            _line(case, load(name))
            for name, case in CASES.items()
            if (FOLDER / f"{name}.json").exists()
        ),
    ]
    return "\n".join(lines) + "\n"


def write_table() -> None:
    """Writes the table into the page."""
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, END, table()))


def replaced(text: str, begin: str, end: str, table: str) -> str:
    """Returns a page with the table between two marks replaced."""
    return text[: text.index(begin) + len(begin)] + table + text[text.index(end) :]


def _line(case: Case, result: Mapping[str, Any]) -> str:
    package = "transformers" if case.trainer == "Trainer" else case.program
    figures = " | ".join(f"{result['differences'][each]:.0e}" for each in vars(TOLERANCES))
    left_out = f", {result['left_out']:,} entries left out" if result["left_out"] else ""
    verdict = case.differs or "the same"
    return (
        f"| {package} {result['versions'][package]} | {case.title} | {figures}{left_out} | "
        f"{verdict} |"
    )


def _short(figure: float) -> float:
    return float(f"{figure:.3g}")
