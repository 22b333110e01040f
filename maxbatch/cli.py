"""The command line: arguments in, exit codes (`EXIT_CODES`) out."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from maxbatch import __version__
from maxbatch.commands import COMMANDS, Command
from maxbatch.config.values import nearest_name, nearest_or_all, refuse_no_text, shown
from maxbatch.parallel.absent_tpu import leave_out_absent_tpu
from maxbatch.parallel.device_watch import watch_cpu_devices
from maxbatch.parallel.devices import failure_of_devices
from maxbatch.system.errors import (
    EXIT_CODES,
    EXIT_DONE,
    ConfigError,
    TrainingError,
    failure_of_memory,
    is_disk_full,
    is_interruption,
    reason,
    report,
)
from maxbatch.system.hardware.cpu_devices import give_cpu_devices_threads
from maxbatch.system.processes.child_process import continue_stopped_children
from maxbatch.system.processes.command_start import can_continue, mark_start, take_process
from maxbatch.system.processes.stopping import leave_threads_behind, watch_signals
from maxbatch.system.terminal.folding import folded, folded_command, help_width


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `maxbatch` with these arguments (by default the process's) and returns the exit code."""
    if argv is not None:
        return _run(argv)
    # Imports and traced programs make millions of objects that stay: by default looking through
    # them again and again takes a sixth of a short command.
    gc.set_threshold(50_000, 20, 100)
    take_process()
    watch_signals(can_continue(sys.argv[1:]))
    watch_cpu_devices()
    continue_stopped_children()
    code = _run(sys.argv[1:])
    leave_threads_behind(code)
    return code


def _run(argv: Sequence[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a pipe that is closed already: the first print will raise
        with contextlib.suppress(OSError):
            # a sample may contain characters outside the encoding
            sys.stdout.reconfigure(errors="backslashreplace")
    give_cpu_devices_threads()
    leave_out_absent_tpu()
    mark_start(argv)
    command = COMMANDS.get(argv[0]) if argv else None
    as_json = command is not None and command.prints_json and "--json" in argv
    try:
        code = _dispatch(list(argv))
        sys.stdout.flush()
        return code
    except (ConfigError, TrainingError, KeyboardInterrupt) as error:
        return report(error, as_json)
    except Exception as error:
        # a path in a folder that is closed, say
        if isinstance(error, PermissionError) and error.filename is not None:
            return report(
                ConfigError(f"{shown(str(error.filename))}: cannot be opened ({reason(error)})"),
                as_json,
            )
        is_read_enough = isinstance(error, BrokenPipeError)
        if is_read_enough or is_disk_full(error):
            from maxbatch.system.terminal.terminal import discard_output

            discard_output()  # whatever is left of it has no reader, or perhaps no room
            return EXIT_DONE if is_read_enough else report(error, as_json)
        if failure := failure_of_memory(error) or failure_of_devices(error):
            return report(failure, as_json)
        if as_json or is_interruption(error):
            return report(error, as_json)
        raise


def _dispatch(argv: list[str]) -> int:
    for argument in argv:
        refuse_no_text(argument, shown(argument))
        if re.fullmatch(r"--[\w-]+=--", argument):  # argparse drops the value
            raise ConfigError(f"{shown(argument)}: must have a value after the =")
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] == "--version":
        print(f"maxbatch {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        raise ConfigError(
            f"{shown(name)}: unknown command; {nearest_or_all(name, COMMANDS, least_like=0.66)}"
        )
    _check_working_folder()
    parser = make_parser(name, rest)
    body = importlib.import_module(COMMANDS[name].module)
    try:
        args = parser.parse_intermixed_args(rest)
    except SystemExit as stop:  # --help; whatever is wrong is a ConfigError
        return int(stop.code or 0)
    code: int = body.run(args)
    return code


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the working folder was removed; works: cd into a folder that is there"
        ) from None


