"""Words and values of shell recipes, flags and `key=value` lines."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from maxbatch.around.importers.reading import state, text_of
from maxbatch.around.importers.translation import Stated
from maxbatch.config.values import first_of, shown, shown_path
from maxbatch.system.errors import ConfigError

# $NAME, ${NAME}, ${NAME:-default}, ${NAME:?message}, ${NAME:+other}; a default may hold others
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?)([-=?+])|(?=\})))")
_OUTPUT = re.compile(r"\$\(\s*(?!\()(\w+)[^()]*\)|`\s*(\w+)[^`]*`")  # $(date +%F)
# a heredoc
_PYTHON = re.compile(
    r"python[\d.]*\b[^\n;&|]*<<-?\s*(['\"]?)(\w+)\1[^\n]*\n.*?^\s*\2[ \t]*$", re.M | re.S
)
_OF_MAXTEXT = re.compile(r"(^|[./])(maxtext|tests)[./]", re.I)  # its modules, and its checks
# gs://<MY-BUCKET>, to be filled in
_PLACE = re.compile(r"(?<=[=/:\w\-\"'])<([A-Za-z\"][\w .|\"\-]*|)>")
_NOT_OF_NAME = re.compile(r"\W+")
_PLACED = re.compile("\ue000(\\w+)\ue001")  # a place, with its name marked as no variable
_ARRAY_VARIABLE = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_SUM = re.compile(r"\$\(\(([\w\s${}*+\-]{1,512})\)\)")  # of integers and variables; others are kept
_TERM = re.compile(r"\s*([*+\-]?)\s*(?:(\d{1,18})|\$?\{?([A-Za-z_]\w{0,63})\}?)\s*")
_INTEGER = re.compile(r"[0-9]{1,18}")
_QUOTED = r'"(?:\\.|[^"\\])*"|\'[^\']*\'|\\.'
_QUOTE_OR_COMMENT = re.compile(rf"{_QUOTED}|(?:^|(?<=\s))#[^\n]*", re.M | re.S)
# Separators in a line: the end of a command, or a redirection with its target; not in quotes or
# substitutions.
_WHOLE = rf"{_QUOTED}|\$?\(\((?:[^()]|\([^()]*\))*\)\)|\$\([^()]*\)|\$\{{[^{{}}]*\}}|`[^`]*`"
_PARTS = re.compile(
    rf"(?P<whole>{_WHOLE})|(?P<to>(?:(?<!\S)\d+)?&?[<>]+[&|]?[ \t]*(?:{_WHOLE}|[^\s;&|<>])*)|(?P<end>[;&|]+)",
    re.S,
)
_NAME = r"^[ \t]*(?:export\s+|declare -a\s+)?([A-Za-z_]\w*)(\+?)="
_ARRAY = re.compile(_NAME + r"\(((?:[^()]|\([^()]*\)|\(\([^()]*\)\))*)\)", re.M)
_ASSIGNED = re.compile(_NAME + r"(.*)$")
_SETTING = re.compile(r"^[-+]{0,2}[A-Za-z_][\w.\-]*=")
_BRANCH = re.compile(r"\s*(if|elif|then|else|fi)(?!\S)\s*(.*)$", re.S)
_TEST = re.compile(r"\[\[?\s+(.*?)\s+\]\]?\s*$", re.S)
UNSET = re.compile(r"\$\{(\w+)\}")  # a variable that the script does not set
_PROGRAM = re.compile(r"python|torchrun|deepspeed|accelerate|srun|\.yml|\.py|\.sh\b")
_TRL = re.compile(r"\s*(?:\w+=\S+\s+)*trl\s+(?:dpo|grpo|sft)\s")  # its own command
_LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run", "accelerate.commands.launch")
_MOST_EXPANDED = 2**20  # characters of all expanded variables in a file
_MOST_CALLS = 4  # nested calls of scripts
_MOST_NESTED = 8  # nested defaults
_MOST_LINES = 20_000  # commands, empty ones included
_MOST_OF_LINE = 2**16  # characters of a command, variables expanded


class ShellCommand(NamedTuple):
    """A command of a shell file, or loose settings, which have no start."""

    start: list[str]  # environment, launcher with its flags, and program
    arguments: list[str]

    @property
    def program(self) -> str:
        """The module or the path that it runs."""
        return (self.start[-1:] or self.arguments[:1] or [""])[0]

    def processes(self, where: str) -> int | None:
        """Returns the processes on all machines according to the launcher; None if not stated."""
        flags = settings_of((self.start or self.arguments)[:-1], where)
        for of_node, nodes in (
            ("num_processes", ""),
            ("nproc_per_node", "nnodes"),
            ("num_gpus", "num_nodes"),
        ):
            texts = [str(flags.get(of_node, "")), str(flags.get(nodes, "1"))]
            if all(_INTEGER.fullmatch(text) for text in texts):
                return math.prod(map(int, texts))
        return None


def read_command(path: Path, number: int | None = None) -> ShellCommand:
    """Reads the training command of a shell file, or its loose settings: lines of flags or
    `key=value`.

    Expands variables and arrays that the file sets or that have a default. `number` is that of the
    training command, from 1; None: the only one.

    Raises:
      ConfigError: several commands train with different settings and `number` is None, there is no
        such command, or the file exceeds a bound.
    """
    script = _Script(path)
    commands = _training(script)
    if not commands and script.commands:
        program = shown(_command(script.commands[0]).program)
        raise ConfigError(
            f"{shown_path(path)}: no command of it trains; {program} is another program of "
            "MaxText's"
        )
    if not commands and script.spaced:
        raise ConfigError(
            f"{shown_path(path)}: {shown(script.spaced)}: has blanks around =; works: key=value"
        )
    readable = commands or [ShellCommand([], script.loose)]
    if number is not None and number > len(readable):
        raise ConfigError(
            f"--command {number}: {shown_path(path)} has {len(readable)}; works: --command "
            f"{len(readable)}"
        )
    if number is None and any(
        _of_run(command.arguments) != _of_run(readable[0].arguments) for command in readable
    ):
        texts = (shown(" ".join([*command.start, *command.arguments])) for command in commands)
        named = first_of([f"{i}: {text}" for i, text in enumerate(texts, 1)], 8, ";")
        rule = f"{len(commands)} commands train, and an import makes one config"
        raise ConfigError(f"{shown_path(path)}: {rule} ({named}); works: --command 1")
    return readable[(number or 1) - 1]


def commands_of(path: Path) -> list[ShellCommand]:
    """Returns each training command, in the order of `--command`."""
    return _training(_Script(path))


def _training(script: _Script) -> list[ShellCommand]:
    """Returns the commands recognised as training; if none, all but MaxText's other programs."""
    commands = map(_command, script.commands)
    able = [
        command
        for command in commands
        if "train" in command.program or not _OF_MAXTEXT.search(command.program)
    ]
    return [
        command
        for command in able
        if any("train" in word for word in (*command.start, *command.arguments))
    ] or able


