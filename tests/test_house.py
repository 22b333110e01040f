"""The rules of the house that a formatter does not know: rooms, walls, mirrored tests."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
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


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {re.split(r"[^\w.-]", one)[0].lower().replace("_", "-") for one in stated}
    packages = importlib.metadata.packages_distributions()
    missing = {
        module
        for module in {name.partition(".")[0] for path in MODULES for name in _imports(path)} & packages.keys()
        if not declared & {package.lower().replace("_", "-") for package in packages[module]}
    }
    assert missing <= {"maxbatch", *sys.stdlib_module_names}


def _imports(path: Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir()))
def test_tests_mirror_the_package(room: str) -> None:
    if room in ("helpers", "__pycache__"):
        return
    assert (ROOT / "maxbatch" / room).is_dir()
