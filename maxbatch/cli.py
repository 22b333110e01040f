"""The command line: arguments in, exit codes out.

Exit codes: 0 done; 2 the user's input is at fault (one line on standard error); 75 stopped early on request
with a checkpoint saved; 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from maxbatch.system.errors import ConfigError, TrainingError, is_disk_full, report


@dataclasses.dataclass(frozen=True)
class Command:
    """One command: what it says of itself, its flags, and its body.

    Attributes:
      summary: one line for `maxbatch --help`.
      usage: what follows the command's name.
      examples: command lines that work.
      module: has `add_arguments(parser)` and `run(args)`, which returns the exit code; imported when it is wanted.
    """

    summary: str
    usage: str
    examples: tuple[str, ...]
    module: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run `maxbatch` with these arguments (by default the process's) and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # a pipe that is closed already: the first print will say so
            sys.stdout.reconfigure(errors="backslashreplace")  # a sample may hold what the encoding does not
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        from maxbatch.system.terminal import discard_output

        discard_output()  # whoever read it has read enough
        return 0
    except (ConfigError, TrainingError, KeyboardInterrupt) as error:
        return report(error)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return report(error)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] == "--version":
        from maxbatch import __version__

        print(f"maxbatch {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        raise ConfigError(f"{name}: {_unknown_command(name)}")
    command = COMMANDS[name]
    parser = _Parser(name, command)
    body = importlib.import_module(command.module)
    body.add_arguments(parser)
    try:
        args = parser.parse_intermixed_args(rest)
    except SystemExit as stop:  # --help; whatever is wrong is a ConfigError
        return int(stop.code or 0)
    return body.run(args)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line that says what to type instead."""

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(
            prog=f"maxbatch {name}",
            usage=f"maxbatch {name} {command.usage}",
            description=command.summary,
            epilog=_examples(command),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        from maxbatch.config.keys import nearest_name
        from maxbatch.config.loading import keys

        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is None:
            raise ConfigError(message.removeprefix("argument ").replace(": ", " ", 1))
        flag, _, value = unknown[1].partition("=")
        key = flag.lstrip("-").replace("-", "_")
        if key in keys() and not flag.startswith("-"):
            raise ConfigError(f"{unknown[1]}: {self.prog} takes no config keys")
        if key in keys():
            raise ConfigError(f"{flag}: config keys are stated without dashes; works: {key}={value or '...'}")
        nearest = nearest_name(flag, self._option_string_actions)
        raise ConfigError(f"{flag}: unknown flag" + (f"; nearest: {nearest}" if nearest else ""))


COMMANDS: dict[str, Command] = {
    "plan": Command(
        "Print the whole batch plan of a run, before any device is touched.",
        "[CONFIG.yml] [key=value ...] [--devices N] [--hosts H] [--json] [--layout] [--words]",
        (
            "maxbatch plan",
            "maxbatch plan model_name=llama3-8b global_batch_size=1024 --devices 256 --hosts 64",
            "maxbatch plan per_device_batch_size=3 gradient_accumulation_steps=2 --devices 3 --layout --words",
            'maxbatch plan batch_size_schedule="0:256 1M:512 2Bt:1024" train_tokens=10B --devices 64 --json',
        ),
        "maxbatch.commands.plan",
    ),
    "train": Command(
        "Train a model; a checkpoint in run_dir is resumed.",
        "[CONFIG.yml] [key=value ...] [--simulate-devices N [--simulate-hosts H]]",
        (
            "maxbatch train",
            "maxbatch train run_dir=runs/wider base_emb_dim=256 train_tokens=10M",
            "maxbatch train dataset_type=text dataset_path='books/*.txt' global_batch_size=64 num_epochs=2",
            "maxbatch train run.yml enable_rampup_batch_size=true --simulate-devices 4",
            "maxbatch train run.yml expansion_factor_real_data=2 --simulate-devices 8 --simulate-hosts 4",
        ),
        "maxbatch.commands.train",
    ),
    "fit": Command(
        "Find the largest batch that fits, by asking the compiler.",
        "[CONFIG.yml] [key=value ...] [--topology T [--slices S]] [--json] [--write FILE]",
        (
            "maxbatch fit model_name=llama2-7b --topology v5p:2x2x4",
            "maxbatch fit run.yml global_batch_size=1024 --topology v5e:16x16 --slices 2 --write fitted.yml",
        ),
        "maxbatch.commands.fit.command",
    ),
    "compile": Command(
        "Compile every program of a run ahead of time, for this machine or a TPU that is not here.",
        "[CONFIG.yml] [key=value ...] [--topology T [--slices S]] [--output DIR] [--json]",
        (
            "maxbatch compile model_name=llama2-7b per_device_batch_size=4 --topology v5p:4x4x4 --output compiled",
            "maxbatch compile run.yml --simulate-devices 8 --output compiled",
        ),
        "maxbatch.commands.compile",
    ),
    "data": Command(
        "Show the stream of samples that training reads.",
        "[CONFIG.yml] [key=value ...] [--first S] [--count N] [--fingerprint | --stats] [--json]",
        (
            "maxbatch data --first 0 --count 2",
            "maxbatch data run.yml --stats --json",
            "maxbatch data run.yml --fingerprint --first 1024 --count 64",
        ),
        "maxbatch.commands.data",
    ),
    "prepare": Command(
        "Tokenise a dataset into a folder that dataset_type=tokens reads.",
        "[CONFIG.yml] [key=value ...] --output FOLDER [--workers N] | --verify FOLDER",
        (
            "maxbatch prepare dataset_type=jsonl dataset_path=web.jsonl --output web-tokens",
            "maxbatch prepare run.yml --output tokens --workers 64",
            "maxbatch prepare --verify tokens",
        ),
        "maxbatch.commands.prepare",
    ),
    "generate": Command(
        "Continue a prompt with the model of a run.",
        'RUN_DIR [--prompt "..."] [--max-new-tokens N] [--temperature T] [--top-k K] [--seed S]',
        (
            'maxbatch generate runs/default --prompt "def main("',
            'maxbatch generate runs/default --prompt "import " --max-new-tokens 200 --temperature 0.7',
        ),
        "maxbatch.commands.generate",
    ),
    "rl": Command(
        "Train a policy with GRPO: prompts, sampled responses, rewards.",
        "[CONFIG.yml] [key=value ...] [--simulate-devices N]",
        (
            "maxbatch rl",
            "maxbatch rl rl.yml batch_size=64 num_generations=8 micro_batch_size=64",
            "maxbatch rl rl.yml dataset_type=jsonl dataset_path=questions.jsonl reward=rewards.py:score",
        ),
        "maxbatch.commands.rl",
    ),
    "sweep": Command(
        "Train a run for each combination of swept config keys, and compare them.",
        "SWEEP.yml [--retry-failed]",
        ("maxbatch sweep batch_size", "maxbatch sweep configs/sweeps/batch_size.yml"),
        "maxbatch.commands.sweep.command",
    ),
    "critical-batch": Command(
        "Measure the critical batch size along a run, and write the schedule that follows.",
        "RUN_DIR [--checkpoints STEP,...] [--factors F,...] [--samples N] [--scaling sqrt|linear|none]"
        " [--tolerance NATS] [--simulate-devices N]",
        (
            "maxbatch critical-batch runs/default",
            "maxbatch critical-batch runs/default --checkpoints 100,400,1600 --factors 1/2,1,2,4,8,16 --samples 4K",
        ),
        "maxbatch.commands.critical_batch.command",
    ),
    "report": Command(
        "Write one HTML page of plots and plans, for one or more runs or a sweep.",
        "RUN_DIR [RUN_DIR ...] [--output FILE]",
        ("maxbatch report runs/default", "maxbatch report runs/a runs/b --output compared.html"),
        "maxbatch.commands.report.command",
    ),
}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    examples = "\n".join(f"  {command.examples[0]}" for command in COMMANDS.values())
    return (
        "maxbatch COMMAND [CONFIG.yml] [key=value ...] [--flags]\n\n"
        f"Trains language models in JAX with an exact batch.\n\ncommands:\n{commands}\n\n"
        f"examples:\n{examples}\n\n"
        "No config file means the packaged configs/base.yml, which lists every key with its unit or rule;\n"
        "environment variables MAXBATCH_KEY override files, key=value overrides both.\n"
        "maxbatch COMMAND --help shows a command's flags; maxbatch --version the version."
    )


def _examples(command: Command) -> str:
    return "examples:\n" + "\n".join(f"  {example}" for example in command.examples)


def _unknown_command(name: str) -> str:
    from maxbatch.config.keys import nearest_name

    nearest = nearest_name(name, COMMANDS)
    return (
        f"unknown command; nearest: {nearest}"
        if nearest
        else f"unknown command; one of {', '.join(COMMANDS)}"
    )
