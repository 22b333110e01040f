"""The rules of the house that a formatter does not know: rooms, walls, mirrored tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "maxbatch").rglob("*.py"))


def test_few_modules_stand_outside_of_the_rooms() -> None:
    outside = [path.name for path in (ROOT / "maxbatch").glob("*.py") if not path.name.startswith("__")]
    assert len(outside) <= 6, outside


def test_contributing_shows_the_rooms_that_import_linter_enforces() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "rooms")
    enforced = [layer.removeprefix("maxbatch.") for layer in reversed(layers)]
    rows = re.findall(r"^\| `(\w+)/?` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert rows == enforced


def test_no_contract_of_imports_has_exceptions() -> None:
    assert "ignore_imports" not in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir()))
def test_tests_mirror_the_package(room: str) -> None:
    if room in ("helpers", "__pycache__"):
        return
    assert (ROOT / "maxbatch" / room).is_dir()


def test_no_room_but_system_asks_for_remote_path() -> None:
    inside = ROOT / "maxbatch" / "system"
    asking = [path for path in MODULES if inside not in path.parents and "RemotePath" in path.read_text()]
    assert not asking, f"{asking}: take an AnyPath, and ask maxbatch.system.storage for what is needed"
