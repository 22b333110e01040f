"""Facts of a family and of a parameter are stated once: in the family's record, and in the table of
parameters.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxbatch.config.sections import REMAT_TENSORS
from maxbatch.families.family import FAMILIES, FORMS
from maxbatch.families.matrices import TABLES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "maxbatch"
# The records of families, and of those that have forms of their own; names that several share.
RECORDS = {
    *(f"families/{name}.py" for name in ("family", "deepseek", "gemma4", "llama4", "qwen3_next")),
    "families/record.py",
}
# The words of other trainers, MaxText's blocks among them.
ELSEWHERE = {PACKAGE / "around" / "importers", PACKAGE / "around" / "maxtext"}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Yields the file and every node of the package's code."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if not ELSEWHERE.intersection(path.parents):
            yield from (
                (str(path.relative_to(PACKAGE)), node)
                for node in ast.walk(ast.parse(path.read_text()))
            )


def files_with(words: set[str]) -> set[str]:
    """Returns the files with one of these texts, a tensor's name by its module's."""
    texts = {(file, node.value) for file, node in nodes() if isinstance(node, ast.Constant)}
    return {
        file
        for file, text in texts
        if isinstance(text, str) and text.removesuffix(".weight") in words
    }


@pytest.mark.runs
def test_a_familys_names_stand_in_its_record_alone() -> None:
    families = FAMILIES.values()
    names = {
        name
        for one in families
        for name in (one.decoder_block, one.model_type, one.architecture)
        if name
    }
    assert files_with(names) < RECORDS
    modules = {name for one in FAMILIES.values() for name in one.modules.values()}
    assert files_with(modules) == RECORDS


@pytest.mark.runs
def test_a_parameters_axes_and_its_name_for_rematerialisation_stand_where_its_row_stands() -> None:
    kept = {row.kept for table in TABLES.values() for row in table if row.kept}
    rows = [inspect.getfile(form.rows) for form in FORMS if hasattr(form, "rows")]
    stating = {str(Path(file).relative_to(PACKAGE)) for file in rows}
    assert files_with(kept) <= stating and kept < REMAT_TENSORS.keys()
    naming = {
        file
        for file, node in nodes()
        if isinstance(node, ast.Call)
        and any(keyword.arg == "logical_axes" for keyword in node.keywords)
    }
    # Parameters are made from the table, stacked by layer, and adapted along the axes that they
    # have.
    assert naming == {"model/parameters.py", "model/decoder.py", "update/adapters.py"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_of_models_lists_every_family_with_its_presets(family: str) -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (?:`(\w+)`|none) \|.*\| (.*?) ?\|$",
        (ROOT / "docs" / "models.md").read_text(),
        re.M,
    )
    model_types = {block: (model_type, presets) for block, model_type, presets in rows}
    model_type, presets = model_types[family]
    assert model_type == FAMILIES[family].model_type
    for preset in re.findall(r"`([\w.-]+)`", presets):
        assert (ROOT / "configs" / "models" / f"{preset}.yml").is_file(), preset
