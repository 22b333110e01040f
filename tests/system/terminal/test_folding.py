"""Lines and commands in a narrow terminal: nothing is lost, no word is torn, a shell reads the same
command.
"""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.commands import COMMANDS
from maxbatch.system.terminal.folding import folded, folded_command
from tests.helpers.terminals import in_terminal

WORDS = st.lists(st.text("abc=/.", min_size=1, max_size=20), min_size=1, max_size=30)


@given(words=WORDS, hanging=st.integers(0, 30), width=st.integers(60, 160))
def test_folding_loses_nothing(words: list[str], hanging: int, width: int) -> None:
    lines = folded(" ".join(words), hanging, width).splitlines()
    assert " ".join(lines).split() == words and max(map(len, lines)) <= width
    assert folded(" ".join(words), hanging, None) == " ".join(words)


def test_a_number_and_its_unit_are_on_one_line() -> None:
    assert folded("= 16 per device x 1 accumulation step; 4,096 tokens", 2, 46).splitlines() == [
        "= 16 per device x 1 accumulation step;",
        "  4,096 tokens",
    ]


@given(
    words=st.lists(st.text("ab =;:,{}", min_size=1, max_size=20), min_size=1, max_size=12),
    width=st.integers(40, 120),
)
def test_a_folded_command_is_the_same_to_a_shell(words: list[str], width: int) -> None:
    command = shlex.join(["maxbatch", *words])
    lines = folded_command(f"  {command}", 6, width).splitlines()
    # A shell drops a backslash with the end of its line; shlex does not.
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == ["maxbatch", *words]
    assert all(len(line) <= width for line in lines)
    assert all(line.endswith(" \\") for line in lines[:-1]) and not lines[-1].endswith("\\")


@pytest.mark.parametrize(
    "arguments", [("--help",), ("plan", "--help"), ("critical-batch", "--help")]
)
def test_help_keeps_to_80_columns(arguments: tuple[str, ...]) -> None:
    lines = in_terminal(*arguments, columns=80)
    assert max(map(len, lines)) <= 80
    joined = " ".join(" ".join(lines).replace(" \\", "").split())
    shown = COMMANDS.values() if arguments == ("--help",) else [COMMANDS[arguments[0]]]
    assert all(" ".join(command.examples[0].split()) in joined for command in shown)
