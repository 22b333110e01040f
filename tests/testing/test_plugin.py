"""The plugin in sessions of its own: tests of pods that end in every way are reported right, and
nothing is left.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
import xml.etree.ElementTree
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.command import environment
from tests.helpers.processes import wait_for

pytestmark = pytest.mark.processes
CASES = Path(__file__).with_name("cases.py").read_text()


class Ended(NamedTuple):
    outcome: str  # passed, failure, error or skipped
    text: str  # pytest's explanation
    seconds: float


class Run(NamedTuple):
    tests: dict[str, Ended]
    output: str


def start(
    folder: Path, name: str, text: str, *arguments: str, **variables: str
) -> subprocess.Popen[str]:
    (folder / "pytest.ini").write_text("[pytest]")
    (folder / name).write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", name, *arguments],
        env=environment() | variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, name: str, text: str, *arguments: str, **variables: str) -> Run:
    output, _ = start(
        folder, name, text, "--junitxml=found.xml", *arguments, **variables
    ).communicate(timeout=300)
    tests: dict[str, Ended] = {}
    for case in xml.etree.ElementTree.parse(folder / "found.xml").iter("testcase"):
        ends = [child for child in case if child.tag in ("failure", "error", "skipped")]
        text = "\n".join(f"{child.get('message')}\n{child.text}" for child in ends)
        tests[str(case.get("name"))] = Ended(
            ends[0].tag if ends else "passed", text, float(case.get("time", 0))
        )
    return Run(tests, output)


def left(mark: str) -> list[str]:
    """The commands of processes that live and have a variable of this value."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended
    return found


@pytest.fixture(scope="module")
def mark() -> str:
    return str(uuid.uuid4())


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, mark: str) -> Run:
    """All cases, on two workers of pytest-xdist."""
    return run(
        tmp_path_factory.mktemp("cases"), "test_cases.py", CASES, "-n", "2", "-rP", MARK=mark
    )


def test_every_case_ends_as_it_should(ended: Run) -> None:
    outcomes = {name: one.outcome for name, one in ended.tests.items()}
    passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
    assert passed == {
        *(f"test_fixtures_and_parameters[{letter}-{n}]" for letter in "ab" for n in (1, 2)),
        "test_of_unittest",
        "test_collective",
        "test_host_1_skips",
        "test_loses_a_host",
        "test_waits_for_a_stopped_host",
        "test_after_all_of_them",
    }, ended.output
    skipped = {name for name, outcome in outcomes.items() if outcome == "skipped"}
    assert skipped == {"test_skipped", "test_skips_itself", "test_expected_on_host_1"}
    assert {name for name, outcome in outcomes.items() if outcome == "error"} == {
        "test_slow_fixture",
        "test_bad_end",
    }


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "test_assert_on_host_1",
            [r"^host 1: ", "- host 1 -", r"E +Differing items:\n", "{'host': 1} != {'host': 0}"],
        ),
        (
            "test_assert_while_the_other_waits",
            ["^host 1: ", "host 0 still ran 3 s after host 1 had failed", r"total\(pod\)"],
        ),
        ("test_same_everywhere", ["^hosts 0, 1: RuntimeError: everywhere"]),
        ("test_unpicklable_error", ["^hosts 0, 1: .*Unpicklable"]),
        ("test_sys_exit", ["^hosts 0, 1: SystemExit: 4"]),
        ("test_os_exit", ["^host 1 ended with exit code 3", "host 0 ran -", r"pod\.barrier\(\)"]),
        ("test_killed", ["^host 1 was killed by SIGKILL", "host 0 ran -", r"total\(pod\)"]),
        (
            "test_hang",
            ["^host 1 still ran after 6 s, the timeout of the test", r"time\.sleep\(600\)"],
        ),
        (
            "test_deadlock",
            ["^host 0 still ran after 6 s, the timeout of the test", r"total\(pod\)"],
        ),
        (
            "test_slow_fixture",
            ["host 0 still ran after 6 s, the timeout of the test", r"in slow\n"],
        ),
        ("test_bad_end", ["host 1: ", "in bad_end|def bad_end"]),
        (
            "test_forgotten_barrier",
            [r"^host 0: .*host 1 ended the test without coming to this pod\.barrier\(\)"],
        ),
        ("test_unexpected_pass", [r"\[XPASS\(strict\)\]"]),
        ("test_unexpected_error", ["^hosts 0, 1: TypeError: another"]),
    ],
)
def test_a_failure_is_told_once_with_its_host(ended: Run, case: str, said: list[str]) -> None:
    text = ended.tests[case].text
    for one in said:
        assert re.search(one, text, re.M), text
    assert len(re.findall(r"^E +(assert|\w*Error)", text, re.M)) <= 1, text


