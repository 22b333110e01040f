"""`maxbatch completion`: a shell's script that completes commands, flags, config keys and files."""

from __future__ import annotations

import argparse
import importlib
import shlex
from typing import NamedTuple

from maxbatch.commands import COMMANDS
from maxbatch.config.sections import KEYS
from maxbatch.system.errors import EXIT_DONE

_BASH = """\
# source this file, or put it into ~/.local/share/bash-completion/completions/maxbatch
_maxbatch() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ "${{COMPREPLY[0]}}" == *= ]]; then compopt -o nospace; fi
}}
complete -o default -F _maxbatch maxbatch
"""
_ZSH = """\
#compdef maxbatch
# source this file after compinit, or put it as _maxbatch into a folder of $fpath
_maxbatch() {{
    local -a flags keys
    if (( CURRENT == 2 )); then
        compadd -- {commands}
        return
    fi
    case $words[2] in
{cases}
    esac
    compadd -- $flags
    compadd -S '' -- $keys
    _files
}}
compdef _maxbatch maxbatch
"""
_FISH = "# put this file into ~/.config/fish/completions/maxbatch.fish\n{lines}\n"


class _Words(NamedTuple):
    """The words that may follow a command."""

    flags: list[str]
    keys: list[str]  # of the config, each with its `=`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(_SCRIPTS), help="whose script is printed")


def run(args: argparse.Namespace) -> int:
    """Prints the script of a shell."""
    print(_SCRIPTS[args.shell]({name: _words_of(name) for name in COMMANDS}), end="")
    return EXIT_DONE


def _words_of(name: str) -> _Words:
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    flags = [
        flag
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--")
    ]
    takes_keys = any(action.dest in ("config", "overrides") for action in parser._actions)
    return _Words(flags, [f"{key}=" for key in KEYS] if takes_keys else [])


def _bash(words: dict[str, _Words]) -> str:
    cases = [
        f'        {name}) words="{" ".join([*flags, *keys])}" ;;'
        for name, (flags, keys) in words.items()
    ]
    return _BASH.format(commands=" ".join(words), cases="\n".join(cases))


def _zsh(words: dict[str, _Words]) -> str:
    cases = [
        f"        {name}) flags=({' '.join(flags)}) keys=({' '.join(keys)}) ;;"
        for name, (flags, keys) in words.items()
    ]
    return _ZSH.format(commands=" ".join(words), cases="\n".join(cases))


def _fish(words: dict[str, _Words]) -> str:
    lines = []
    for name, (flags, keys) in words.items():
        summary = shlex.quote(COMMANDS[name].summary.replace("'", "’"))
        lines.append(f"complete -c maxbatch -n __fish_use_subcommand -f -a {name} -d {summary}")
        seen = f"complete -c maxbatch -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{seen} -l {flag.removeprefix('--')}" for flag in flags]
        if keys:
            lines.append(f"{seen} -a '{' '.join(keys)}'")
    return _FISH.format(lines="\n".join(lines))


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
