"""A user's function is identified by its source and its own imports' source, independent of
paths.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from maxbatch.config.user_function import source_hash

FILES = {
    "reward.py": "import json\nimport helper\nfrom tools import words\nfrom tools.more import count\n",
    "helper.py": "import reward\nVALUE = 1\n",
    "tools/__init__.py": "",
    "tools/words.py": "from . import more\n",
    "tools/more.py": "from ..helper import VALUE\nfrom .deep.deeper import X\n",
    "tools/deep/__init__.py": "",
    "tools/deep/deeper.py": "X = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {**FILES, "unrelated.py": "", "data.json": "{}"}.items():
        (tmp_path / "one" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "one" / name).write_text(text)
    return tmp_path / "one"


def test_a_character_of_any_file_that_it_imports_changes_the_hash_and_nothing_else_does(
    folder: Path, tmp_path: Path
) -> None:
    first = source_hash(f"{folder}/reward.py:score")
    shutil.copytree(folder, tmp_path / "two")
    assert source_hash(f"{tmp_path}/two/reward.py:score") == first, "the place does not count"
    for name in FILES:
        (folder / name).write_text(FILES[name] + "#")
        assert source_hash(f"{folder}/reward.py:score") != first, name
        (folder / name).write_text(FILES[name])
    (folder / "unrelated.py").write_text("#")
    (folder / "data.json").write_text("[]")
    assert source_hash(f"{folder}/reward.py:score") == first


def test_a_module_is_followed_within_its_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    first = source_hash("tools.words:score")
    (folder / "tools" / "more.py").write_text("#")
    second = source_hash("tools.words:score")
    (folder / "helper.py").write_text("#")
    assert first != second == source_hash("tools.words:score")


def test_what_cannot_be_parsed_or_found_has_a_hash_too(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (")
    assert source_hash(f"{tmp_path}/broken.py:a") != source_hash(f"{tmp_path}/missing.py:a")
    assert source_hash("maxbatch.rl.arithmetic:is_right")
