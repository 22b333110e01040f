"""A soak: runs are killed at random moments and restarted, until they match an unharmed run.

`python -m tests.programs.soak --kills 20 --seed 1 --stores gs s3 local`; with `--losses 20` hosts
are lost instead, and the run goes on with the others (`tests/programs/losses.py`)

Tokens and run_dir lie in an emulated store of which a share of all requests fails, or on the disk.
A kill is a -9 of the whole process group, of the command alone (its hosts must die with it), or of
one host. Every start is made from another working folder. After a kill no process may be left, and
the next start must not be refused. Where a run has ended, its metrics are those of the unharmed
run: the same steps, positions and fingerprints, losses within 2e-4.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from maxbatch.run.folder.sessions import read_sessions, total_seconds
from maxbatch.system.storage.leases import LEASE_FILE
from maxbatch.system.storage.storage import AnyPath, as_path, copy_tree, is_remote
from tests.helpers.command import QUICK_TO_COMPILE
from tests.helpers.stores import SCHEMES, Store, serving
from tests.helpers.tiny import ONE_LAYER, TINY_MODEL
from tests.programs import losses as losing
from tests.programs.losses import LossError, Losses
from tests.programs.suspensions import SuspensionError, Suspensions

T = TypeVar("T")

KINDS = ("group", "command", "host")
STEPS = 20
EXACT = ("step", "samples_seen", "global_batch_size", "stage", "data_fingerprint")
LOSS_TOLERANCE = 2e-4
_TRAINING = (
    *TINY_MODEL,
    ONE_LAYER,
    "dataset_type=tokens",
    "learning_rate=1e-2",
    "generate_prompt=",
    "eval_interval=-1",
    "batch_size_schedule=0:4 40:8",
    "per_device_batch_size=4",
    f"steps={STEPS}",
    "checkpoint_period=5",
)
_UNHARMED = "unharmed"  # folder of the run that nobody harms
_MARK = "SOAK_OF"  # environment variable that marks the processes of one soak
_END_S = 120.0  # in which a run whose host was killed has ended
_GONE_S = 30.0  # in which no process is left
_LONGEST_START_S = 900.0
WALL_TOLERANCE = 0.02  # of the wall time that the parts of all sessions add up to


class SoakError(Exception):
    """A promise that did not hold."""


@dataclasses.dataclass
class Soak:
    """One place of runs, with its counts."""

    folder: Path  # on this machine: working folders, logs, caches
    place: str  # where the runs and their tokens lie: a folder, or a bucket
    random: random.Random
    expected: list[dict]  # the records of the unharmed run
    lasts_s: float  # of that run, from command to end
    kills: int = 0
    starts: int = 0
    runs: int = 0
    by_kind: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    @property
    def run_dir(self) -> str:
        """The run that is at work."""
        return f"{self.place}/run-{self.runs}"

    def go_on(self, kind: str | None) -> None:
        """Starts the run and kills it at a random moment, or (None) lets it end; a run that ended
        is compared.
        """
        hosts = 2 if kind in ("command", "host") else self.random.choice((1, 2))
        process, log = self._start(hosts)
        is_killed = bool(kind) and self._kill(process, kind)
        process.wait(_LONGEST_START_S)
        self._check_nothing_is_left()
        if is_killed:
            self.kills += 1
            self.by_kind[kind] += 1
            self._leave_a_strangers_lease()
        elif process.returncode:
            raise SoakError(
                f"{self.run_dir}: a start that nobody harmed failed: {log.read_text()[-2000:]}"
            )
        if process.returncode == 0:
            compare(as_path(self.run_dir), self.expected)
            if (as_path(self.run_dir) / LEASE_FILE).exists():
                raise SoakError(f"{self.run_dir}: the run has ended, and its lease is there")
            self.runs += 1

    def _start(self, hosts: int) -> tuple[subprocess.Popen[bytes], Path]:
        self.starts += 1
        folder = self.folder / f"start-{self.starts}"
        folder.mkdir()
        simulated = (f"--simulate-hosts={hosts}",) if hosts > 1 else ("--simulate-devices=1",)
        data = (f"dataset_path={self.place}/tokens", f"run_dir={self.run_dir}")
        log = folder / "log"
        return start(("train", *_TRAINING, *data, *simulated), folder, log), log

    def _kill(self, process: subprocess.Popen[bytes], kind: str) -> bool:
        """Kills at a random moment; returns whether there was something to kill by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.random.uniform(0.1, 0.6 * self.lasts_s))
            return False
        hosts = children(process.pid)
        if kind == "host" and not hosts:
            kind = "group"  # it has not started them yet
        if kind == "host":
            _kill_one(self.random.choice(hosts))
            process.wait(_END_S)
        elif kind == "command":
            process.kill()
            process.wait()
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return True

    def _check_nothing_is_left(self) -> None:
        end = time.monotonic() + _GONE_S
        while left := marked_processes(str(self.folder)):
            if time.monotonic() > end:
                raise SoakError(f"processes {left} are left {_GONE_S:.0f} s after the kill")
            time.sleep(0.05)

    def _leave_a_strangers_lease(self) -> None:
        """Makes one of twenty leases that are left another machine's: the next start has to wait
        for the lapse.
        """
        lease = as_path(self.run_dir) / LEASE_FILE
        if not is_remote(self.run_dir) or self.random.random() > 0.05 or not lease.exists():
            return
        lease.write_text(
            json.dumps(json.loads(lease.read_text()) | {"machine": "another", "host": "elsewhere"})
        )