class _Script:
    """The commands and the loose settings of a shell file, with variables expanded."""

    def __init__(self, path: Path, arguments: Sequence[str] = (), depth: int = 0) -> None:
        self.commands: list[list[str]] = []  # commands with settings
        self.loose: list[str] = []
        self.spaced = ""  # first line with blanks around =, invalid as a shell setting
        self._path, self._depth = path, depth
        self._variables = {str(i): text for i, text in enumerate(arguments, 1)}
        self._expanded = 0  # characters expanded so far
        self._outputs: set[str] = set()  # names of programs whose output is unknown
        # per open `if`: is this branch taken, was an earlier one
        self._branches: list[tuple[bool | None, bool]] = []
        for number, line in enumerate(_lines(text_of(path))):
            if number == _MOST_LINES:
                raise ConfigError(
                    f"{shown_path(path)}: has more than {_MOST_LINES:,} commands, the most that "
                    "are read"
                )
            self._take(self._taken(line))
        self.commands = [[_named(word) for word in words] for words in self.commands]
        self.loose = [_named(word) for word in self.loose]

    def _take(self, line: str) -> None:
        assigned = _ARRAY.match(line) or _ASSIGNED.match(line)
        expanded = self._expand(line)
        words = self._words(expanded)
        program = next((word for word in words if not _SETTING.match(word)), "-")
        is_program = _PROGRAM.search(expanded) or _TRL.match(expanded)
        is_command = len(words) > 1 and program[:1] not in "-+" and is_program is not None
        if assigned and (_ARRAY.match(line) or (len(words) <= 2 and not assigned[1].islower())):
            self._assign(assigned)
        elif is_command:
            self._take_command(words, expanded)
        else:
            is_flags = words[:1] and words[0].startswith("--")
            self.loose += words if is_flags else [word for word in words if _SETTING.match(word)]
            if not self.spaced and re.match(r"\s*[\w.\-]+\s+=\s", line):
                self.spaced = line.strip()
            if assigned:
                self._assign(assigned)

    def _take_command(self, words: list[str], text: str) -> None:
        """Keeps a command that may train, or the commands nested in its text (`eval`, `bash -c`,
        `--command`).
        """
        called = next(
            (i for i, word in enumerate(words[:2]) if word.endswith((".sh", ".bash"))), None
        )
        if called is not None and self._depth < _MOST_CALLS:
            script = self._path.parent / Path(words[called]).name
            if script.is_file():
                self.commands += _Script(script, words[called + 1 :], self._depth + 1).commands
                return
        nested = _nested(words, text)
        if nested is not None:
            for line in _lines(nested):
                if len(inner := self._words(line)) > 1:
                    self._take_command(inner, "")
            return
        if words[0] in ("echo", "printf"):
            return  # printed, not run
        has_settings = any(_SETTING.match(word) or word.startswith("--") for word in words)
        trains = any(
            re.search(r"train|\.yml|\.py|^trl$", word) or _OF_MAXTEXT.search(word) for word in words
        )
        if has_settings and trains and "install" not in words[:5]:
            self.commands.append(words)

    def _words(self, line: str) -> list[str]:
        if len(line) > _MOST_OF_LINE:
            raise ConfigError(
                f"{shown_path(self._path)}: a command has more than {_MOST_OF_LINE:,} characters: "
                f"{shown(line)}"
            )
        try:
            return shlex.split(line)
        except ValueError:
            if _PROGRAM.search(line) or re.match(r"\s*(--|[\w.\-]+=)", line):
                raise ConfigError(
                    f"{shown_path(self._path)}: a quote has no end: {shown(line.strip())}"
                ) from None
            return []  # not a training command

    def _assign(self, assigned: re.Match[str]) -> None:
        name, plus, text = assigned.groups()
        value = _unquoted(self._expand(text))
        self._variables[name] = f"{self._variables.get(name, '')} {value}" if plus else value

    def _expand(self, text: str) -> str:
        """Expands the variables of a line; an unset one and $(name ...) become ${NAME}."""

        def counted(value: str) -> str:
            self._expanded += len(value)
            if self._expanded > _MOST_EXPANDED:
                raise ConfigError(
                    f"{shown_path(self._path)}: its variables become more than {_MOST_EXPANDED:,} "
                    "characters"
                )
            return value

        def put_in(text: str, depth: int = 0) -> str:
            pieces, at = list[str](), 0
            closings = _closings(text) if depth < _MOST_NESTED else {}
            while match := _VARIABLE.search(text, at):
                name, end, word = match[1] or match[2], match.end(), ""
                if match[2] and match.start() not in closings:
                    pieces.append(text[at:end])  # unterminated
                    at = end
                    continue
                if match[2]:
                    closing = closings[match.start()]
                    word, end = text[end:closing], closing + 1
                value = self._variables.get(name)
                if value == "" and match[3]:
                    value = None  # with a colon, empty counts as unset
                if match[4] == "+":
                    value = "" if value is None else put_in(word, depth + 1)
                elif value is None and match[4] in ("-", "="):
                    value = put_in(word, depth + 1)
                    if match[4] == "=":
                        self._variables[name] = value
                pieces += [
                    text[at : match.start()],
                    counted(f"${{{name}}}" if value is None else value),
                ]
                at = end
            return "".join([*pieces, text[at:]])

        text = put_in(
            _ARRAY_VARIABLE.sub(
                lambda match: counted(self._variables.get(match[1], match[0])), text
            )
        )
        text = _SUM.sub(self._sum, text)

        def output(match: re.Match[str]) -> str:
            name = (match[1] or match[2]).upper()
            self._outputs.add(name)
            return f"${{{name}}}"

        return _OUTPUT.sub(output, text)

    def _sum(self, match: re.Match[str]) -> str:
        """Evaluates a sum of products of integers and variables within a shell's 64 bits.

        Other expressions are kept, without blanks.
        """
        terms, at, sign = [0], 0, 1
        unread = re.sub(r"\s", "", match[0])
        while at < len(match[1]):
            term = _TERM.match(match[1], at)
            text = "" if term is None else term[2] or self._variables.get(term[3], "").strip()
            if term is None or not _INTEGER.fullmatch(text) or (term[1] == "") != (at == 0):
                return unread
            if term[1] == "*":
                terms[-1] *= int(text)
            else:
                sign = -1 if term[1] == "-" else 1
                terms.append(sign * int(text))
            at = term.end()
        total = sum(terms)
        return str(total) if abs(total) < 2**63 else unread

    def _taken(self, line: str) -> str:
        """Returns the line, or nothing in a branch of an `if` that the shell skips."""
        match = _BRANCH.match(line)
        if match is None:
            return line if all(branch is not False for branch, _ in self._branches) else ""
        word, rest = match.groups()
        if word == "if":
            self._branches.append((None, False))
        if not self._branches:
            return line  # not a branch
        _, is_done = self._branches[-1]
        if word in ("if", "elif", "else"):
            branch = False if is_done else True if word == "else" else self._holds(rest)
            self._branches[-1] = (branch, is_done or branch is True)
        elif word == "fi":
            self._branches.pop()
        is_test = word in ("if", "elif") and _TEST.match(rest)
        return "" if is_test or any(branch is False for branch, _ in self._branches) else rest

    def _holds(self, condition: str) -> bool | None:
        """Evaluates a comparison of texts, with unset variables empty; None for other
        conditions.
        """
        test = _TEST.match(condition)
        if test is None or "$(" in condition or "`" in condition:
            return None
        words = self._words(self._expand(test[1]))
        words = [
            "" if (unset := UNSET.fullmatch(word)) and unset[1] not in self._outputs else word
            for word in words
        ]
        if any("$" in word or "\ue000" in word for word in words):
            return None
        match words:
            case ["-z" | "-n" as kind, *texts] if len(texts) < 2:
                return (texts in ([], [""])) == (kind == "-z")
            case [left, "==" | "=" | "!=" as kind, right] if not set("*?[") & set(right):
                return (left == right) == (kind != "!=")
        return None


