"""Writes MaxText's defaults as a table: which file each of its modules reads, and the values of
those files.

    python -m tests.helpers.maxtext_defaults FOLDER VERSION >
    maxbatch/around/importers/maxtext_defaults.txt

FOLDER is `maxtext/configs` of an installed MaxText. The table has the modules of `pyconfig.py`'s
mapping, the words and values of the files that they read, each without those of its bases, the
defaults of words that `types.py` has beside base.yml's, and the words that each model's file
states. Lists of sharding rules are left out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

from maxbatch.around.importers.reading import read_yaml

_OF_SHARDING = ("logical_axis_rules", "logical_axis_rules_for_eval", "data_sharding", "mesh_axes")


def modules_of(pyconfig: Path) -> dict[str, str]:
    """Returns the file of each module, from the mapping in the source of MaxText's
    `pyconfig.py`.
    """
    for node in ast.parse(pyconfig.read_text()).body:
        if (
            isinstance(node, ast.AnnAssign)
            and getattr(node.target, "id", "") == "_CONFIG_FILE_MAPPING"
            and node.value
        ):
            mapping: dict[str, str] = ast.literal_eval(node.value)
            return mapping
    raise SystemExit(f"{pyconfig}: has no _CONFIG_FILE_MAPPING")


def _lines(words: Mapping[str, object]) -> str:
    """Returns lines of `word=value`, a list as `[a,b]`, a text with blanks in quotes."""
    lines = [""]
    for word, value in words.items():
        text = (
            f"[{','.join(map(str, value))}]"
            if isinstance(value, list)
            else ""
            if value is None
            else str(value)
        )
        setting = f"{word}='{text}'" if " " in text else f"{word}={text}"
        if lines[-1] and len(f"{lines[-1]} {setting}") > 120:
            lines.append("")
        lines[-1] = f"{lines[-1]} {setting}".strip()
    return "\n".join(lines)


def _words_of(file: Path) -> dict[str, object]:
    return {word: value for word, value in read_yaml(file).items() if word not in _OF_SHARDING}


def typed_defaults(types: Path) -> dict[str, object]:
    """Returns the fields in the source of MaxText's `types.py` whose defaults are literals or
    empty, with these.
    """
    found: dict[str, object] = {}
    for node in ast.walk(ast.parse(types.read_text())):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Call)
        ):
            stated = [
                *node.value.args[:1],
                *(word.value for word in node.value.keywords if word.arg == "default"),
            ]
            if any(word.arg == "default_factory" for word in node.value.keywords):
                found[node.target.id] = None  # an empty list or mapping
            try:
                found[node.target.id] = ast.literal_eval(stated[0])
            except (IndexError, ValueError):
                continue  # no default, or one that is made
    return {
        word: value
        for word, value in found.items()
        if value is None or isinstance(value, bool | int | float | str)
    }


def main(folder: Path, version: str) -> None:
    """Prints the table of a folder of configs."""
    modules = modules_of(folder / "pyconfig.py")
    print(
        f"# Defaults of MaxText {version}, by tests/helpers/maxtext_defaults.py. A word without a "
        "value is empty there."
    )
    print(f"\n[modules]\n{_lines(modules)}")
    for name in dict.fromkeys(modules.values()):
        print(f"\n[{name}]\n{_lines(_words_of(folder / name))}")
    known = read_yaml(folder / "base.yml")
    typed = {
        word: value
        for word, value in typed_defaults(folder / "types.py").items()
        if word not in known and word[0] != "_"
    }
    print(f"\n[types]\n{_lines(typed)}")
    print("\n[models]")
    for file in sorted(folder.glob("models/*.yml")):
        print(" ".join([file.stem, *_words_of(file)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
