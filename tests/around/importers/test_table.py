"""The tables of `maxbatch import`: the meaning of rows, and the existence of all named
functions.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maxbatch.around.importers import table
from maxbatch.around.importers.table import Format
from maxbatch.around.importers.translation import Translation
from maxbatch.commands.import_config import FORMATS
from maxbatch.config.sections import KEYS

TABLE = """
[signs]
lots

[defaults]
lr=1e-4 note='two words'

[words]
old_lr | | > lr |
lots | > 1 | steps={int} | a number
lots, few | is none | - | {} has no effect
few | | ? steps={lr} | the step
switch | | packing={bool} |
made | any | @more @counted |
part_* | lots stated | - | {lots} lots
part_* | | ! | lots
state | :is_left | only yes, no | yes or no
state_of_data | :is_left | only!! yes | yes

[more]
lr | any | learning_rate |
| lots unstated | steps=7 |
"""


@pytest.fixture
def form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Format:
    (tmp_path / "t.txt").write_text(TABLE)
    monkeypatch.setattr(table, "__file__", str(tmp_path / "table.py"))
    rules = {"counted": lambda t, word: t.ignore(word, f"{len(t.left())} left")}
    return Format("t", lambda t: ("", ""), rules)


@pytest.mark.parametrize(
    ("words", "settings", "fates"),
    [
        (
            {"lots": "4"},
            {"steps": "4", "learning_rate": "1e-4"},
            {"lots": ("mapped", "steps=4: a number", False)},
        ),
        ({"lots": "none"}, {"steps": "7"}, {"lots": ("ignored", "none has no effect", False)}),
        ({"old_lr": "1"}, {"learning_rate": "1"}, {"old_lr": ("mapped", "learning_rate=1", False)}),
        ({"few": "2", "lr": "3"}, {}, {"few": ("needs you", "steps=3: the step", False)}),
        ({"switch": "Yes"}, {"packing": "true"}, {}),
        ({"part_a": "1", "lots": "2"}, {}, {"part_a": ("ignored", "2 lots", False)}),
        ({"part_a": "1"}, {"steps": "7"}, {"part_a": ("not supported", "lots", False)}),
        ({"state": "no"}, {}, {"state": ("ignored", "no: our behaviour", False)}),
        ({"state_of_data": "no"}, {}, {"state_of_data": ("not supported", "yes", True)}),
    ],
)
def test_a_word_takes_the_first_of_its_rows_that_holds(
    form: Format,
    words: dict[str, str],
    settings: dict[str, str],
    fates: dict[str, tuple[str, str, bool]],
) -> None:
    t = Translation(words, form.defaults, "maxtext")
    form.translate(t)
    found = {fate.word: (fate.fate, fate.says, fate.is_essential) for fate in t.fates}
    assert settings.items() <= t.settings.items() and fates.items() <= found.items()
    assert (
        len(t.fates) == len(found)
        and form.signs == ["lots"]
        and form.defaults["note"] == "two words"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_all_that_a_table_names_is_there(name: str) -> None:
    form = FORMATS[name]
    for rows in (block for blocks in form.sections.values() for block in blocks):
        for row in rows:
            terms = [term.strip() for term in row.when.split(" and ")] if row.when else []
            assert all(term[1:] in form.conditions for term in terms if term.startswith(":")), row
            assert all(table.TERM.fullmatch(term) for term in terms if not term.startswith(":")), (
                row
            )
            if row.here.startswith("@"):
                assert set(re.findall(r"@(\w+)", row.here)) <= {*form.rules, *form.sections}, row
            elif row.here[0] not in "-!>" and row.here.split()[0] not in (
                "only",
                "only!!",
                "assume",
            ):
                settings = [part for part in row.here.split() if part not in ("?", "x")]
                assert {part.partition("=")[0] for part in settings} <= set(KEYS), row
