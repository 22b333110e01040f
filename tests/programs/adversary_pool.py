"""Runs cases, each in a child forked from a process that has imported everything, and judges how
each ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from maxbatch import cli
from maxbatch.commands import COMMANDS
from maxbatch.config.loading import load_config
from maxbatch.system.errors import EXIT_CODES, EXIT_DONE, EXIT_FAILED, EXIT_INPUT
from tests.programs.adversary_cases import Case

LONGEST_S = 10.0  # of a case; more on a machine that has other work
MOST_BYTES = 2 << 30
_LONGEST_LINE = 4000
_SHRINKS = 40  # tries at most for one fault
_READ_BYTES = 1 << 20
_POLL_S = 0.01
# What is written whole or not at all: the flag that names it, for each command.
_OUTPUTS = {
    "import": "--output",
    "export": "--output",
    "prepare": "--output",
    "report": "--output",
    "fit": "--write",
    "compile": "--output",
}
_PACKAGES = (
    "optuna",
    "optuna.storages",
    "bokeh",
    "pyarrow.parquet",
    "tokenizers",
    "jinja2.sandbox",
)
_ROOMS = (
    "run.pretraining",
    "run.compile.saved",
    "run.compile.cache",
    "run.weights.parameters",
    "kinds.prompt.run",
    "around.huggingface.export.model",
    "around.huggingface.export.peft",
    "around.scoring",
    "around.sampling.text",
    "commands.simulation",
)


class Fault(NamedTuple):
    """A rule that a case broke."""

    kind: str  # equal for cases that fail alike
    says: str


class Ended(NamedTuple):
    """How a case ended."""

    code: int  # below 0: of a signal
    seconds: float
    peak_bytes: int
    was_killed: str  # why, or ""
    stdout: str
    stderr: str


class _Worked(BaseException):
    """Raised where a command begins the work that its input asked for: everything was accepted."""


def load_everything() -> None:
    """Imports the commands' late imports, so that a forked child need not."""
    for command in COMMANDS.values():
        importlib.import_module(command.module)
    for name in (*_PACKAGES, *(f"maxbatch.{room}" for room in _ROOMS)):
        importlib.import_module(name)


@contextlib.contextmanager
def without_long_work() -> Iterator[None]:
    """Ends a command with exit 0 where it would train, start processes or compile for minutes."""

    def worked(*arguments: object, **named: object) -> None:
        raise _Worked

    with contextlib.ExitStack() as stack:
        for place in (
            "maxbatch.run.session.Session.run",
            "maxbatch.around.child_runs.supervisor.Supervisor.train",
            "maxbatch.commands.simulation.run_hosts",
            "maxbatch.commands.report._watch",
            "maxbatch.around.compile.compiling.compile_one",
            "maxbatch.around.fit.oracle.CompilerOracle.ask",
        ):
            stack.enter_context(mock.patch(place, worked))
        yield


def run_case(case: Case, root: Path) -> tuple[Fault | None, Ended]:
    """Runs a case in a folder below `root`, which is removed; returns the rule that it broke and
    how it ended.
    """
    place = root / f"case-{os.getpid()}"
    shutil.rmtree(place, ignore_errors=True)
    (place / "home").mkdir(parents=True)
    try:
        case.make(place / "work")
        before = set(_entries(place))
        ended = _run(case, place)
        return _judge(case, place / "work", ended, set(_entries(place)) - before), ended
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run(case: Case, place: Path) -> Ended:
    started = time.monotonic()
    if (pid := os.fork()) == 0:
        _be_the_case(case, place)
    killed, peak = "", 0
    while (waited := os.wait4(pid, os.WNOHANG))[0] == 0:
        peak = max(peak, _resident(pid))
        if time.monotonic() - started > LONGEST_S:
            killed = f"ran longer than {LONGEST_S:g} s"
        elif peak > MOST_BYTES:
            killed = f"took more than {MOST_BYTES >> 30} GB"
        if killed:
            _dump_stack(pid)
            os.kill(pid, signal.SIGKILL)
            waited = os.wait4(pid, 0)
            break
        time.sleep(_POLL_S)
    _, status, usage = waited
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # whatever it started
    texts = [_text(place.parent / f"{place.name}.{name}") for name in ("out", "err")]
    peak = max(peak, usage.ru_maxrss * 1024)
    return Ended(
        os.waitstatus_to_exitcode(status), time.monotonic() - started, peak, killed, *texts
    )


