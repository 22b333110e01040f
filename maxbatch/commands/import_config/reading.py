"""Files of other programs as their words and values: YAML, JSON, `key=value` lines, flags, shell recipes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from maxbatch.commands.import_config.translation import Stated
from maxbatch.config.values import shown_path
from maxbatch.config.yaml_file import compose
from maxbatch.system.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}]*))?\})")
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_SETTING = re.compile(r"^-{0,2}[A-Za-z_][\w.\-]*=")


def is_yaml(path: Path) -> bool:
    """Returns whether a file is YAML or JSON by its name, or a mapping by its text."""
    if path.suffix.lower() in (".yml", ".yaml", ".json"):
        return True
    if path.suffix.lower() in (".sh", ".bash"):
        return False
    return not re.search(r"^\s*(--|python|export |torchrun)|^[\w.\-]+=", text_of(path), re.M)


def text_of(path: Path) -> str:
    """Returns the text of a file; raises ConfigError for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown_path(path)}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def read_yaml(path: Path) -> dict[str, Stated]:
    """Returns the words of a YAML or JSON file; those of a nested mapping are joined by dots."""
    node = compose(path)
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{shown_path(path)}: must be lines of `key: value`")
    try:
        return dict(_flat(_plain(node)))
    except RecursionError:
        raise ConfigError(f"{shown_path(path)}: cannot be read (nested too deeply)") from None


def _plain(node: yaml.Node) -> object:
    """Returns a tree of nodes as dicts, lists and texts; no type is guessed."""
    if isinstance(node, yaml.MappingNode):
        return {str(getattr(name, "value", name)): _plain(value) for name, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    return str(node.value)


def _flat(value: object, path: str = "") -> Iterator[tuple[str, Stated]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        yield path, value
    else:
        yield path, "" if isinstance(value, dict) else str(value)


def read_line(path: Path) -> tuple[list[str], int]:
    """Returns the words of the training command in a shell file or of `key=value` lines, and how many commands it has.

    Variables that the file sets, or that have a default, are put in. The first command that trains is read.
    """
    text = re.sub(r"\\\s*\n", " ", text_of(path))
    variables: dict[str, str] = {}
    commands: list[list[str]] = []
    loose: list[str] = []
    for line in text.splitlines():
        assigned = _ASSIGNED.match(line)
        try:
            words = shlex.split(_expanded(line, variables), comments=True)
        except ValueError:
            words = []  # a quote over several lines: no setting of a training command
        settings = [word for word in words if _SETTING.match(word) or word.startswith("--")]
        is_command = len(words) > 1 and re.search(r"python|torchrun|deepspeed|accelerate|srun|\.yml|\.py", line)
        if is_command and settings and re.search(r"train|\.yml|\.py", line) and "install" not in words[:5]:
            commands.append(words)
        elif assigned and len(words) <= 2 and not assigned[1].islower():
            variables[assigned[1]] = _unquoted(_expanded(assigned[2], variables))
        else:
            loose += settings if not is_command else []
            variables |= {assigned[1]: _unquoted(_expanded(assigned[2], variables))} if assigned else {}
    training = [words for words in commands if any("train" in word for word in words)] or commands
    return (_arguments_of(training[0]) if training else loose), max(1, len(training))


def _arguments_of(words: list[str]) -> list[str]:
    """Returns the words after the program: without its environment and its launcher's flags."""
    nested = next((words[i + 1] for i, word in enumerate(words[:-1]) if word == "--command"), None)
    if nested is not None:
        words = re.findall(r"""[^\s"';]+(?:"[^"]*"|'[^']*')?|;""", nested)  # its quotes may be escaped
    programs = [i for i, word in enumerate(words) if word.endswith(".py") or words[max(0, i - 1)] in ("-m", "--module")]
    words = words[programs[-1] + 1 :] if programs else words
    end = next((i for i, word in enumerate(words) if word in (";", "&&", "||", "|", "&", ">", "2>&1")), len(words))
    return words[:end]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Returns a line with the values of variables; one without a value stays as it is."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return variables.get(name, found[3] if found[3] is not None else found[0])

    for _ in range(4):  # defaults may hold variables
        text, before = _VARIABLE.sub(value, text), text
        if text == before:
            break
    return text


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text.partition(" #")[0].strip()


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