def start(arguments: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts `maxbatch ARGUMENTS` in a folder, as a process group of its own that carries the
    soak's mark.
    """
    variables = _variables(folder.parent)
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "maxbatch", *arguments],
            env=os.environ | variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _variables(folder: Path) -> dict[str, str]:
    """Returns the environment of a soak's processes beyond this one's."""
    return {
        "XLA_FLAGS": QUICK_TO_COMPILE,
        "JAX_PLATFORMS": "cpu",
        # what one store's runs compile, those of the others need not
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        _MARK: str(folder),
    }


def finish(arguments: Sequence[str], folder: Path) -> None:
    """Runs a command to its end, which must be a good one."""
    folder.mkdir()
    process = start(arguments, folder, folder / "log")
    if process.wait(_LONGEST_START_S):
        raise SoakError(f"maxbatch {arguments[0]} failed: {(folder / 'log').read_text()[-2000:]}")


def children(pid: int) -> list[int]:
    """Returns the children of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill_one(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def marked_processes(mark: str) -> list[int]:
    """Returns the processes that carry a soak's mark and live."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                folder.name.isdigit()
                and f"{_MARK}={mark}\0".encode() in (folder / "environ").read_bytes()
            ):
                found.append(int(folder.name))
    return found


def records(run_dir: AnyPath) -> list[dict]:
    """Returns the lines of a run's metrics."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def compare(run_dir: AnyPath, expected: list[dict]) -> None:
    """Raises SoakError unless a run has the steps, fingerprints and losses that are expected."""
    found = records(run_dir)
    if [one["step"] for one in found] != list(range(1, len(expected) + 1)):
        raise SoakError(f"{run_dir}: the steps are {[one['step'] for one in found]}")
    for one, other in zip(found, expected, strict=True):
        if wrong := [key for key in EXACT if one[key] != other[key]]:
            raise SoakError(f"{run_dir}: step {one['step']} has another {', '.join(wrong)}")
        if abs(one["loss"] - other["loss"]) > LOSS_TOLERANCE:
            raise SoakError(
                f"{run_dir}: step {one['step']} has loss {one['loss']}, and not {other['loss']}"
            )
    sessions = read_sessions(run_dir)
    counted_s, wall_s = (
        sum(total_seconds(sessions).values()),
        sessions[-1].ended - sessions[0].started,
    )
    if abs(counted_s - wall_s) > WALL_TOLERANCE * wall_s:
        raise SoakError(f"{run_dir}: its sessions have {counted_s:.1f} s of {wall_s:.1f} s")


def _documents(path: Path) -> None:
    rng = random.Random(0)
    lines = (
        json.dumps({"text": f"{number} " + "word " * rng.randrange(60)}) for number in range(400)
    )
    path.write_text("\n".join(lines))


@contextlib.contextmanager
def _places(stores: Sequence[str], folder: Path) -> Iterator[dict[str, tuple[str, Store | None]]]:
    """Starts the stores and yields the place of each one's runs."""
    with contextlib.ExitStack() as stack:
        found: dict[str, tuple[str, Store | None]] = {}
        for name in stores:
            if name == "local":
                found[name] = str(folder / "disk"), None
            else:
                store = stack.enter_context(serving(name))
                found[name] = store.bucket(), store
        yield found


def soak(
    stores: Sequence[str],
    kills: int,
    seed: int,
    share: float,
    harm: Callable[[Soak, int], T],
    *keys: str,
) -> list[tuple[str, T]]:
    """Harms runs in several stores at the same time; returns the counts of each. `keys` are further
    ones of them.

    Raises:
      SoakError: a promise did not hold.
    """
    folder = Path(tempfile.mkdtemp(prefix="maxbatch-soak-"))
    try:
        unharmed = _unharmed_run(folder / _UNHARMED, keys)
        with _places(stores, folder) as places, ThreadPoolExecutor(len(stores)) as pool:

            def one(name: str, kills: int) -> T:
                place, store = places[name]
                (folder / name).mkdir()
                copy_tree(folder / _UNHARMED / "tokens", as_path(f"{place}/tokens"))
                found = Soak(folder / name, place, random.Random(f"{seed} {name}"), *unharmed)
                if store:
                    store.plan(share=share, seed=seed)
                return harm(found, kills)

            each, rest = divmod(kills, len(stores))
            found = list(
                pool.map(one, stores, [each + (number < rest) for number in range(len(stores))])
            )
    finally:
        for name in (*stores, _UNHARMED):
            for pid in marked_processes(str(folder / name)):
                _kill_one(pid)
    shutil.rmtree(folder, ignore_errors=True)  # what a failure left is kept
    return list(zip(stores, found, strict=True))


def _unharmed_run(folder: Path, keys: Sequence[str]) -> tuple[list[dict], float]:
    """Prepares the tokens of all places and trains on them; returns the records, and the seconds
    that it took.
    """
    folder.mkdir()
    _documents(folder / "documents.jsonl")
    data = (
        "dataset_type=jsonl",
        f"dataset_path={folder}/documents.jsonl",
        "--output",
        f"{folder}/tokens",
    )
    finish(("prepare", *data), folder / "preparing")
    data = (f"dataset_path={folder}/tokens", f"run_dir={folder}/run", "--simulate-devices=1")
    begun = time.monotonic()
    finish(("train", *_TRAINING, *keys, *data), folder / "training")
    lasted_s = time.monotonic() - begun
    print(f"a run that nobody harms lasts {lasted_s:.1f} s")
    return records(folder / "run"), lasted_s


def _suspend_again_and_again(one: Soak, suspends: int) -> Suspensions:
    """Stops writers, and compares each run with the unharmed one."""
    data = (f"dataset_path={one.place}/tokens", "--simulate-devices=1")
    often = ("checkpoint_period=2", "max_num_checkpoints_to_keep=2")
    arguments = (*_TRAINING, *often, *data)
    found = Suspensions(one.folder, one.place, arguments, _variables(one.folder), one.random)
    while found.suspends < suspends:
        before, begun = found.suspends, time.monotonic()
        found.run(min(suspends - before, one.random.randint(1, 4)))
        compare(as_path(found.run_dir), one.expected)
        found.check_checkpoints()
        seconds = time.monotonic() - begun
        print(
            f"{found.suspends}/{suspends} {found.run_dir}: {found.suspends - before} stopped, "
            f"{seconds:.1f} s"
        )
        found.runs += 1
    return found


def _lose_again_and_again(one: Soak, losses: int) -> Losses:
    """Loses machines, and compares each run with the unharmed one."""
    arguments = (*_TRAINING, *losing.KEYS, f"dataset_path={one.place}/tokens")
    found = Losses(
        one.folder, one.place, arguments, _variables(one.folder), one.random, WALL_TOLERANCE
    )
    while found.losses < losses:
        before, begun = found.losses, time.monotonic()
        found.run(losses - before)
        compare(as_path(found.run_dir), one.expected)
        seconds = time.monotonic() - begun
        print(
            f"{found.losses}/{losses} {found.run_dir}: {found.losses - before} machines lost, "
            f"{seconds:.1f} s"
        )
        print(f"{one.place}: {found.summary()}")
        found.runs += 1
    return found


def _kill_again_and_again(one: Soak, kills: int) -> Soak:
    while one.kills < kills:
        before, begun = one.kills, time.monotonic()
        kind = one.random.choice(KINDS)
        one.go_on(kind)
        seconds = time.monotonic() - begun
        what = f"killed ({kind})" if one.kills > before else "ended"
        print(f"{one.kills}/{kills} {one.run_dir}: {what} after {seconds:.1f} s")
    begun = time.monotonic()
    one.go_on(None)
    print(f"{one.place}: the last run ended after {time.monotonic() - begun:.1f} s")
    return one


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a soak; returns 0 where every promise held."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.soak",
        description=" ".join(__doc__.partition("\n\n")[0].split()),
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--suspends", type=int, help="writers to stop for longer than their lease, instead of kills"
    )
    parser.add_argument(
        "--losses",
        type=int,
        help="machines to lose, instead of kills; the run goes on with the others",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stores", nargs="+", choices=("local", *SCHEMES), default=["gs", "s3", "local"]
    )
    parser.add_argument("--share", type=float, default=0.1, help="of the requests that fail")
    arguments = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)
    begun, seed = time.monotonic(), arguments.seed
    try:
        if arguments.suspends:
            stopped = soak(
                arguments.stores, arguments.suspends, seed, 0.0, _suspend_again_and_again
            )
            for name, one in stopped:
                ends = ", ".join(f"{count} {how}" for how, count in one.ends.items())
                print(
                    f"{name}: {one.suspends} writers stopped ({ends}), {one.runs} runs as the "
                    "unharmed one"
                )
        elif arguments.losses:
            lost = soak(
                arguments.stores,
                arguments.losses,
                seed,
                arguments.share,
                _lose_again_and_again,
                *losing.KEYS,
            )
            for name, found in lost:
                print(f"{name}: {found.summary()}")
        else:
            for name, one in soak(
                arguments.stores, arguments.kills, seed, arguments.share, _kill_again_and_again
            ):
                kinds = ", ".join(f"{count} {kind}" for kind, count in one.by_kind.items())
                print(
                    f"{name}: {one.kills} kills ({kinds}), {one.starts} starts, {one.runs} runs "
                    "as the unharmed one"
                )
    except (SoakError, SuspensionError, LossError) as error:
        print(f"soak: seed {seed}: {error}", file=sys.stderr)
        return 1
    print(f"every promise held; {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
