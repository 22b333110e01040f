"""configs/base.yml, generated from the table of keys by `python -m maxbatch.config.base_yml`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from maxbatch.config.keys import Key
from maxbatch.config.paths import configs_dir
from maxbatch.config.sections import SECTIONS
from maxbatch.config.values import NULLS, TEXTS

_HEADER = """\
# maxbatch defaults: every key, with its unit or its rule. Names are MaxText's where it has the key.
# Layers, later ones win: base.yml < base_config chain < model preset < your CONFIG.yml < MAXBATCH_KEY < key=value.
# A preset displaces the model keys of all layers below the one whose model_name names it.
# Written from maxbatch/config/sections.py by python -m maxbatch.config.base_yml: edit the table, not this file.
"""


def base_path() -> Path:
    """Returns base.yml, which shows every key with its default."""
    return configs_dir() / "base.yml"


def base_yml() -> str:
    return _HEADER + "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    for section in SECTIONS:
        yield from ("", f"# --- {section.heading()} ---".ljust(111, "-"))
        for key in section.declared:
            yield f"{key.name}: {_written(key)}  ".ljust(36) + f"# {key.sentence}"


def _written(key: Key) -> str:
    """Returns a default in YAML; text that YAML could read as another type is quoted."""
    is_plain = key.kind not in TEXTS or (
        re.fullmatch(r"[\w./:-]+", key.default) and key.default not in NULLS
    )
    return (
        key.default
        if is_plain or (key.nullable and key.default == "null")
        else json.dumps(key.default)
    )


if __name__ == "__main__":
    base_path().write_text(base_yml(), encoding="utf-8")
