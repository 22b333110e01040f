"""The rules of the house that a formatter does not know: rooms, walls, mirrored tests."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxbatch.config import combined
from maxbatch.config.keys import Section
from maxbatch.config.recipes import CHOICES
from maxbatch.config.sections import SECTIONS

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "maxbatch").rglob("*.py"))
COMBINED = [
    one for one in vars(combined).values() if isinstance(one, type) and issubclass(one, Section)
]
COMBINED = [one for one in COMBINED if one.__module__ == combined.__name__]
# The sections of the config that each room may import, of maxbatch/config/sections.py and
# combined.py.
WALLS = {
    "plan": {
        "PlanConfig",
        "RampConfig",
        "PromptBatchConfig",
        "RatesConfig",
        "OptimizerConfig",
        "ModelConfig",
        "MeshConfig",
    },
    "parallel": {"PlanConfig", "MeshConfig", "RematConfig"},
    "model": {"DecoderConfig", "ModelConfig"},
    "data": {"DataConfig", "StoreConfig", "StreamConfig"},
    "around/sampling": {"DecoderConfig", "TextConfig"},
    "run/folder": set(),
    "update": {
        "UpdateConfig",
        "ProgramsConfig",
        "AdapterConfig",
        "DecoderConfig",
        "MeshConfig",
        "ModelOptimizerConfig",
    },
    "run/weights": {"UpdateConfig", "AdapterConfig", "DecoderConfig", "ModelConfig"},
    "around/huggingface/folder": {"DecoderConfig", "StreamConfig", "DataConfig"},
    "around/huggingface/arrays": {"ModelConfig", "DecoderConfig", "StreamConfig"},
    "around/huggingface/export": set(),
    "run/record": {"RecordConfig"},
    "around/compile": {"DecoderConfig"},
    "kinds/text": {"DataConfig", "ProgramsConfig", "StreamConfig"},
    "kinds/conversation": {"DataConfig", "StreamConfig"},
    "kinds/pair": {
        "DataConfig",
        "PreferenceConfig",
        "ProgramsConfig",
        "StreamConfig",
        "UpdateConfig",
    },
    "kinds/prompt": {
        "EvaluationConfig",
        "LearnerConfig",
        "PromptConfig",
        "RLConfig",
        "RolloutConfig",
    },
    "around/auditing": set(),
    "testing": set(),
    "around/pages": set(),
}
# The functions of these rooms that take the whole config: the public Python API, and what opens a
# session or compares configs.
WHOLE_CONFIG = {
    "plan": {"BatchPlan.from_config", "LearningRate.from_config", "RampupBatchManager.from_config"},
    "parallel": {"make_mesh"},
    "model": set(),
    "data": {"open_stream"},
    "around/sampling": set(),
    "run/folder": set(),
    "run": {
        "MakeModel.__call__",
        "RunContext.__init__",
        "SessionConfigs.__init__",
        "changes_since",
        "opened_run",
        "train",
    },
    "around/huggingface/folder": set(),
    "around/huggingface/arrays": set(),
    "around/huggingface/export": set(),
    "kinds/prompt": {"train_policy", "warm_up"},
    "around/auditing": set(),
    "around/pages": set(),
}


def test_few_modules_stand_outside_of_the_rooms() -> None:
    outside = [
        path.name for path in (ROOT / "maxbatch").glob("*.py") if not path.name.startswith("__")
    ]
    assert len(outside) <= 6, outside


def test_contributing_shows_the_rooms_that_import_linter_enforces() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "rooms")
    enforced = [
        room.removeprefix("maxbatch.") for layer in reversed(layers) for room in layer.split(" : ")
    ]
    # groups of tests have a table above it
    _, house = (ROOT / "CONTRIBUTING.md").read_text().split("## The house")
    tables = [
        [
            room
            for cell in re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", part, re.M)
            for room in re.findall(r"`([\w.]+)`", cell)
        ]
        for part in house.split("\n\n")
    ]
    assert sorted(room for rooms in tables for room in rooms) == sorted(enforced)
    for rooms in tables:
        places = [enforced.index(room) for room in rooms]
        assert places == sorted(places)


# Words that stand for any name in a path that a page shows, and a name that exists.
PLACEHOLDERS = {"FORMAT": "axolotl", "name": "pair"}
PATH = re.compile(r"[\w.]+(/[\w.]+)*/?")


def paths_in(page: str) -> set[str]:
    """Returns the files, folders and modules of this checkout that a page names."""
    words = set(re.findall(r"`([^`\s]+)`", page))
    words.update(re.findall(r"^ +pytest .*?(tests/\S+)", page, re.MULTILINE))
    modules = re.findall(r"python -m ([\w.]+)", page)
    modules += [word for word in words if word.partition(".")[0] == "around" and "/" not in word]
    paths = {module.replace(".", "/") for module in modules}
    for word in words:
        is_file = Path(word).suffix in (".py", ".txt", ".yml", ".md", ".toml")
        if PATH.fullmatch(word) and ("/" in word or is_file):
            paths.add(re.sub(r"\w+", lambda match: PLACEHOLDERS.get(match[0], match[0]), word))
    return paths


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/how-it-works.md"])
def test_every_path_that_a_page_on_the_code_names_exists(page: str) -> None:
    tops = (ROOT, ROOT / "maxbatch", ROOT / "tests")
    names = {path.name for top in tops[1:] for path in top.rglob("*")}
    paths = paths_in((ROOT / page).read_text())
    assert {"update/step.py", "plan/rampup.py"} < paths, "the paths of the page are not found"
    missing = [
        path
        for path in paths
        if not any((top / f"{path}{end}").exists() for top in tops for end in ("", ".py"))
        and not ("/" not in path and path in names)
    ]
    assert missing == []


def test_no_contract_of_imports_has_exceptions() -> None:
    assert "ignore_imports" not in (ROOT / "pyproject.toml").read_text()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside of functions and for types count too; `maxbatch/__init__.py` hands names of
    all rooms on.
    """
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    graphlib.TopologicalSorter(
        {name: names.keys() & _imports(path) for name, path in names.items()}
    ).prepare()


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    declared = {re.split(r"[^\w.-]", one)[0].lower().replace("_", "-") for one in stated}
    packages = importlib.metadata.packages_distributions()
    missing = {
        module
        for module in {name.partition(".")[0] for path in MODULES for name in _imports(path)}
        & packages.keys()
        if not declared & {package.lower().replace("_", "-") for package in packages[module]}
    }
    assert missing <= {"maxbatch", *sys.stdlib_module_names}


