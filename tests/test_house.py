"""The rules of the house that a formatter does not know: sizes, nesting, the mood of docstrings, mirrored tests."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "maxbatch").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
# A third-person verb: "Returns ...", "Reads ...".
VERB = re.compile(r"[A-Z][a-z]+s\b")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS))


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Returns how deep blocks stand in one another; an `elif` is no deeper than its `if`."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and [child] == node.orelse
        deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    bound = bool(named) and named[0].arg in ("self", "cls")
    return len(named) - bound + len(arguments.kwonlyargs)


def is_noun(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is read as an attribute: its docstring is a noun phrase."""
    decorators = [node for decorator in function.decorator_list for node in ast.walk(decorator)]
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in decorators}
    return bool(names & {"property", "cached_property"})


def test_few_modules_stand_outside_of_the_rooms() -> None:
    outside = [path.name for path in (ROOT / "maxbatch").glob("*.py") if not path.name.startswith("__")]
    assert len(outside) <= 6, outside


def test_no_file_holds_two_ideas() -> None:
    assert [path.name for path in MODULES if len(path.read_text().splitlines()) > 350] == []


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{f.lineno} {f.name}"
        for path in MODULES
        for f in functions(path)
        if (f.end_lineno or 0) - f.lineno + 1 > 60
    ]
    assert long == []


def test_functions_take_few_parameters_and_do_not_nest_deeply() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{f.lineno} {f.name}: {num_parameters(f)} parameters, nesting {nesting(f)}"
        for path in MODULES
        for f in functions(path)
        if num_parameters(f) > 6 or nesting(f) > 3
    ]
    assert offenders == []


def test_docstrings_have_one_mood() -> None:
    """Functions say what they do in the third person; modules, classes and properties say what they are."""
    offenders = []
    for path in MODULES:
        name = path.relative_to(ROOT)
        if (ast.get_docstring(ast.parse(path.read_text())) or "").startswith("What"):
            offenders.append(f"{name}: a module's docstring is a noun phrase")
        for function in functions(path):
            text = ast.get_docstring(function)
            if text and not is_noun(function) and not VERB.match(text):
                offenders.append(f"{name}:{function.lineno} {function.name}: {text.splitlines()[0]}")
    assert offenders == []


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