def _closings(text: str) -> dict[int, int]:
    """Returns the position of the closing brace, by each `${`."""
    closings: dict[int, int] = {}
    opened: list[int] = []
    for brace in re.finditer(r"\$\{|\}", text):
        if brace[0] == "${":
            opened.append(brace.start())
        elif opened:
            closings[opened.pop()] = brace.start()
    return closings


def _named(word: str) -> str:
    """Replaces the placeholders of a word by `${NAME}`."""
    return _PLACED.sub(r"${\1}", word)


def _of_run(words: list[str]) -> list[str]:
    """Returns the words of a command without the target machine of a compilation."""
    return [word for word in words if not word.lstrip("-").startswith("compile_topology")]


def _lines(text: str) -> Iterator[str]:
    """Yields the commands of a script, without comments and redirections.

    Backslashes, quotes and arrays continue a line; `;`, `&&`, `||`, `|` and `&` separate commands.
    """

    def joined(match: re.Match[str]) -> str:
        return "" if match[0].startswith("#") else match[0].replace("\n", " ")

    def parted(match: re.Match[str]) -> str:
        return match[0] if match["whole"] else " " if match["to"] else "\n"

    text = re.sub(r"\\[ \t\r]*\n", " ", _PYTHON.sub("", text))
    text = _PLACE.sub(
        lambda match: f"\ue000{_NOT_OF_NAME.sub('_', match[1]).strip('_') or 'VALUE'}\ue001", text
    )
    text = _QUOTE_OR_COMMENT.sub(joined, text)
    for line in _ARRAY.sub(lambda match: match[0].replace("\n", " "), text).split("\n"):
        yield from [line] if _ARRAY.match(line) else _PARTS.sub(parted, line).split("\n")


