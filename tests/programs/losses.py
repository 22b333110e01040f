"""Machines lost at random moments of a run, which continues on the others from their local disks.

Part of the soak: `python -m tests.programs.soak --losses 20 --seed 1`. A run on 4 simulated hosts,
each with a disk of its own, loses one, goes on with 3, then 2, then 3 and 4 again. Half of the
machines are lost with their disks. Those that come back later bring old states along. The number of
hosts stays where none has saved since the last loss: the second copies make up for one machine, and
not for two at a time.

Every restart must succeed and repeat at most `local_checkpoint_period` updates. What a loss leaves
must have ended with one line that names the host. The parts of all sessions must add up to the time
that the run took.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from maxbatch.run.folder.sessions import read_sessions, total_seconds
from maxbatch.system.errors import EXIT_FAILED, EXIT_STOPPED
from maxbatch.system.storage.storage import as_path

PERIOD = 3
# Of widths that 2, 3 and 4 hosts divide: each of them holds a part of every matrix.
KEYS = (
    "base_emb_dim=48",
    "base_mlp_dim=96",
    "steps=60",
    "batch_size_schedule=0:8 320:10",
    "per_device_batch_size=2",
    "batch_padding=true",
    "checkpoint_period=20",
)
# The timeout is that of a machine with more processes than cores, where a host may stand still.
_LOCAL = (
    f"local_checkpoint_period={PERIOD}",
    "local_checkpoint_directory=~/ram",
    "log_period=1",
    "heartbeat_timeout_s=300",
)
_HOSTS = (4, 3, 2, 3)  # in turn
_END_S = 120.0  # in which a run whose host was killed has ended
_LONGEST_START_S = 900.0
_POLL_S = 0.05
_OUTSIDE_S = 2.0  # of a start: before its clock begins and after it ends
_SITE = """
    import os
    host = os.environ.get("JAX_PROCESS_ID")
    if host is not None:
        os.environ["HOME"] = os.path.join(os.environ["DISKS"], host)
