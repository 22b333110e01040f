"""The table of foreign words: it reaches all that there is, and denies none of it."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from maxbatch.around.words import look_up, rows
from maxbatch.commands import COMMANDS
from maxbatch.config.sections import KEYS

WHYS = " ".join(row.why for row in rows())
OF_CONTRIBUTORS = {"parity", "docs", "test", "dev"}


class Feature(NamedTuple):
    """A line of features.txt."""

    name: str
    words: tuple[str, ...]
    places: tuple[str, ...]
    denials: tuple[str, ...]


def features() -> list[Feature]:
    text = Path(__file__).with_name("features.txt").read_text(encoding="utf-8")
    lines = [line.split("|") for line in text.splitlines() if line and not line.startswith("#")]
    return [
        Feature(
            name.strip(),
            tuple(word.strip() for word in asked.split(",")),
            tuple(places.replace("maxbatch ", "maxbatch_").split()),
            tuple(denial.strip() for denial in denials.split(";")),
        )
        for name, asked, places, denials in lines
    ]


def test_every_key_is_reachable_from_a_foreign_word() -> None:
    reached = {key for row in rows() for key in row.keys} | {
        key.maxtext_name for key in KEYS.values()
    }
    assert set(KEYS) <= reached


def test_the_table_leads_from_a_keys_other_name_in_maxtext_to_the_key() -> None:
    """A key's row states its name in MaxText, and the table of words what to do with that word."""
    names = {
        word: key
        for key in KEYS.values()
        if key.maxtext_name and key.maxtext_name != key.name
        for word in key.maxtext_name.split(" and ")
        # MaxText's words that are keys here too, and the switch of a logger
        if word not in KEYS and word != "enable_tensorboard"
    }
    missing = set()
    for word, key in names.items():
        row = look_up(word, "maxtext")
        missing |= set() if row and key.name in row.keys else {word}
    assert len(names) >= 12 and not missing


def test_every_command_and_every_extra_is_reachable_from_a_foreign_word() -> None:
    assert [name for name in COMMANDS if f"maxbatch {name}" not in WHYS] == []
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - OF_CONTRIBUTORS
    assert [name for name in sorted(extras) if f"maxbatch[{name}]" not in WHYS] == []


def test_no_row_denies_a_feature() -> None:
    for feature in features():
        asked = [
            row for row in rows() if any(fnmatchcase(row.word, word) for word in feature.words)
        ]
        assert asked, feature.name
        for row in asked:
            said = f"{' '.join(row.keys)} {row.why}".replace("maxbatch ", "maxbatch_")
            assert any(place in said for place in feature.places), (feature.name, row)
        for row in rows():
            assert not any(denial.lower() in f"{row.why}.".lower() for denial in feature.denials), (
                feature.name,
                row,
            )


def test_the_features_are_there() -> None:
    for feature in features():
        for place in feature.places:
            command = place.removeprefix("maxbatch_")
            assert (
                place in KEYS
                or (command in COMMANDS and command != place)
                or Path(place).suffix == ".md"
            ), place


def test_no_key_of_ours_is_denied_under_its_own_name() -> None:
    assert [row for row in rows() if row.word in KEYS and not row.keys] == []
