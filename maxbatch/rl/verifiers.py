"""Ready rewards: a number against the record's answer, and a program against the record's tests.

`reward="maxbatch.rl.verifiers:right_number"` and `reward="maxbatch.rl.verifiers:passes_tests"`.

Limits: a program runs with the rights of its user. Its bounds stop endless loops and large allocations; they are no
wall against a program that is out to do harm.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from fractions import Fraction

_WHOLE = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"
_NUMBER = re.compile(rf"(?:(?<![\w)])[-+])?(?:(?:{_WHOLE})(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\{(\s*[-+]?\d+\s*)\}\{(\s*\d+\s*)\}")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
PROGRAM_LIMIT_S = 5.0  # of a program with its tests
PROGRAM_MEMORY_BYTES = 1 << 30

# Reads the token, the bounds, the program and its tests as one literal from standard input; writes the token once the
# last test has passed. The program has no way to standard output of its own.
_RUNNER = """
import ast, os, resource, signal, sys
token, seconds, memory, program, tests = ast.literal_eval(sys.stdin.read())
answer = os.dup(1)
for stream in (0, 1, 2):
    os.dup2(os.open(os.devnull, os.O_RDWR), stream)
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.alarm(seconds)
names = {"__name__": "__main__"}
exec(compile(program, "response", "exec"), names)
for test in tests:
    exec(compile(test, "test", "exec"), names)
os.write(answer, token.encode())
os._exit(0)
"""


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
    if len(found) > 1 and stated[found[-2].end() : found[-1].start()].strip() == "/" and last:
        return _fraction(found[-2][0]) / last
    return last / 100 if stated[found[-1].end() :].lstrip(" \\").startswith("%") else last


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def passes_tests(prompt: str, response: str, record: dict[str, object]) -> float:
    """Returns 1.0 if the Python program in a response passes all of the record's `tests`, else 0.0.

    The program is the last block between ``` of the response, or all of it. Tests are Python statements that raise
    unless the program is right, such as "assert double(2) == 4": one text or a list of them, after the program in the
    same process. That process is a new one in an empty folder, with `PROGRAM_LIMIT_S` and `PROGRAM_MEMORY_BYTES`.

    Raises:
      ValueError: the record has no `tests`.
    """
    tests = record.get("tests")
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError("the record has no field 'tests', a text or a list of texts")
    blocks = _BLOCK.findall(response)
    return float(_passes(blocks[-1] if blocks else response, tests))


def _passes(program: str, tests: list[str]) -> bool:
    token = secrets.token_hex(16)
    asked = repr((token, int(PROGRAM_LIMIT_S), PROGRAM_MEMORY_BYTES, program, tests)).encode(
        "utf-8", "backslashreplace"
    )
    with tempfile.TemporaryDirectory(prefix="maxbatch-program-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder,
            env={"PATH": os.defpath, "HOME": folder}, start_new_session=True,
        )  # fmt: skip
        try:
            answer, _ = process.communicate(asked, timeout=PROGRAM_LIMIT_S)
        except subprocess.TimeoutExpired:
            answer = b""
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what the program has started
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
    return answer == token.encode()
