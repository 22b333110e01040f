"""The tables of docs/batch-size.md, row by row: the id of a row leads to its check."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "batch-size.md").read_text()


def rows_of(section: str) -> dict[str, list[str]]:
    """The cells of each row under a heading, by the row's id."""
    text = PAGE[PAGE.index(f"### {section}\n") :]
    end = re.search(r"\n##+ ", text[1:])
    rows = re.finditer(r"^\| `([a-z-]+)` \|(.+)$", text[: end.start() if end else None], re.M)
    return {row[1]: [cell.strip() for cell in row[2].strip(" |").split("|")] for row in rows}


class Checks(dict[str, Callable[[], None]]):
    """The checks of some sections' rows, by id; calling it with an id registers one."""

    def __init__(self, *sections: str) -> None:
        super().__init__()
        self.rows = {
            name: cells for section in sections for name, cells in rows_of(section).items()
        }

    def __call__(self, row: str) -> Callable[[Callable[[], None]], None]:
        def register(function: Callable[[], None]) -> None:
            assert row in self.rows and row not in self, row
            self[row] = function

        return register
