"""A form is one object: what is of one form alone is named in few files, and a form can be deleted."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.form import Form
from maxbatch.families.record import Family

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "maxbatch"
FAMILY_TABLE = "families/family.py"
HUGGING_FACE = "around/huggingface/folder/form_rows.py"
MAXTEXT = "around/maxtext/checkpoints/names.py"
# Key rows, and what imports other programs' words.
APART = ("config/sections.py", "around/importers/", "around/words/")


class Named(NamedTuple):
    """What is of one form alone."""

    identifiers: str  # a pattern
    own: tuple[str, ...]  # the file of its facts and its family, and those that compute it


FORMS = {
    "latents": Named(
        r"latent|kv_lora",
        ("families/deepseek.py", "model/latent_attention.py"),
    ),
    "delta rule": Named(
        r"DeltaRule|DELTA_RULE|delta_rule|DeltaNet|delta_net|delta rule|gdn_",
        ("families/qwen3_next.py", "model/delta_rule.py"),
    ),
    "chunks": Named(
        r"chunk_attn|attention_chunk|chunked_attention|Chunked|chunks_of_segments",
        ("families/llama4.py", "model/chunks.py"),
    ),
    "layer inputs": Named(
        r"(?<!decoder_)layer_input|LayerInputs|LAYER_INPUTS",
        ("families/gemma4.py", "model/layer_inputs.py"),
    ),
    "shared keys": Named(
        r"kv_shared|shared_keys|SharedKeys|SHARED_KEYS",
        ("families/gemma4.py", "families/parameter.py"),  # the latter names their stack
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_named_in_its_own_two_files_and_in_the_table_that_has_its_rows(form: str) -> None:
    named = FORMS[form]
    naming = {
        file
        for path in PACKAGE.rglob("*.py")
        if not (file := path.relative_to(PACKAGE).as_posix()).startswith(APART)
        and re.search(named.identifiers, path.read_text())
    }
    assert naming == {*named.own, HUGGING_FACE} and len(naming) == 3


# Forms that a copy of the package lacks: the names of their rows in the tables, among them that of
# families, and those of the families.
DELETED = {
    "latents": (
        {"LATENTS", "_LATENTS", "read_latents", "write_latents", "_read_chosen_groups"}
        | {"DEEPSEEK", "_DEEPSEEK_LAYER"},
        {"deepseek"},
    ),
    "delta rule": (
        {"DELTA_RULE", "_DELTA_RULE", "read_delta_rule", "write_delta_rule", "QWEN3_NEXT"}
        | {"_types_of_delta_rule", "_read_value_dim", "QWEN3_5"},
        {"qwen3_next", "qwen3_5"},
    ),
}


class Without(ast.NodeTransformer):
    """Deletes imports, definitions and elements of tables by their names."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        node.names = [one for one in node.names if one.name not in self.names]
        return node if node.names else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return None if node.name in self.names else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
        return None if targets & self.names else self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
        node.elts = [
            one for one in node.elts if not (isinstance(one, ast.Name) and one.id in self.names)
        ]
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        pairs = [
            (key, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if not (isinstance(key, ast.Constant) and key.value in self.names)
        ]
        node.keys, node.values = [key for key, _ in pairs], [value for _, value in pairs]
        self.generic_visit(node)
        return node


@pytest.mark.runs
@pytest.mark.parametrize("form", DELETED)
def test_a_package_without_a_form_has_the_other_families(form: str, tmp_path: Path) -> None:
    named, (names, families) = FORMS[form], DELETED[form]
    for folder in ("maxbatch", "configs", "tests", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "images")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in ("pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / file, tmp_path)
    package = tmp_path / "maxbatch"
    for file in named.own:
        (package / file).unlink()
    for file in (FAMILY_TABLE, HUGGING_FACE, MAXTEXT):
        tree = Without(names | families).visit(ast.parse((package / file).read_text()))
        (package / file).write_text(ast.unparse(tree))

    asked = "from maxbatch.families.family import FAMILIES; print(*FAMILIES)"
    listed = _python(tmp_path, "-c", asked).split()
    assert set(listed) == FAMILIES.keys() - families
    tests = ("tests/model/test_parameters.py", "tests/parallel/test_sharding.py")
    passed = _python(
        tmp_path, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-k",
        "(of_the_table and plain) or every_matrix", *tests,
    )  # fmt: skip
    assert f"{2 * len(listed)} passed" in passed


def _python(folder: Path, *arguments: str) -> str:
    variables = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The fields of a family's record that are no forms: its names, and the names, defaults and order of
# what its Hugging Face files have.
NAMES = {"decoder_block", "model_type", "architecture"}
OF_CONFIG_JSON = {
    *("defaults", "fixed", "told_by", "fields", "activations", "bias_fields"),
    *("has_head_dim", "has_max_window_layers"),
}
OF_TENSORS = {
    *("modules", "tensors", "layer", "prefix", "by_head"),
    *("inputs_first", "experts_alternate", "expert_outputs_first"),
}
HUGGING_FACE_ROOM = "around/huggingface"


def is_form(field: str) -> bool:
    """Returns whether a field holds forms in every family."""
    values = [getattr(family, field) for family in FAMILIES.values()]
    forms = [value if isinstance(value, tuple) else (value,) for value in values]
    of_some = [form for of_family in forms for form in of_family if form is not None]
    return bool(of_some) and all(isinstance(form, Form) for form in of_some)


def read_by(room: str) -> Mapping[str, set[str]]:
    """Returns the fields of families that the files of a room read, by field."""
    names = {field.name for field in dataclasses.fields(Family)}
    reading: dict[str, set[str]] = {}
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in names and _is_family(node.value):
                reading.setdefault(node.attr, set()).add(path.name)
    return reading


def _is_family(node: ast.expr) -> bool:
    """Returns whether an expression is a family's record, by its name."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Name) and node.value.id == "FAMILIES"
    if isinstance(node, ast.Call):
        node = node.func
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.lstrip("_") in ("family", "other")


def test_a_family_states_names_and_forms() -> None:
    fields = {field.name for field in dataclasses.fields(Family)}
    names = NAMES | OF_CONFIG_JSON | OF_TENSORS
    assert names < fields and all(map(is_form, fields - names))


ROOMS = ("model", "plan", "parallel", "update", "run", "config", "kinds", "commands", "around/fit")


@pytest.mark.parametrize("room", [*ROOMS, HUGGING_FACE_ROOM])
def test_a_room_reads_a_familys_layers_through_its_forms_alone(room: str) -> None:
    names = NAMES | OF_CONFIG_JSON | OF_TENSORS if room == HUGGING_FACE_ROOM else NAMES
    reading = read_by(room)
    assert {field for field in reading if not is_form(field)} <= names, reading


def test_the_rules_of_a_key_that_some_families_have_are_their_forms() -> None:
    text = (PACKAGE / "config" / "rules.py").read_text()
    of_some = {key for family in FAMILIES.values() for key in family.own_keys}
    assert not [key for key in of_some if key in text]