def _nested(words: list[str], text: str) -> str | None:
    """Returns the script text inside a command, or None."""
    if words[0] == "eval":
        return text.strip().removeprefix("eval") or " ".join(words[1:])
    for i, word in enumerate(words[:-1]):
        if word.lower() == "--command" or (
            word == "-c" and re.search(r"\b(ba|z|da)?sh$", words[i - 1])
        ):
            return words[i + 1]
    return next(
        (word.partition("=")[2] for word in words if word.lower().startswith("--command=")), None
    )


def _command(words: list[str]) -> ShellCommand:
    """Splits the words of a command behind its program."""
    programs = [
        i
        for i, word in enumerate(words)
        if word not in _LAUNCHERS
        and (word.endswith(".py") or words[max(0, i - 1)] in ("-m", "--module", "trl"))
    ]
    end = programs[0] + 1 if programs else 0
    return ShellCommand(words[:end], words[end:])


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def settings_of(words: list[str], where: str) -> dict[str, Stated]:
    """Returns `key=value` words and flags with their values; a bare flag is true.

    Raises:
      ConfigError: a word has two values; `where` begins the message.
    """
    settings_by_word: dict[str, Stated] = {}
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if _SETTING.match(word):
            name, _, value = word.partition("=")
            state(settings_by_word, name.lstrip("-+").replace("-", "_"), value, where)
        elif re.match(r"--?[A-Za-z]", word):
            values: list[object] = []
            while (
                at < len(words)
                and not re.match(r"-{1,2}[A-Za-z]", words[at])
                and not _SETTING.match(words[at])
            ):
                values.append(words[at])
                at += 1
            flag_value = values if len(values) > 1 else str(values[0]) if values else "true"
            state(settings_by_word, word.lstrip("-").replace("-", "_"), flag_value, where)
        elif "=" in word:
            name, _, value = word.partition("=")
            state(settings_by_word, name, value, where)
    return settings_by_word


def config_file_of(words: list[str]) -> str | None:
    """Returns the YAML file named by a command, or None."""
    return next(filter(is_config_file, words), None)


def is_config_file(word: str) -> bool:
    """Returns whether a word names a YAML file."""
    return re.search(r"\.ya?ml$", word) is not None and "=" not in word