def make_parser(name: str, arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Returns the parser of a command, which raises ConfigError instead of ending the process.

    Args:
      name: the command.
      arguments: the arguments to parse, for messages that name all unknown ones.
    """
    parser = _Parser(name, COMMANDS[name], arguments)
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that names what to type instead."""

    def __init__(self, name: str, command: Command, words: Sequence[str]) -> None:
        columns = help_width()
        super().__init__(
            prog=f"maxbatch {name}",
            description=folded(command.summary, 0, columns),
            epilog="\n".join(
                (
                    "examples:",
                    *(folded_command(f"  {example}", 6, columns) for example in command.examples),
                )
            ),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.words = words  # the words to parse
        self.example = command.examples[0]

    def error(self, message: str) -> NoReturn:
        from maxbatch.config.sections import KEYS

        unknown = message.removeprefix("unrecognized arguments: ").split(" ")
        if len(message) == len(" ".join(unknown)):
            raise ConfigError(self._plain(re.sub(r"\S{81,}", lambda long: shown(long[0]), message)))
        flag, _, _ = unknown[0].partition("=")
        if flag in KEYS:
            raise ConfigError(f"{shown(unknown[0])}: {self.prog} takes no config keys")
        from maxbatch.config.unknown import hint

        texts = {
            word.partition("=")[0]: self._text_after(word)
            for word in unknown
            if word.startswith("-")
        }
        foreign, problems = dict[str, str](), list[str]()
        for flag in texts or [unknown[0]]:
            nearest = self._nearest(flag, least_like=0.9) or self._of_model(flag)
            if not nearest and flag in texts and hint(flag):
                foreign[flag] = texts[flag]
                continue
            nearest = nearest or self._nearest(flag)
            problems.append(
                f"{shown(flag)}: unknown flag" + (f"; nearest: {nearest}" if nearest else "")
            )
        raise ConfigError("; ".join([*problems, *([self._foreign(foreign)] if foreign else [])]))

    def _nearest(self, flag: str, least_like: float = 0.7) -> str | None:
        """Returns the known flag most like `flag`, or the only one that begins with it or has all
        of its words.
        """
        known = {option.lstrip("-"): option for option in self._option_string_actions}
        name = flag.lstrip("-").replace("_", "-").lower()
        words = set(name.split("-"))
        longer = [
            each
            for each in known
            if each.startswith(name) or (len(words) > 1 and words <= {*each.split("-")})
        ]
        near = nearest_name(name, known, least_like) or (longer[0] if len(longer) == 1 else "")
        return known.get(near)

    def _of_model(self, flag: str) -> str | None:
        """Returns the only flag with the same last word, if the command is for a MODEL: it takes no
        key of a run.
        """
        if not any(action.metavar == "MODEL" for action in self._actions):
            return None
        last = re.split("[-_]", flag)[-1]
        alike = [
            option for option in self._option_string_actions if re.split("[-_]", option)[-1] == last
        ]
        return alike[0] if len(alike) == 1 else None

    def _plain(self, message: str) -> str:
        """Returns argparse's message in the words of our own."""
        head, _, problem = message.removeprefix("argument ").partition(": ")
        if head.startswith("the following arguments"):
            return f"{problem}: must be given; works: {self.example}"
        if message.startswith("one of the arguments"):
            return (
                f"{' or '.join(re.findall('--[a-z-]+', message))}: must be given; works: "
                f"{self.example}"
            )
        if problem.startswith("not allowed with argument "):
            return (
                f"{head}: must not be given beside "
                f"{problem.removeprefix('not allowed with argument ')}"
            )
        if choice := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", problem):
            typed, choices = choice[1], choice[2].replace("'", "").split(", ")
            works = nearest_name(typed, choices) or choices[0]
            return f"{head} {typed}: must be one of {', '.join(choices)}; works: {head} {works}"
        if problem.startswith("expected "):
            return f"{head}: must be given a value"
        if problem.startswith("ignored explicit argument "):
            return f"{head}: takes no value"
        works = f"; works: {head} " if head.startswith("-") else "; works: "
        return f"{head} {problem}".rstrip().replace("; works: ", works)

    def _foreign(self, flags: Mapping[str, str]) -> str:
        """Returns the message about flags, and their texts, that are keys or words of other
        frameworks.
        """
        from maxbatch.commands.arguments import on_machine
        from maxbatch.config.loading import find_config, resolve

        words = [
            part
            for word in self.words
            for part in (word.split("=", 1) if word.startswith("--") else [word])
        ]
        after = dict(itertools.pairwise(words))

        def counted(*names: str) -> int | None:
            counts = (after.get(name, "") for name in names)
            return next((int(text) for text in counts if re.fullmatch(r"[1-9]\d{0,9}", text)), None)

        devices, hosts = (
            counted("--devices", "--simulate-devices"),
            counted("--hosts", "--simulate-hosts"),
        )
        overrides = [word for word in self.words if re.match(r"\w[\w ]*=", word)]
        plain = [word for word in self.words if not word.startswith("-") and word not in overrides]
        default = "rl" if self.prog == "maxbatch rl" else None
        file = next((word for word in plain if os.path.isfile(str(find_config(word)))), default)
        try:
            resolve(file, [*overrides, *(f"{flag}={text}" for flag, text in flags.items())])
        except ConfigError as error:
            return str(
                on_machine(
                    error, devices, hosts, has_flags="--devices" in self._option_string_actions
                )
            )
        raise AssertionError(f"no config has a key that is a flag: {flags}")

    def _text_after(self, word: str) -> str:
        """Returns the value of a flag, or the words after it up to the next flag or override."""
        _, equals, value = word.partition("=")
        after = self.words.index(word) + 1 if word in self.words else len(self.words)
        values = itertools.takewhile(
            lambda w: w[:1] not in "-" and "=" not in w, self.words[after:]
        )
        return value if equals else " ".join(values)


def _overview() -> str:
    width, columns = max(map(len, COMMANDS)), help_width()
    commands = "\n".join(
        folded(f"  {name:<{width}}  {command.summary}", width + 4, columns)
        for name, command in COMMANDS.items()
    )
    examples = "\n".join(
        folded_command(f"  {command.examples[0]}", 6, columns) for command in COMMANDS.values()
    )
    codes = "\n".join(
        folded(f"  {code:<2}  {meaning}", 6, columns) for code, meaning in EXIT_CODES.items()
    )
    last = (
        "No config file means the packaged configs/base.yml, which lists every key with its unit "
        "or rule;\nenvironment variables MAXBATCH_KEY override files, key=value overrides "
        "both.\nmaxbatch COMMAND --help shows a command's flags; maxbatch --version the version."
    )
    return (
        "maxbatch COMMAND [CONFIG.yml] [key=value ...] [--flags]\n\n"
        f"Trains language models in JAX with an exact batch.\n\ncommands:\n{commands}\n\n"
        f"examples:\n{examples}\n\n"
        f"exit codes:\n{codes}\n\n"
        + "\n".join(folded(line, 2, columns) for line in last.splitlines())
    )
