"""Rewards that come with maxbatch: a number against the record's answer, and a program against the
record's tests.

`reward="maxbatch.rl.verifiers:right_number"` and `reward="maxbatch.rl.verifiers:passes_tests"`.

Limits: a program runs with its user's rights. The limits apply per process, and a process that
leaves its group survives. They stop endless loops and large allocations, but not a malicious
program.
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
_MOST_DIGITS, _MOST_EXPONENT = 1000, 1000  # bounds of a number
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\{(\s*[-+]?\d+\s*)\}\{(\s*\d+\s*)\}")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
PROGRAM_LIMIT_S = 5.0  # per program with its tests
PROGRAM_MEMORY_BYTES = 1 << 30

# Its argument is maxbatch's folder; one line of standard input has the limits, two tokens, the
# program and its tests as a literal. It writes the first token when the limits are set, and the
# second after the last test passed.
_RUNNER = """
import ast, os, resource, signal, sys
sys.path.append(sys.argv.pop())
from maxbatch.system.processes.child_process import end_with_parent
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
    """Returns 1.0 if a response's final number equals the record's `answer`, else 0.0.

    The final number is in \\boxed{}, else after `####`, else the last in the text. The same applies
    to `answer`, a number or a text. Numbers are compared exactly: 1,200 is 1200.0, and 1/2 is 0.5.

    Raises:
      ValueError: the record has no `answer` with a number.
    """
    expected = _last_number(str(record.get("answer", "")))
    if expected is None:
        raise ValueError("the record has no field 'answer' with a number in it")
    return float(_last_number(response) == expected)


def _last_number(text: str) -> Fraction | None:
    """Returns a text's final number, or None."""
    boxed = _BOXED.findall(_FRACTION.sub(r"\1/\2", text))
    answer = boxed[-1] if boxed else text.rpartition("####")[2]
    answer = _FRACTION.sub(r"\1/\2", answer)
    numbers = list(_NUMBER.finditer(answer))
    if not numbers:
        return None
    last = _fraction(numbers[-1][0])
    if last is None:
        return None
    if len(numbers) > 1 and answer[numbers[-2].end() : numbers[-1].start()].strip() == "/" and last:
        first = _fraction(numbers[-2][0])
        return None if first is None else first / last
    return last / 100 if answer[numbers[-1].end() :].lstrip(" \\").startswith("%") else last


def _fraction(text: str) -> Fraction | None:
    """Parses a number; None if it is too long or too large to compute with."""
    digits, _, exponent = text.replace(",", "").lower().partition("e")
    if len(digits) > _MOST_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > _MOST_EXPONENT:
        return None
    return Fraction(digits) * Fraction(10) ** int(exponent or 0)


def passes_tests(prompt: str, response: str, record: dict[str, object]) -> float:
    """Returns 1.0 if a response's Python program passes all of the record's `tests`, else 0.0.

    The program is the response's last ``` block, or all of it. Tests are Python statements that
    raise unless the program is right, such as "assert double(2) == 4", as one text or a list. They
    run after the program in the same new process, in an empty folder, limited by `PROGRAM_LIMIT_S`
    and `PROGRAM_MEMORY_BYTES`.

    Raises:
      ValueError: the record has no `tests`.
      RuntimeError: the process could not start the program.
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
    bounds = {
        "RLIMIT_AS": PROGRAM_MEMORY_BYTES,
        "RLIMIT_CPU": seconds,
        "RLIMIT_FSIZE": 1 << 20,
        "RLIMIT_CORE": 0,
    }
    request = repr((seconds, bounds, ready, passed, program, tests)).encode(
        "utf-8", "backslashreplace"
    )
    # The answer goes to a file, so RLIMIT_FSIZE bounds any output of the program.
    with (
        tempfile.TemporaryDirectory(
            prefix="maxbatch-program-", ignore_cleanup_errors=True
        ) as folder,
        tempfile.TemporaryFile() as answer,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER, _ROOT],
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
            env={
                "PATH": os.defpath,
                "HOME": folder,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request + b"\n")
                process.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PROGRAM_LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # including the program's children
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        answer.seek(0)
        output = answer.read(len(ready + passed) + 1).decode(errors="replace")
    if not output.startswith(ready):
        raise RuntimeError(f"the program did not start within {PROGRAM_LIMIT_S:g} s")
    return output == ready + passed