def test_pip_chooses_the_client_of_s3_before_the_boto3_of_an_emulator() -> None:
    # aiobotocore allows a few releases of botocore and no newer ones. As a requirement of ours pip
    # chooses it before boto3, in the order of names; as one of s3fs alone it comes after, and pip
    # goes back through all its releases.
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(one.startswith("aiobotocore>=3.10") for one in extras["s3"])
    assert {"maxbatch[gcs,s3]", "moto[server]>=5.2"} <= set(extras["emulators"])
    assert any(one.startswith("maxbatch[emulators,") for one in extras["test"])


def _imports(path: Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize(
    "room", sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir())
)
def test_tests_mirror_the_package(room: str) -> None:
    if room in ("helpers", "programs", "refusals", "__pycache__"):
        return
    assert (ROOT / "maxbatch" / room).is_dir()


def test_no_test_imports_a_private_name() -> None:
    private = re.compile(
        r"^\s*(?:from maxbatch\S* import .*|(?:from|import) maxbatch\S*\.)\b_[a-z]", re.M
    )
    assert not [path for path in (ROOT / "tests").rglob("*.py") if private.search(path.read_text())]


def test_private_names_of_libraries_are_those_of_jax_in_one_module_and_of_pytest() -> None:
    """JAX's, where it has no public ones: `tests/parallel/test_jax_internals.py` says what depends
    on them.

    The plugin of pytest prints as pytest itself does, and the tests' forks ask whether devices are
    up; neither has a public way.
    """
    own = {"maxbatch", "tests", "benchmarks"}
    importing = {
        path.name
        for room in own
        for path in (ROOT / room).rglob("*.py")
        for name in _imported_names(path)
        if name.partition(".")[0] not in own and re.search(r"(^|\.)_(?!_)", name)
    }
    assert importing == {"jax_internals.py", "host_session.py", "merging.py", "forks.py"}


