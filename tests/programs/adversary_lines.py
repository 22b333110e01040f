"""Fuzzed command lines: every command, flag and key, with values that nobody means."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from maxbatch.cli import make_parser
from maxbatch.config.keys import Key
from maxbatch.config.sections import KEYS
from tests.helpers.tiny import TINY_MODEL
from tests.programs.adversary_cases import Case

TINY = (*TINY_MODEL, "dataset_type=synthetic", "synthetic_samples=50", "steps=2")
_LONG = 5000
TEXTS = (
    "",
    " ",
    "\t",
    "\n",
    "-",
    "--",
    "=",
    "==",
    "key=",
    "=value",
    "null",
    "none",
    "~",
    "true",
    "False",
    "yes",
    "a" * _LONG,
    "🧨" * 200,
    "é",
    "e\u0301",
    "\u202egpj.exe",
    "\ud800",
    "\udcff",
    "\ufeff",
    "\x1b[31mred\x1b[0m",
    "\x07",
    "\r",
    "\x7f",
    "\x85",
    "a\nmaxbatch: error: forged",
    "a\x00b",
    "%s%n%d",
    "{}",
    "{0}",
    "{{ x }}",
    "[",
    "[]",
    "[" * _LONG,
    "(" * 400,
    "{'a': 1}",
    '{"a": {"b": ',
    "!!python/object/apply:os.system [id]",
    "&a [*a, *a]",
    "<<: *a",
    "*",
    "?",
    "[bold]x[/]",
    "[/]",
    "[link=x]",
    "$(id)",
    "`id`",
    "; id",
    "| id",
    "../" * 300,
    "../../../../etc/passwd",
    "a=b=c",
    "a:b:c",
    ",",
    ";",
    ",;,;",
    ";;",
    "a,b,c",
    "a.yml,0.5;b.yml,0.5",
    "0:8 100:16",
    "0:8 100",
    "0:1e9 1:2",
    "t",
    "1t",
    "1.0run",
    "seesaw 8 2",
)
NUMBERS = (
    "0",
    "-0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "8",
    "16",
    "0.5",
    "1/3",
    "0.1",
    "-0.0",
    "1e3",
    "1e-3",
    "3e-4",
    "1e400",
    "-1e400",
    "1e-400",
    "nan",
    "NaN",
    "-nan",
    "inf",
    "Infinity",
    "-inf",
    "0x10",
    "0b1",
    "1_000",
    "١٢٣",
    "１２",
    "½",
    "²",
    "1,000",
    "1 000",
    "1e",
    "e1",
    ".",
    "+1",
    "++1",
    "1/0",
    "0/0",
    "1/-3",
    "1/1e400",
    "9" * 400,
    "-" + "9" * 400,
    "9" * 5000,
    "1/" + "9" * 4400,
    "0." + "0" * 4000 + "1",
    str(2**31),
    str(2**31 - 1),
    str(2**32),
    str(2**40),
    str(2**63),
    str(2**64),
    "1K",
    "1M",
    "1B",
    "1T",
    "10Bt",
    "1e9999999999",
    "1e-9999999999",
    "-1K",
    "1.5",
    "99999999999",
    "4096",
    "2048",
    "100",
    "64",
)
PATHS = (
    ".",
    "..",
    "run.yml",
    "data.jsonl",
    "nowhere",
    "nowhere/",
    "folder",
    "folder/",
    "./run.yml/x",
    "fifo",
    "loop",
    "zero",
    "dangling",
    "a" * 300,
    "a/" * 2400,
    "é.yml",
    "a\nb.yml",
    "a b.yml",
    "~",
    "~/x",
    "~nobody-at-all/x",
    "$HOME/x",
    "-",
    "gs://",
    "s3://",
    "gs:///x",
    "s3:// /x",
    "http://x/y",
    "file:///x",
    "gs:/x",
    "run",
    "hf",
    "sweep.yml",
    "maxtext.yml",
    "binary",
    "empty",
    "deep.json",
    "*.jsonl",
    "[",
    "**",
    "**/*",
    "{run}.yml",
    "run/config.yml",
    "run/metrics.jsonl",
    "sw",
)
_WEIGHTS = {
    "plan": 30,
    "config": 10,
    "import": 10,
    "data": 10,
    "report": 7,
    "sweep": 6,
    "train": 9,
    "prepare": 5,
    "generate": 2,
    "export": 3,
    "score": 3,
    "rl": 4,
    "critical-batch": 3,
    "fit": 3,
    "compile": 3,
}
_LAYOUT_FLAGS = (
    "--simulate-devices",
    "--simulate-hosts",
    "--workers",
    "--count",
    "--max-new-tokens",
)
_FEW = (
    "0",
    "-1",
    "1",
    "2",
    "8",
    "nan",
    "1e9999999999",
    "9" * 400,
    "x",
    "",
    "1/2",
    "１２",
    str(2**64),
)
_TARGETS = (
    "v5p:2x2x1",
    "v4:2x2x1",
    "v5e:2x2",
    "v9:1x1",
    "v5p:",
    ":",
    "v5p:0x0x0",
    "v5p:1000000000x1x1",
    "v5p:2x2x2x2x2",
)
_FORMATS = (
    "maxtext",
    "hf",
    "deepspeed",
    "axolotl",
    "megatron",
    "nemo",
    "trl",
    "verl",
    "auto",
    "",
    "tf",
)


def make_line(seed: int, base: Path, number: int) -> Case:
    """Returns the command line of a number, in a copy of `base`."""
    rng = random.Random(f"line {seed} {number}")
    return Case(f"line {number}", tuple(_Line(rng).words()), base)


class _Line:
    """One command line while it is made."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._command = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]

    def words(self) -> list[str]:
        rng = self._rng
        words = self._positional()
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5, 12))):
            words.append(self._override())
        words += [word for _ in range(rng.choice((0, 0, 1, 1, 2, 4))) for word in self._flag()]
        if rng.random() < 0.15:
            rng.shuffle(words)
        if rng.random() < 0.1 and words:
            words.pop(rng.randrange(len(words)))
        if rng.random() < 0.1 and words:
            words.append(rng.choice(words))
        if rng.random() < 0.1:
            words.insert(rng.randrange(len(words) + 1), rng.choice(TEXTS))
        head = rng.choice(TEXTS) if rng.random() < 0.01 else self._command
        return [head, *words]

    def _positional(self) -> list[str]:
        rng, command = self._rng, self._command
        if command == "import":
            kind = rng.choice(_FORMATS)
            return [
                kind,
                rng.choice((*PATHS, "maxtext.yml", "megatron.sh", "axolotl.yml", "hf.json")),
            ]
        if command == "report":
            return [
                rng.choice(("run", "run", "sw", *PATHS)) for _ in range(rng.choice((1, 1, 2, 3)))
            ]
        if command == "sweep":
            return [rng.choice(("sweep.yml", "sweep.yml", "batch_size", *PATHS))]
        if command in ("generate", "export", "critical-batch"):
            return [rng.choice(("run", "hf", *PATHS))]
        if command == "score":
            return [rng.choice(("run", "hf", *PATHS)), rng.choice(("data.jsonl", *PATHS))]
        if command == "config" and rng.random() < 0.3:
            return [rng.choice((*KEYS, *TEXTS))]
        words = [rng.choice(("run.yml", *PATHS))] if rng.random() < 0.3 else []
        return words + list(TINY if command not in ("plan", "config") or rng.random() < 0.3 else ())

    def _override(self) -> str:
        rng = self._rng
        if rng.random() < 0.04:
            return f"{rng.choice((*TEXTS, 'batch_size', 'lr', 'per_device_batchsize'))}={rng.choice(NUMBERS)}"
        key = rng.choice(list(KEYS.values()))
        return f"{key.name}={self._value(key)}"

    def _value(self, key: Key) -> str:
        rng = self._rng
        if rng.random() < 0.15:
            return rng.choice(TEXTS)
        if rng.random() < 0.1:
            return rng.choice(NUMBERS)
        if rng.random() < 0.1:
            return key.default
        if key.kind in ("choice", "choices"):
            return rng.choice(key.choices)
        if key.kind == "bool":
            return rng.choice(("true", "false"))
        if key.kind in ("path", "local"):
            return rng.choice(PATHS)
        if key.kind == "paths":
            paths = [
                rng.choice(PATHS) + rng.choice(("", "", ",0.5", ",nan", ",1e400", ",-1", ","))
                for _ in range(3)
            ]
            return ";".join(paths[: rng.choice((1, 1, 2, 3))])
        return rng.choice(TEXTS if key.kind == "text" else NUMBERS)

    def _flag(self) -> list[str]:
        rng = self._rng
        if rng.random() < 0.1:
            return [
                rng.choice(
                    (
                        "--",
                        "---",
                        "--jsn",
                        "--lr=3",
                        "-x",
                        "--no-json",
                        "--json=1",
                        "--" + "x" * 3000,
                        "--é",
                    )
                )
            ]
        actions = [a for a in _actions(self._command) if a.option_strings]
        action = rng.choice(actions)
        flag = rng.choice(action.option_strings)
        if action.nargs == 0 or rng.random() < 0.05:
            return [flag]
        value = self._flag_value(flag, action)
        return [f"{flag}={value}"] if rng.random() < 0.5 else [flag, value]

    def _flag_value(self, flag: str, action: argparse.Action) -> str:
        rng = self._rng
        if action.choices and rng.random() < 0.8:
            return rng.choice(list(action.choices))
        if flag in _LAYOUT_FLAGS:
            return rng.choice(_FEW)
        if flag == "--topology":
            return rng.choice((*_TARGETS, *TEXTS))
        if action.metavar in ("FILE", "FOLDER", "DIR"):
            return rng.choice((*PATHS, "out", "out/x", "out.yml"))
        return rng.choice((*NUMBERS, *TEXTS) if rng.random() < 0.8 else PATHS)


def _actions(command: str) -> list[argparse.Action]:
    return make_parser(command)._actions
