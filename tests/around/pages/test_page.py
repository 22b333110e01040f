"""Pages: written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch.around.pages.page import Page
from maxbatch.system.errors import TrainingError


def test_a_page_that_cannot_be_written_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("page.html").write_text("old")

    def fail(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(TrainingError, match=r"page\.html: no space left on the disk"):
        Page("new").write(Path("page.html"))
    assert Path("page.html").read_text() == "old" and list(Path().iterdir()) == [Path("page.html")]