def _imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", WALLS)
def test_a_room_imports_the_sections_of_the_config_that_it_may_know(room: str) -> None:
    nodes = [node for tree in _trees(room) for node in ast.walk(tree)]
    imported = {
        f"{getattr(node, 'module', None) or ''}.{alias.name}".lstrip(".")
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    sections = {f"{section.__module__}.{section.__name__}" for section in (*SECTIONS, *COMBINED)}
    assert {name.rpartition(".")[2] for name in imported & sections} == WALLS[room]
    assert not {section.__module__ for section in (*SECTIONS, *COMBINED)} & imported, (
        "the module would give every section"
    )


@pytest.mark.parametrize("room", WHOLE_CONFIG)
def test_only_the_public_entries_of_a_room_take_the_whole_config(room: str) -> None:
    assert {
        name for tree in _trees(room) for name in _takers_of_the_whole_config(tree)
    } == WHOLE_CONFIG[room]


def _trees(room: str) -> list[ast.Module]:
    return [
        ast.parse(path.read_text()) for path in sorted((ROOT / "maxbatch" / room).rglob("*.py"))
    ]


def _takers_of_the_whole_config(node: ast.AST, within: str = "") -> Iterator[str]:
    """Yields the functions, with their classes, that have a parameter annotated Config."""
    for child in ast.iter_child_nodes(node):
        name = f"{within}{getattr(child, 'name', '')}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
            if any(
                argument.annotation and re.search(r"\bConfig\b", ast.unparse(argument.annotation))
                for argument in every
            ):
                yield name
        inner = (
            f"{name}."
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            else within
        )
        yield from _takers_of_the_whole_config(child, inner)


def test_only_config_recipes_and_import_ask_which_kind_of_sample_a_run_has() -> None:
    may_ask = [ROOT / "maxbatch" / room for room in ("config", "kinds", "around/importers")]
    others = [path for path in MODULES if not any(map(path.is_relative_to, may_ask))]
    asking = {path.name: set(_choices_asked_for(ast.parse(path.read_text()))) for path in others}
    found = {name: sorted(asked) for name, asked in asking.items() if asked}
    assert not found, (
        f"{found}: ask config.recipe for a fact, or give the recipe of that room a method"
    )


def _choices_asked_for(tree: ast.Module) -> Iterator[str]:
    """Yields the keys that choose a kind of sample where a module reads one: a flag, or a number
    compared with None.
    """
    flags = CHOICES.keys() - {"batch_size"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in flags:
            yield node.attr
        elif isinstance(node, ast.Constant) and node.value in flags:
            yield str(node.value)
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id in flags
        ):
            yield node.target.id
        elif (
            isinstance(node, ast.Compare)
            and "batch_size" in _read_by(node.left)
            and _is_none(node.comparators[0])
        ):
            yield "batch_size"


def _read_by(node: ast.expr) -> tuple[object, ...]:
    """Returns the name of an attribute, or the constant of a subscript."""
    if isinstance(node, ast.Subscript):
        return (node.slice.value,) if isinstance(node.slice, ast.Constant) else ()
    return (node.attr,) if isinstance(node, ast.Attribute) else ()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def test_no_room_but_system_asks_for_remote_path() -> None:
    inside = ROOT / "maxbatch" / "system"
    asking = [
        path for path in MODULES if inside not in path.parents and "RemotePath" in path.read_text()
    ]
    assert not asking, (
        f"{asking}: take an AnyPath, and ask maxbatch.system.storage.storage for what is needed"
    )


def test_every_program_with_compiler_options_drops_those_that_the_compiler_refuses() -> None:
    """`compile_program` does, and the probe of the flags; no other module states options."""
    stating = {path.name for path in MODULES if "compiler_options" in path.read_text()}
    assert stating == {"compiler.py", "flags.py"}, "ask jit_with or compile_program"


def test_the_core_names_no_module_that_stands_above_it() -> None:
    """Not even in a text: the tables of `maxbatch/registered.py` do."""
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    core = next(contract for contract in core["contracts"] if contract["id"] == "core")
    above = [name for name in core["forbidden_modules"] if name != "maxbatch.rl"]
    named = re.compile("|".join(re.escape(name) + r"\b" for name in above))
    rooms = [ROOT / name.replace(".", "/") for name in core["source_modules"]]
    files = [path for room in rooms for path in room.rglob("*.py")]
    assert files
    assert not [path for path in files if named.search(path.read_text())]


@pytest.mark.runs
def test_a_run_on_texts_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    code = (
        "import sys; from maxbatch.cli import main\n"
        "code = main(['train', 'steps=2', 'generate_prompt=', 'base_num_decoder_layers=1'])\n"
        "print('loaded:', *sorted(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.rpartition("loaded: ")[2].split()
    own = [name for name in loaded if name.startswith("maxbatch.")]
    assert "maxbatch.update.step" in own
    needless = (
        "around sampling harness huggingface maxtext chat reference adapters local_ ray_cluster"
    )
    # The format of its own texts, which a run reads whose texts are not tokenised yet.
    read = {"maxbatch.around", "maxbatch.around.formats", "maxbatch.around.formats.text"}
    assert not [name for name in set(own) - read for word in needless.split() if word in name]
    kinds = {name for name in own if name.startswith("maxbatch.kinds.")}
    assert kinds == {"maxbatch.kinds.text", "maxbatch.kinds.text.recipe"}
    libraries = {"lm_eval", "transformers", "tokenizers", "gcsfs", "s3fs", "aiohttp", "ray"}
    assert not libraries & set(loaded)