def test_what_a_host_prints_stands_under_its_name_also_if_it_is_killed(ended: Run) -> None:
    assert re.search(r"Captured output of host 1, call -+\nprinted on 1\n", ended.output)
    assert re.search(r"Captured output of host 1, call -+\nbefore\n", ended.output)


def test_a_test_costs_half_a_second_at_most_once_its_hosts_run(ended: Run) -> None:
    costs = [
        one.seconds
        for name, one in ended.tests.items()
        if name.startswith("test_fixtures_and_parameters")
    ]
    assert sorted(costs)[1] <= 0.5, costs  # each worker started hosts for one of them


def test_nothing_outlives_the_tests(ended: Run, mark: str) -> None:
    assert left(mark) == []


ENDLESS = """
import subprocess, sys, time
import pytest

@pytest.mark.pod(devices=2, hosts=2)
def test_endless(pod):
    subprocess.Popen(["sleep", "600"])
    open(f"ready{pod.host}", "w").close()
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_session_that_is_interrupted_or_killed(
    tmp_path: Path, how: signal.Signals
) -> None:
    mark = str(uuid.uuid4())
    process = start(tmp_path, "test_endless.py", ENDLESS, MARK=mark)
    wait_for(lambda: all((tmp_path / f"ready{host}").exists() for host in range(2)), process)
    assert len(left(mark)) == 5
    os.kill(process.pid, how)
    output, _ = process.communicate(timeout=120)
    wait_for(lambda: not left(mark), seconds=10)
    assert process.returncode == (2 if how == signal.SIGINT else -how), output
    assert how == signal.SIGKILL or "KeyboardInterrupt" in output


BROKEN = """
import os
import pytest

@pytest.fixture(scope="session")
def number(pod):
    yield 1
    assert pod.host == 0, "at the end"

@pytest.mark.pod(devices=1)
def test_one_host(pod, number):
    assert pod.num_hosts == 1

@pytest.mark.pod(devices=2, hosts=2)
def test_two_hosts(pod, number):
    pass

@pytest.mark.pod(devices=3, hosts=2)
def test_hosts_that_do_not_divide():
    pass

@pytest.mark.pod(hots=2)
def test_misspelt():
    pass

def test_unmarked(pod):
    pass

@pytest.mark.parametrize("process", [os.getpid()])
@pytest.mark.pod(devices=1)
def test_other_parameters(process):
    pass
"""


def test_faults_of_a_marker_and_of_a_session_are_named(tmp_path: Path) -> None:
    found = run(tmp_path, "test_broken.py", BROKEN, "-p", "no:randomly")
    said = {
        "test_hosts_that_do_not_divide": "devices=3, hosts=2: the hosts must divide the devices; works: hosts=1",
        "test_misspelt": r"(?m)^@pytest.mark.pod: pod\(\) got an unexpected keyword argument 'hots'$",
        "test_unmarked": "the fixture pod needs the marker",
    }
    for name, text in said.items():
        assert re.search(text, found.tests[name].text), found.output
    others = next(
        one for name, one in found.tests.items() if name.startswith("test_other_parameters")
    )
    assert "is not among the tests that this host collects" in others.text
    assert found.tests["test_one_host"].outcome == found.tests["test_two_hosts"].outcome == "passed"
    assert "host 1, at the end of its session" in found.output and "at the end" in found.output


def test_a_debugger_is_refused_where_a_test_is_marked(tmp_path: Path) -> None:
    output, _ = start(tmp_path, "test_endless.py", ENDLESS, "--pdb").communicate(timeout=60)
    said = (
        "ERROR: --pdb: cannot reach the hosts of test_endless.py::test_endless; works: --pdb -m "
        "'not pod'"
    )
    assert said in output.splitlines(), output


COVERED = """
import pytest

def only(host):
    if host == 0:
        return "host 0"
    return "host 1"

@pytest.mark.pod(devices=2, hosts=2)
def test_covered(pod):
    assert only(pod.host) == f"host {pod.host}"
"""


def test_coverage_counts_the_lines_of_every_host(tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    (tmp_path / "test_covered.py").write_text(COVERED)
    for words in (["run", "-p", "-m", "pytest", "test_covered.py"], ["combine"], ["report", "-m"]):
        done = subprocess.run(
            [sys.executable, "-m", "coverage", *words],
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"test_covered\.py +\d+ +0 +100%", done.stdout), done.stdout
