"""Shell recipes, flags and `key=value` lines as their words and values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from maxbatch.commands.import_config.reading import text_of
from maxbatch.commands.import_config.translation import Stated

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}]*))?\})")
_ARRAY_VARIABLE = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_QUOTE_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'|\\.|(?:^|(?<=\s))#[^\n]*', re.M | re.S)
_NAME = r"^[ \t]*(?:export\s+|declare -a\s+)?([A-Za-z_]\w*)(\+?)="
_ARRAY = re.compile(_NAME + r"\(((?:[^()]|\([^()]*\)|\(\([^()]*\)\))*)\)", re.M)
_ASSIGNED = re.compile(_NAME + r"(.*)$")
_END = re.compile(r"[;&|]{1,2}|[\d&]?[<>].*")  # of a command: another one, or its redirection
_SETTING = re.compile(r"^-{0,2}[A-Za-z_][\w.\-]*=")


def read_line(path: Path) -> tuple[list[str], int]:
    """Returns the words of the training command in a shell file or of its loose settings, and how many commands it has.

    Variables and arrays that the file sets, or that have a default, are put in. The first command that trains is read.
    Without a command, lines of flags or of `key=value` are the settings.
    """
    variables: dict[str, str] = {}
    commands: list[list[str]] = []
    loose: list[str] = []
    for line in _lines(text_of(path)):
        assigned = _ARRAY.match(line) or _ASSIGNED.match(line)
        expanded = _expanded(line, variables)
        words = _words(expanded)
        flags, settings = words[:1] and words[0].startswith("--"), [word for word in words if _SETTING.match(word)]
        has_settings = settings or any(word.startswith("--") for word in words)
        is_command = len(words) > 1 and re.search(r"python|torchrun|deepspeed|accelerate|srun|\.yml|\.py", expanded)
        if assigned and (_ARRAY.match(line) or (len(words) <= 2 and not assigned[1].islower())):
            _assign(variables, assigned)
        elif is_command and has_settings and re.search(r"train|\.yml|\.py", expanded) and "install" not in words[:5]:
            commands.append(words)
        elif not is_command:
            loose += words if flags else settings
            if assigned:
                _assign(variables, assigned)
    training = [words for words in commands if any("train" in word for word in words)] or commands
    return (_arguments_of(training[0]) if training else loose), max(1, len(training))


def _lines(text: str) -> list[str]:
    """Returns the lines of a script without comments; what a backslash, a quote or an array continues is one line."""

    def joined(found: re.Match[str]) -> str:
        return "" if found[0].startswith("#") else found[0].replace("\n", " ")

    text = re.sub(r"\\\s*\n", " ", text)
    text = _QUOTE_OR_COMMENT.sub(joined, text)
    return _ARRAY.sub(lambda found: found[0].replace("\n", " "), text).splitlines()


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return []  # a quote without its end: no setting of a training command


def _assign(variables: dict[str, str], assigned: re.Match[str]) -> None:
    name, plus, text = assigned.groups()
    value = _unquoted(_expanded(text, variables))
    variables[name] = f"{variables.get(name, '')} {value}" if plus else value


def _arguments_of(words: list[str]) -> list[str]:
    """Returns the words after the program: without its environment and its launcher's flags."""
    nested = next((words[i + 1] for i, word in enumerate(words[:-1]) if word == "--command"), None)
    if nested is not None:
        words = re.findall(r"""[^\s"';]+(?:"[^"]*"|'[^']*')?|;""", nested)  # its quotes may be escaped
    programs = [i for i, word in enumerate(words) if word.endswith(".py") or words[max(0, i - 1)] in ("-m", "--module")]
    words = words[programs[-1] + 1 :] if programs else words
    end = next((i for i, word in enumerate(words) if _END.fullmatch(word)), len(words))
    return words[:end]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Returns a line with the values of variables; one without a value stays as it is."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return variables.get(name, found[3] if found[3] is not None else found[0])

    for _ in range(4):  # defaults may hold variables
        whole = _ARRAY_VARIABLE.sub(lambda found: variables.get(found[1], found[0]), text)
        text, before = _VARIABLE.sub(value, whole), text
        if text == before:
            break
    return text


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def settings_of(words: list[str]) -> dict[str, Stated]:
    """Returns `key=value` words and flags with their values; a flag without one is true."""
    found: dict[str, Stated] = {}
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if _SETTING.match(word):
            name, _, value = word.partition("=")
            found[name.lstrip("-+").replace("-", "_")] = value
        elif re.match(r"--?[A-Za-z]", word):
            values: list[str] = []
            while at < len(words) and not re.match(r"-{1,2}[A-Za-z]", words[at]) and not _SETTING.match(words[at]):
                values, at = [*values, words[at]], at + 1
            name = word.lstrip("-").replace("-", "_")
            found[name] = list(values) if len(values) > 1 else values[0] if values else "true"
    return found


def config_file_of(words: list[str]) -> str | None:
    """Returns the YAML file that a command names, if it does."""
    return next((word for word in words if re.search(r"\.ya?ml$", word) and "=" not in word), None)