"""
_STEP, _RESUMED = (
    re.compile(r"(?m)^step (\d+)/\d+ \| loss"),
    re.compile(r"resumed at step (\d+), .* from (\w+ )?checkpoints"),
)


class LossError(Exception):
    """A promise that did not hold."""


@dataclasses.dataclass
class Losses:
    """The runs of one place that lose machines."""

    folder: Path  # on this machine: working folders, logs, disks
    place: str  # where the runs lie
    arguments: tuple[str, ...]  # of `maxbatch train`, but for run_dir and the hosts
    environment: dict[str, str]
    random: random.Random
    tolerance: float  # of the wall time, which the parts of all sessions add up to
    losses: int = 0
    starts: int = 0
    runs: int = 0
    disks_lost: int = 0
    # from a loss to the end of the others
    ends_s: list[float] = dataclasses.field(default_factory=list)
    back_s: list[float] = dataclasses.field(default_factory=list)  # from a loss to the next update
    repeated: list[int] = dataclasses.field(default_factory=list)  # updates, by restart
    goodputs: list[float] = dataclasses.field(default_factory=list)  # by run

    @property
    def run_dir(self) -> str:
        return f"{self.place}/lost-{self.runs}"

    @property
    def _disks(self) -> Path:
        return self.folder / "disks"

    def run(self, most: int) -> None:
        """Trains one run to its end, which loses at most so many machines."""
        shutil.rmtree(self._disks, ignore_errors=True)
        begun, turn, done, lost_at = time.time(), 0, 0, list[float]()
        while True:
            hosts = _HOSTS[turn % len(_HOSTS)]
            session = _Session(self, hosts, lost_at)
            lost = session.lose_a_host() if most > 0 else None
            code = session.end()
            self._check(session, code, lost, done)
            done = session.recorded or done
            if lost is None or code == 0:
                break
            most -= 1
            self.losses += 1
            times = f"{self.ends_s[-1]:.1f} s to the end of the others"
            print(
                f"{self.losses}: {self.run_dir} lost host {lost} of {hosts} after update "
                f"{session.recorded}, {times}"
            )
            turn += session.has_saved
            self._lose(lost, hosts, session.has_saved)
        self._check_clock(session.log.stat().st_mtime - begun)

    def _check(self, session: _Session, code: int, lost: int | None, done: int) -> None:
        said, where = session.log.read_text(), f"{self.run_dir}, start {self.starts}"
        if session.resumed is not None:
            repeated = max(0, done - session.resumed)
            self.repeated.append(repeated)
            if repeated > PERIOD:
                raise LossError(f"{where}: repeats {repeated} updates: {said[-3000:]}")
        if code and lost is None:
            raise LossError(f"{where}: a start that lost nothing failed: {said[-3000:]}")
        if not code:
            return
        named = [
            line
            for line in said.splitlines()
            if line.startswith(f"maxbatch: error: host {lost} of ")
        ]
        codes = (
            (EXIT_STOPPED,) if max(done, session.recorded) > PERIOD else (EXIT_STOPPED, EXIT_FAILED)
        )
        if len(named) != 1 or code not in codes:
            raise LossError(f"{where}: lost host {lost} and ended with {code}: {said[-3000:]}")

    def _lose(self, lost: int, hosts: int, may_lose_disk: bool) -> None:
        """Orders the disks for the next start: of the survivors, of the host that was lost, of the
        others.
        """
        if may_lose_disk and self.random.random() < 0.5:
            self.disks_lost += 1
            shutil.rmtree(self._disks / str(lost), ignore_errors=True)
        others = [number for number in range(max(_HOSTS)) if number != lost]
        order = [*others[: hosts - 1], lost, *others[hosts - 1 :]]
        moved = self.folder / "disks-before"
        self._disks.rename(moved)
        self._disks.mkdir()
        for place, number in enumerate(order):
            if (moved / str(number)).exists():
                (moved / str(number)).rename(self._disks / str(place))
        shutil.rmtree(moved)

    def _check_clock(self, wall_s: float) -> None:
        seconds = total_seconds(read_sessions(as_path(self.run_dir)))
        self.goodputs.append(seconds["updates_kept"] / sum(seconds.values()))
        if abs(sum(seconds.values()) - wall_s) > self.tolerance * wall_s + _OUTSIDE_S:
            raise LossError(
                f"{self.run_dir}: its sessions have {sum(seconds.values()):.1f} s of {wall_s:.1f} s"
            )

    def summary(self) -> str:
        """Returns the counts and times in words."""
        back, ends = sorted(self.back_s), sorted(self.ends_s)
        times = (
            ""
            if not back
            else (
                f", from a loss to the next update {statistics.median(back):.1f} s (median), "
                f"{back[-1]:.1f} s (worst), to the end of the others "
                f"{statistics.median(ends):.1f} s"
            )
        )
        return (
            f"{self.losses} machines lost, {self.disks_lost} with their disks, {self.starts} "
            f"starts, {self.runs} whole runs, at most {max(self.repeated, default=0)} updates "
            f"repeated{times}; goodput " + ", ".join(f"{one:.1%}" for one in self.goodputs)
        )


class _Session:
    """A start of a run."""

    def __init__(self, losses: Losses, hosts: int, lost_at: list[float]) -> None:
        self._of, self._hosts, self._lost_at = losses, hosts, lost_at
        self._begun, self._first = time.monotonic(), 0  # the first update that was seen
        self._killed_at: float | None = None
        losses.starts += 1
        folder, site = losses.folder / f"start-{losses.starts}", losses.folder / "site"
        folder.mkdir()
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(textwrap.dedent(_SITE))
        for host in range(hosts):
            (losses._disks / str(host)).mkdir(parents=True, exist_ok=True)
        variables = losses.environment | {
            "DISKS": str(losses._disks),
            "HOME": str(losses._disks / "0"),  # of the command itself
            "PYTHONPATH": os.pathsep.join([str(site), losses.environment["PYTHONPATH"]]),
        }
        self.log = folder / "log"
        simulated = ("--simulate-devices", str(hosts), "--simulate-hosts", str(hosts))
        command = (
            sys.executable,
            "-m",
            "maxbatch",
            "train",
            *losses.arguments,
            *_LOCAL,
            f"run_dir={losses.run_dir}",
        )
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [*command, *simulated],
                env=os.environ | variables,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def recorded(self) -> int:
        """The last update that it recorded; 0 if there is none."""
        return max(map(int, _STEP.findall(self.log.read_text())), default=0)

    @property
    def resumed(self) -> int | None:
        """The update after which it went on; None if it ended before that was known."""
        found = _RESUMED.search(self.log.read_text())
        return int(found[1]) if found else 0 if self.recorded else None

    @property
    def has_saved(self) -> bool:
        """Whether all hosts have written a local checkpoint of it."""
        return any(step % PERIOD == 0 for step in range((self.resumed or 0) + 1, self.recorded))

    def lose_a_host(self) -> int | None:
        """Kills a host at a random moment; returns its index, None if the run has ended before."""
        chance = self._of.random
        if chance.random() < 0.2:
            seconds = chance.uniform(0.5, 30.0)  # perhaps while it starts
            is_alive = self._reach(lambda recorded: time.monotonic() - self._begun > seconds)
        else:
            updates = chance.randint(1, 8)
            is_alive = self._reach(lambda recorded: recorded >= self._first + updates - 1 > 0)
            time.sleep(chance.uniform(0.0, 0.3))
        if not is_alive or not self._reach(
            lambda recorded: len(_hosts_of(self.process.pid)) == self._hosts
        ):
            return None
        hosts = _hosts_of(self.process.pid)
        if not hosts:
            return None
        lost = chance.choice(sorted(hosts))
        with contextlib.suppress(ProcessLookupError):
            os.kill(hosts[lost], signal.SIGKILL)
        self._killed_at = time.monotonic()
        return lost

    def _reach(self, moment: Callable[[int], bool]) -> bool:
        """Waits for a moment, given the last update; returns whether the run is still alive."""
        while time.monotonic() - self._begun < _LONGEST_START_S:
            recorded = self.recorded
            if recorded and not self._first:
                self._first = recorded
                found = [time.monotonic() - lost for lost in self._lost_at]
                for seconds in found:
                    print(
                        f"{self._of.run_dir}: {seconds:.1f} s from a loss to update {recorded} on "
                        f"{self._hosts} hosts"
                    )
                self._of.back_s += found
                self._lost_at.clear()
            if self.process.poll() is not None:
                return False
            if moment(recorded):
                return True
            time.sleep(_POLL_S)
        raise LossError(
            f"{self._of.run_dir}: nothing after {_LONGEST_START_S:.0f} s: "
            f"{self.log.read_text()[-3000:]}"
        )

    def end(self) -> int:
        """Waits for its end; returns its exit code."""
        if self._killed_at is None:
            self._reach(lambda recorded: False)
            return self.process.wait()
        code = self.process.wait(_END_S)
        self._of.ends_s.append(time.monotonic() - self._killed_at)
        self._lost_at.append(self._killed_at)
        return code


def _hosts_of(pid: int) -> dict[int, int]:
    """Returns the processes of the hosts of a command, by their index."""
    found = {}
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            index = re.search(
                rb"(?:^|\0)JAX_PROCESS_ID=(\d+)\0", Path(f"/proc/{word}/environ").read_bytes()
            )
            if index:
                found[int(index[1])] = int(word)
    return found