def _be_the_case(case: Case, place: Path) -> None:
    """Runs the command in this process, a forked child, which it ends."""
    code = EXIT_FAILED
    try:
        os.setsid()
        os.chdir(place / "work")
        os.environ["HOME"] = str(place / "home")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number, name in enumerate(("out", "err"), 1):
            os.dup2(
                os.open(f"{place}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number
            )
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
        import faulthandler

        faulthandler.register(signal.SIGUSR1, sys.stderr)
        imported = _output(case, Path.cwd()) or Path("maxbatch.yml")
        is_new = case.arguments[:1] == ("import",) and not os.path.lexists(imported)
        code = cli.main(list(case.arguments))
        if is_new and os.path.isfile(imported):  # of a name too long for a file system it is not
            load_config(imported)  # raises where plan refuses what import wrote
    except _Worked:
        code = EXIT_DONE
    except BaseException:  # as the interpreter would
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _dump_stack(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)


def _judge(case: Case, folder: Path, ended: Ended, new: set[Path]) -> Fault | None:
    command = case.arguments[0] if case.arguments and case.arguments[0] in COMMANDS else "maxbatch"
    said = ended.stderr.strip().splitlines()
    if ended.was_killed:
        return Fault(
            f"{command}: {ended.was_killed}, in {_innermost(ended.stderr)}", ended.stderr[-1500:]
        )
    if "Traceback (most recent call last)" in ended.stderr:
        return Fault(
            f"{command}: traceback, {said[-1].split(':')[0]} in {_last_frame(ended.stderr)}",
            ended.stderr[-1500:],
        )
    if ended.code not in EXIT_CODES:
        return Fault(f"{command}: exit code {ended.code}", ended.stderr[-1500:])
    if ended.peak_bytes > MOST_BYTES:
        return Fault(f"{command}: took {ended.peak_bytes >> 20:,} MB", ended.stderr[-500:])
    errors = [line for line in said if line.startswith("maxbatch: error: ")]
    strange = [line for line in said if not line.startswith("maxbatch: ")]
    if ended.code == EXIT_INPUT and (len(errors) != 1 or said[-1] not in errors or strange):
        return Fault(
            f"{command}: exit 2 with {len(errors)} lines, and {len(strange)} others",
            ended.stderr[-1500:],
        )
    if ended.code == EXIT_FAILED and not errors:
        return Fault(f"{command}: exit 1 without a line", ended.stderr[-1500:])
    if too_long := [line for line in said if len(line) > _LONGEST_LINE]:
        return Fault(
            f"{command}: a line of more than {_LONGEST_LINE} characters", too_long[0][:300]
        )
    if raw := re.search(
        r"[^\n\t\x20-\x7e\x80-\U0010ffff]|[\x80-\x9f\u202a-\u202e\u2066-\u2069]", ended.stderr
    ):
        return Fault(f"{command}: a raw {raw[0]!r} on standard error", repr(ended.stderr[-300:]))
    if raw := re.search(r"[^\n\t\x20-\x7e\x80-\U0010ffff]|[\x80-\x9f]", ended.stdout):
        return Fault(f"{command}: a raw {raw[0]!r} on standard output", repr(ended.stdout[-300:]))
    return _half_written(case, folder, command, ended.code, new)


def _half_written(
    case: Case, folder: Path, command: str, code: int, new: set[Path]
) -> Fault | None:
    unfinished = [path.name for path in new if path.name.startswith(".building-")]
    if unfinished:
        return Fault(f"{command}: leaves an unfinished file, exit {code}", str(unfinished))
    output = _output(case, folder) or (folder / "maxbatch.yml" if command == "import" else None)
    if code not in (EXIT_DONE,) and command in _OUTPUTS and output in new:
        return Fault(f"{command}: exit {code} and its output is there", str(output))
    return None


def _output(case: Case, folder: Path) -> Path | None:
    """Returns the path in a command's flag that must be written atomically."""
    flag = _OUTPUTS.get(case.arguments[0], "") if case.arguments else ""
    words = list(case.arguments)
    given = [word.partition("=")[2] for word in words if flag and word.startswith(f"{flag}=")]
    given += [words[i + 1] for i, word in enumerate(words[:-1]) if flag and word == flag]
    return folder / given[-1] if given and given[-1].strip(".") and "\0" not in given[-1] else None


def _entries(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(parent, name)


def _last_frame(stderr: str) -> str:
    frames = re.findall(r'File "[^"]*?/(maxbatch/[^"]+)", line (\d+), in (\S+)', stderr)
    return ":".join((frames[-1][0], frames[-1][2])) if frames else "?"


def _innermost(stderr: str) -> str:
    """Returns the place that faulthandler names first in maxbatch of the main thread."""
    _, _, main = stderr.rpartition("Current thread")
    frames = re.findall(r'File "[^"]*?/(maxbatch/[^"]+)", line (\d+) in (\S+)', main or stderr)
    return ":".join((frames[0][0], frames[0][2])) if frames else "?"


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def _text(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        text = file.read(_READ_BYTES).decode(errors="replace")
        path.unlink()
        return text
    return ""


def shrunk(case: Case, fault: Fault, root: Path) -> Case:
    """Returns the smallest case found that breaks the same rule."""
    tries, most = 0, 3 if f"{LONGEST_S:g} s" in fault.kind else _SHRINKS
    found = True
    while found and tries < most:
        found = False
        for smaller in case.smaller():
            tries += 1
            again, _ = run_case(smaller, root)
            if again and again.kind == fault.kind:
                case, found = smaller, True
                break
            if tries >= most:
                break
    return case


def run_all(
    make: Callable[[int], Case], numbers: Sequence[int], root: Path, workers: int, until: float
) -> dict:
    """Runs cases in several processes.

    Args:
      make: makes the case of a number.
      numbers: those to run.
      root: a folder for the cases.
      workers: processes.
      until: no case starts after this time, of the monotonic clock.

    Returns:
      `ran`, how many there were; `faults`, by kind the first number and what was said; `counts`, by
      kind how many; `codes`, how often each exit code came; `longest_s` and `most_bytes` of any.
    """
    pids = []
    for worker in range(workers):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                _work(make, numbers[worker::workers], root, root / f"worker-{worker}.jsonl", until)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        pids.append(pid)
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    assert not failed, "a worker of the adversary itself failed"
    found: dict = {
        "ran": 0,
        "faults": {},
        "counts": {},
        "codes": {},
        "longest_s": 0.0,
        "most_bytes": 0,
    }
    for worker in range(workers):
        file = root / f"worker-{worker}.jsonl"
        for number, kind, says, code, seconds, peak in map(
            json.loads, file.read_text().splitlines()
        ):
            found["ran"] += 1
            found["codes"][code] = found["codes"].get(code, 0) + 1
            found["longest_s"], found["most_bytes"] = (
                max(found["longest_s"], seconds),
                max(found["most_bytes"], peak),
            )
            if kind:
                found["counts"][kind] = found["counts"].get(kind, 0) + 1
                found["faults"].setdefault(kind, (number, says))
        file.unlink()
    return found


def _work(
    make: Callable[[int], Case], numbers: Sequence[int], root: Path, report: Path, until: float
) -> None:
    with open(report, "w") as file:
        for number in numbers:
            if time.monotonic() > until:
                break
            fault, ended = run_case(make(number), root)
            figures = ended.code, ended.seconds, ended.peak_bytes
            file.write(json.dumps((number, *(fault or ("", "")), *figures)) + "\n")
            file.flush()
