"""Bounds on the YAML of task files, checked first because lm-evaluation-harness's reader has
none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from maxbatch.config.values import shown_path
from maxbatch.system.storage.bounded import read_text
from maxbatch.system.storage.bounded_yaml import MOST_YAML_CHARACTERS, compose_yaml


def check_task_files(places: Iterable[str]) -> None:
    """Raises ConfigError for task files nested or expanded beyond bounds.

    Missing files and files that are not YAML are left to the harness, which reports or ignores
    them.

    Args:
      places: files, and folders with all YAML files below them. The files that they include are
        checked too.

    Raises:
      ConfigError: a file is beyond a bound of `compose_yaml`; the message names it.
    """
    todo = [file for place in places for file in _files(Path(place))]
    seen: set[Path] = set()
    while todo:
        file = Path(os.path.realpath(todo.pop()))
        if file in seen or not file.exists():
            continue
        seen.add(file)
        where = f"task file {shown_path(file)}"
        try:
            root = compose_yaml(read_text(file, where, MOST_YAML_CHARACTERS), where)
        except (OSError, yaml.YAMLError):
            continue
        todo += [file.parent / included for included in _included(root)]


def _files(place: Path) -> Iterable[Path]:
    return sorted(place.glob("**/*.yaml")) if place.is_dir() else [place]


def _included(root: yaml.Node | None) -> Iterator[str]:
    for name, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if isinstance(name, yaml.ScalarNode) and name.value == "include":
            nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
            yield from (part.value for part in nodes if isinstance(part, yaml.ScalarNode))
