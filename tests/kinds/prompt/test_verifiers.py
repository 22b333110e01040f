"""Ready rewards: numbers, and programs in processes with bounds of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxbatch.rl import verifiers
from maxbatch.rl.verifiers import passes_tests, right_number


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("It is 41, no: 42.", 42, 1.0),
        ("42 is right, not 41", "42", 0.0),
        ("so \\boxed{42} is it, after 3 steps", "42", 1.0),
        ("12 apples\n#### 1,200", "3 x 400\n#### 1200.0", 1.0),
        ("one half: 1/2", 0.5, 1.0),
        ("\\boxed{\\frac{1}{3}}", "1/3", 1.0),
        ("0.3333", "1/3", 0.0),
        ("-7", "7", 0.0),
        ("50%", "1/2", 1.0),
        ("1e3", 1000, 1.0),
        ("1/0", 0, 1.0),
        ("no number", 0, 0.0),
        ("", 0, 0.0),
        ("9" * 5000, 9, 0.0),
        ("1e1000000000", 0, 0.0),
        ("1e-2", "0.01", 1.0),
    ],
)
def test_the_last_number_is_compared_exactly(response: str, answer: object, score: float) -> None:
    assert right_number("", response, {"answer": answer}) == score


def test_a_record_without_an_answer_or_tests_is_a_failure_and_no_score() -> None:
    for record in ({}, {"answer": "none", "tests": []}):
        with pytest.raises(ValueError, match="no field 'answer'"):
            right_number("", "1", record)
        with pytest.raises(ValueError, match="no field 'tests'"):
            passes_tests("", "1", record)


RIGHT = (
    "Here it is:\n```python\nimport math\ndef double(x):\n    return math.prod([2, x])\n```\nThat "
    "is all."
)
TESTS = {"tests": ["assert double(2) == 4", "assert double(0) == 0"]}


@pytest.mark.runs
def test_a_program_passes_all_of_its_tests_or_has_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes_tests("", RIGHT, TESTS) == 1.0
    assert passes_tests("", "def double(x):\n    return x + 2", {"tests": TESTS["tests"][0]}) == 1.0
    monkeypatch.setattr(verifiers, "PROGRAM_MEMORY_BYTES", 1 << 28)
    wrong = (
        "def double(x):\n    return x + 2",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "double = (",
        "double = lambda x: 2 * x\nlist(range(1 << 26))",
        "print('x' * 10)",
        "import os\nfor i in range(3, 20):\n    try:\n        while True: os.write(i, b'x' * "
        "65536)\n    except OSError: pass",
    )
    for program in wrong:
        assert passes_tests("", program, TESTS) == 0.0, program


def test_a_program_passes_whatever_it_leaves_behind() -> None:
    forks = (
        "import os\nif not os.fork():\n    import time\n    time.sleep(61.3)\ndef double(x):\n    "
        "return 2 * x"
    )
    assert passes_tests("", forks, TESTS) == 1.0


def test_a_process_that_cannot_begin_is_a_failure_and_no_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifiers, "_ROOT", "/nowhere")
    monkeypatch.setattr(verifiers.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        passes_tests("", RIGHT, TESTS)


def test_a_program_ends_with_the_process_that_asked(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    program = (
        "import os, signal, time\nsignal.alarm(0)\nos.fork()\nwhile True:\n"
        f"    open({str(marks)!r}, 'ab').write(b'x')\n    time.sleep(0.02)"
    )
    asking = (
        f"from maxbatch.rl.verifiers import passes_tests\npasses_tests('', {program!r}, "
        "{'tests': 'pass'})"
    )
    process = subprocess.Popen([sys.executable, "-c", asking])
    end = time.monotonic() + 60
    while not marks.exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.wait()
    time.sleep(0.2)
    size = marks.stat().st_size
    time.sleep(0.3)
    assert marks.stat().st_size == size


def test_a_program_that_never_ends_is_stopped_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifiers, "PROGRAM_LIMIT_S", 1.0)
    started = time.monotonic()
    endless = "import subprocess\nsubprocess.Popen(['sleep', '61.2'])\nwhile True: pass"
    assert passes_tests("", endless, TESTS) == 0.0
    assert time.monotonic() - started < 30
