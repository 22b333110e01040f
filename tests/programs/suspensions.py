"""Writers that are stopped for longer than their lease, at random moments, and go on while another
one holds it.

Part of the soak: `python -m tests.programs.soak --suspends 50 --seed 1 --stores gs s3`. The lease
lasts `LAPSE_S` here. A writer is stopped at a random moment, the next one takes its lease over, and
at a random moment after that the first is continued: it ends with one line, or it had not taken the
lease, or had given it back. Where a run has ended and all its writers have, its metrics are those
of the unharmed run, each checkpoint is whole, and no unfinished one counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from maxbatch.run.folder.position import committed_steps
from maxbatch.system.storage.leases import LEASE_FILE
from maxbatch.system.storage.storage import as_path

LAPSE_S = 3.0
MOMENTS = ("lease", "staging", "lines", "checkpoint", "done")
_QUICK_LEASES = (
    "import sys; from maxbatch.system.storage import leases; from maxbatch.cli import main\n"
    f"leases.LAPSE_S, leases.RENEW_S, leases._LOOK_S = {LAPSE_S}, {LAPSE_S / 2}, 0.2\n"
    "sys.exit(main(sys.argv[1:]))"
)
_LOST = re.compile(
    r"maxbatch: error: .*(another process holds its lease now|the lease is given back); this one stops"
)
_REFUSED = re.compile(
    r"maxbatch: error: .* is training in it; wait for it, or give another run_dir"
)
_END_S = 180.0


class SuspensionError(Exception):
    """A promise that did not hold."""


@dataclasses.dataclass
class Writer:
    """A start of a run."""

    process: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> int:
        """Waits for its end; returns its exit code after checking that a failure is one line."""
        code = self.process.wait(_END_S)
        said = self.log.read_text()
        errors = [line for line in said.splitlines() if "error:" in line]
        lost_or_refused = {1: _LOST, 2: _REFUSED}.get(code)
        is_told = lost_or_refused and len(errors) == 1 and lost_or_refused.search(errors[0])
        if (code and not is_told) or "Traceback" in said:
            raise SuspensionError(f"a writer ended with {code}: {said[-3000:]}")
        return code


@dataclasses.dataclass
class Suspensions:
    """The runs of one place whose writers are stopped."""

    folder: Path  # on this machine: working folders, logs
    place: str  # where the runs lie
    arguments: tuple[str, ...]  # of `maxbatch train`, but for run_dir
    environment: dict[str, str]
    random: random.Random
    suspends: int = 0
    runs: int = 0
    starts: int = 0
    ends: Counter[str] = dataclasses.field(default_factory=Counter)  # of writers that were stopped

    @property
    def run_dir(self) -> str:
        return f"{self.place}/suspended-{self.runs}"

    def start(self) -> Writer:
        self.starts += 1
        folder = self.folder / f"writer-{self.starts}"
        folder.mkdir()
        command = [
            sys.executable,
            "-c",
            _QUICK_LEASES,
            "train",
            *self.arguments,
            f"run_dir={self.run_dir}",
        ]
        with open(folder / "log", "wb") as output:
            process = subprocess.Popen(
                command,
                env=os.environ | self.environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Writer(process, folder / "log")

    def run(self, most: int) -> None:
        """Trains one run to its end, stopping its writers at most so many times."""
        writer, stopped = self.start(), list[Writer]()
        while most > 0 and self._reach_a_moment(writer):
            most -= 1
            self.suspends += 1
            writer.signal(signal.SIGSTOP)
            stopped.append(writer)
            writer = self.start()
            if self.random.random() < 0.7:  # the others go on when the run has ended
                self._reach_a_moment(writer, new=True)
                self._continue(stopped.pop())
        code = writer.end()
        for one in stopped:
            self._continue(one)
        if code:
            writer = self.start()  # it was too late, or too early, for the lease
            code = writer.end()
        if code:
            raise SuspensionError(
                f"{self.run_dir}: nobody ends the run: {writer.log.read_text()[-2000:]}"
            )

    def _continue(self, writer: Writer) -> None:
        writer.signal(signal.SIGCONT)
        self.ends[{0: "had ended", 1: "lost its lease", 2: "was refused"}[writer.end()]] += 1

    def _reach_a_moment(self, writer: Writer, new: bool = False) -> bool:
        """Waits until a writer is somewhere in its work; returns whether it is still there."""
        moment, end = self.random.choice(MOMENTS), time.monotonic() + _END_S
        before = self._seen()
        while time.monotonic() < end and writer.process.poll() is None:
            now = self._seen()
            if now["holder"] == writer.process.pid and (
                moment == "lease" or (now[moment] and now[moment] != before[moment])
            ):
                break
            time.sleep(0.05)
        time.sleep(self.random.uniform(0.0, 0.6))
        return writer.process.poll() is None

    def _seen(self) -> dict[str, object]:
        """Checks the files left by writers."""
        there, found = as_path(self.run_dir), dict[str, object](holder=None, lines=0, done=0)
        with contextlib.suppress(FileNotFoundError, ValueError):
            found["holder"] = json.loads((there / LEASE_FILE).read_bytes()).get("pid")
        with contextlib.suppress(FileNotFoundError):
            found["lines"] = (there / "metrics.jsonl").stat().version
        names = set[str]()
        with contextlib.suppress(FileNotFoundError):  # also where it vanishes while it is listed
            names = {path.name for path in (there / "checkpoints").iterdir()}
        found["done"] = done = committed_steps(there)
        found["staging"] = sorted(names - set(map(str, done)))
        found["checkpoint"] = sorted(names)
        return found

    def check_checkpoints(self) -> None:
        """Raises SuspensionError unless every checkpoint of the run that counts can be read,
        checksums included.
        """
        rows = self.folder / "rows.jsonl"
        rows.write_text('{"tokens": [1, 2, 3]}\n')
        steps = committed_steps(as_path(self.run_dir))
        for step in steps:
            command = [
                sys.executable,
                "-m",
                "maxbatch",
                "score",
                f"{self.run_dir}/checkpoints/{step}",
                str(rows),
            ]
            read = subprocess.run(
                command, env=os.environ | self.environment, capture_output=True, text=True
            )
            if read.returncode:
                raise SuspensionError(f"{self.run_dir}: checkpoint {step}: {read.stderr[-2000:]}")
        if not steps:
            raise SuspensionError(f"{self.run_dir}: no checkpoint is left")
