"""Ready rewards: a number against the record's answer, and a program against the record's tests.

`reward="maxbatch.rl.verifiers:right_number"` and `reward="maxbatch.rl.verifiers:passes_tests"`.

Limits: a program runs with the rights of its user. The bounds are those of each process that it starts, and one that
leaves its process group outlives it. They stop endless loops and large allocations, and are no wall against a program
that is out to do harm.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path

_WHOLE = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"
_NUMBER = re.compile(rf"(?:(?<![\w)])[-+])?(?:(?:{_WHOLE})(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_MOST_DIGITS, _MOST_EXPONENT = 1000, 1000  # beyond them it is no number
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\{(\s*[-+]?\d+\s*)\}\{(\s*\d+\s*)\}")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
PROGRAM_LIMIT_S = 5.0  # of a program with its tests
PROGRAM_MEMORY_BYTES = 1 << 30

# Takes the folder of maxbatch as its argument, and the bounds, two tokens, the program and its tests as a literal in
# one line of standard input. Writes the first token once the bounds hold, and the second once the last test has passed.
_RUNNER = """
import ast, os, resource, signal, sys
sys.path.append(sys.argv.pop())
from maxbatch.system.child_process import end_with_parent
sys.path.pop()
seconds, bounds, ready, passed, program, tests = ast.literal_eval(sys.stdin.readline())
parent, answer = os.dup(0), os.dup(1)
for stream in (0, 1, 2):
    os.dup2(os.open(os.devnull, os.O_RDWR), stream)
end_with_parent(parent, with_group=True)
for name, bound in bounds.items():
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
    resource.setrlimit(kind, (bound, bound))
signal.alarm(seconds)
os.write(answer, ready.encode())
names = {"__name__": "__main__"}
exec(compile(program, "response", "exec"), names)
for test in tests:
    exec(compile(test, "test", "exec"), names)
os.write(answer, passed.encode())
os._exit(0)
"""
_ROOT = str(Path(__file__).parents[2])


def right_number(prompt: str, response: str, record: dict[str, object]) -> float:
    """Returns 1.0 if the number that a response ends with equals the record's `answer`, else 0.0.

    A number in \\boxed{} goes first, then the one after `####`, then the last of the text; so it is in the answer,
    which may be a number or a text. Numbers are compared exactly: 1,200 is 1200.0, and 1/2 is 0.5.

    Raises:
      ValueError: the record has no `answer` with a number in it.
    """
    expected = _last_number(str(record.get("answer", "")))
    if expected is None:
        raise ValueError("the record has no field 'answer' with a number in it")
    return float(_last_number(response) == expected)


def _last_number(text: str) -> Fraction | None:
    """Returns the number that a text states as its result."""
    boxed = _BOXED.findall(_FRACTION.sub(r"\1/\2", text))
    stated = boxed[-1] if boxed else text.rpartition("####")[2]
    stated = _FRACTION.sub(r"\1/\2", stated)
    found = list(_NUMBER.finditer(stated))
    if not found:
        return None
    last = _fraction(found[-1][0])
    if last is None:
        return None
    if len(found) > 1 and stated[found[-2].end() : found[-1].start()].strip() == "/" and last:
        first = _fraction(found[-2][0])
        return None if first is None else first / last
    return last / 100 if stated[found[-1].end() :].lstrip(" \\").startswith("%") else last


def _fraction(text: str) -> Fraction | None:
    """Returns the value of a number; None for one that is too long or too large to compute with."""
    digits, _, exponent = text.replace(",", "").lower().partition("e")
    if len(digits) > _MOST_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > _MOST_EXPONENT:
        return None
    return Fraction(digits) * Fraction(10) ** int(exponent or 0)


def passes_tests(prompt: str, response: str, record: dict[str, object]) -> float:
    """Returns 1.0 if the Python program in a response passes all of the record's `tests`, else 0.0.

    The program is the last block between ``` of the response, or all of it. Tests are Python statements that raise
    unless the program is right, such as "assert double(2) == 4": one text or a list of them, after the program in the
    same process. That process is a new one in an empty folder, with `PROGRAM_LIMIT_S` and `PROGRAM_MEMORY_BYTES`.

    Raises:
      ValueError: the record has no `tests`.
      RuntimeError: the process could not begin with the program.
    """
    tests = record.get("tests")
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError("the record has no field 'tests', a text or a list of texts")
    blocks = _BLOCK.findall(response)
    return float(_passes(blocks[-1] if blocks else response, tests))


def _passes(program: str, tests: list[str]) -> bool:
    ready, passed = secrets.token_hex(16), secrets.token_hex(16)
    seconds = math.ceil(PROGRAM_LIMIT_S)
    bounds = {"RLIMIT_AS": PROGRAM_MEMORY_BYTES, "RLIMIT_CPU": seconds, "RLIMIT_FSIZE": 1 << 20, "RLIMIT_CORE": 0}
    asked = repr((seconds, bounds, ready, passed, program, tests)).encode("utf-8", "backslashreplace")
    # The answer goes to a file, whose size RLIMIT_FSIZE bounds too, whatever the program writes to it.
    with (
        tempfile.TemporaryDirectory(prefix="maxbatch-program-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as answer,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER, _ROOT],
            stdin=subprocess.PIPE, stdout=answer, stderr=subprocess.DEVNULL, cwd=folder, start_new_session=True,
            env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(asked + b"\n")
                process.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PROGRAM_LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what the program has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        answer.seek(0)
        found = answer.read(len(ready + passed) + 1).decode(errors="replace")
    if not found.startswith(ready):
        raise RuntimeError(f"the process of a program did not begin with it within {PROGRAM_LIMIT_S:g} s")
    return found == ready + passed
